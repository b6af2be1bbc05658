"""Files that grow on one host, copied to another: nothing twice, nothing left out, in order."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbtrain.engines.cluster import copying
from nbtrain.engines.cluster.copying import BATCH, PART, RATE, Copy, Pace, appended


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_what_was_appended_is_copied_once_and_in_order(there: Path, here: Path) -> None:
    copy = Copy(here, ["a", "b", "absent"])
    assert appended(there, copy.have) == {}
    write(there / "a", b"one\n")
    first = appended(there, copy.have)
    assert first == {"a": (0, b"one\n")}
    assert copy.add(first)
    write(there / "a", b"two\n")
    write(there / "b", b"three\n")
    write(there / "other", b"not asked for\n")
    assert copy.add(appended(there, copy.have))
    assert not copy.add(first)
    assert appended(there, copy.have) == {}
    assert (here / "a").read_bytes() == b"one\ntwo\n"
    assert sorted(os.listdir(here)) == ["a", "b"]


def test_what_comes_twice_late_or_with_a_gap_is_taken_at_its_place(here: Path) -> None:
    copy = Copy(here, ["a"])
    assert not copy.add({"a": (4, b"later")})  # what is between has not come
    assert not copy.add({"b": (0, b"of another run")})
    assert copy.add({"a": (0, b"0123")})
    assert copy.add({"a": (2, b"2345")})  # asked for by two at the same time
    assert not copy.add({"a": (0, b"0123")})
    assert copy.add({"a": (6, b"67")})
    assert (here / "a").read_bytes() == b"01234567"
    assert copy.have == {"a": 8}


def test_another_attempt_goes_on_behind_what_the_one_before_left(there: Path, here: Path) -> None:
    write(here / "a", b'{"attempt": 1}\n')
    write(here / "b", b'{"attempt": 1}\n{"its node was lo')
    write(here / "c", b"")
    copy = Copy(here, ["a", "b", "c", "d"])
    for name in copy.have:
        write(there / name, b'{"attempt": 2}\n')
    assert copy.add(appended(there, copy.have))
    assert (here / "a").read_bytes() == b'{"attempt": 1}\n{"attempt": 2}\n'
    assert (here / "b").read_bytes().endswith(b'{"its node was lo\n{"attempt": 2}\n')
    assert (here / "c").read_bytes() == (here / "d").read_bytes() == b'{"attempt": 2}\n'


def test_it_is_told_what_is_lacking(here: Path) -> None:
    copy = Copy(here, ["a", "b"])
    copy.add({"a": (0, b"1234")})
    assert copy.lacks({"a": 4, "b": 0, "stranger": 9}) == {}
    assert copy.lacks({"a": 6, "b": 1}) == {"a": 4, "b": 0}


def test_a_batch_is_limited_and_each_file_has_its_share(there: Path, here: Path) -> None:
    names = [f"log-{i}" for i in range(20)]
    for name in names:
        write(there / name, bytes(2 * PART))
    found = appended(there, dict.fromkeys(names, 0))
    assert sorted(found) == sorted(names)
    assert sum(len(data) for _, data in found.values()) <= BATCH
    assert len({len(data) for _, data in found.values()}) == 1
    assert len(appended(there, {"log-0": 0})["log-0"][1]) == PART
    copy, batches = Copy(here, ["log-0"]), 0
    while copy.add(appended(there, copy.have)):
        batches += 1
    assert batches == 2
    assert copy.have["log-0"] == 2 * PART


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes (its SIGXFSZ is ignored by Python)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_full_disk_does_not_take_is_asked_for_again(there: Path, here: Path) -> None:
    write(there / "a", b"0123456789")
    copy = Copy(here, ["a"])
    with full_disk(6):
        assert copy.add(appended(there, copy.have))
        assert copy.have == {"a": 6}
        assert not copy.add(appended(there, copy.have))
    assert copy.add(appended(there, copy.have))
    assert (here / "a").read_bytes() == b"0123456789"


def test_a_folder_that_is_gone_is_no_error(there: Path, here: Path) -> None:
    copy = Copy(here, ["a"])
    here.rmdir()
    assert not copy.add({"a": (0, b"x")})
    there.rmdir()
    assert appended(there, {"a": 0}) == {}
    assert copying.size(there, "a") == 0


def test_a_few_may_follow_at_once_then_the_rate_holds() -> None:
    pace, now, at = Pace(now=0.0), 0.0, list[float]()
    for _ in range(100):
        at.append(now)
        now += pace.wait(now)
    assert at[int(RATE)] == 0.0
    assert 100 / now == pytest.approx(RATE, rel=0.1)
    assert at[-1] - at[-2] == pytest.approx(1 / RATE)
    now += 1000
    waits = [pace.wait(now) for _ in range(int(RATE) + 1)]  # a few may hurry again, no more
    assert waits[:-1] == [0.0] * int(RATE)
    assert waits[-1] > 0
