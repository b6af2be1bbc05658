"""Files that grow on one host, copied to another: nothing twice, nothing left out, in order."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbtrain.transport.file_sync import FileCopies, read_appended
from nbtrain.transport.limits import CHUNK_BYTES


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
    copy = FileCopies(here, ["a", "b", "absent"])
    assert read_appended(there, copy.have) == {}
    write(there / "a", b"one\n")
    first = read_appended(there, copy.have)
    assert first == {"a": (0, b"one\n")}
    assert copy.add(first)
    write(there / "a", b"two\n")
    write(there / "b", b"three\n")
    write(there / "other", b"not asked for\n")
    assert copy.add(read_appended(there, copy.have))
    assert not copy.add(first)
    assert read_appended(there, copy.have) == {}
    assert (here / "a").read_bytes() == b"one\ntwo\n"
    assert sorted(os.listdir(here)) == ["a", "b"]


def test_parts_that_come_twice_late_or_with_a_gap_go_to_their_place(here: Path) -> None:
    copy = FileCopies(here, ["a"])
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
    copy = FileCopies(here, ["a", "b", "c", "d"])
    for name in copy.have:
        write(there / name, b'{"attempt": 2}\n')
    assert copy.add(read_appended(there, copy.have))
    assert (here / "a").read_bytes() == b'{"attempt": 1}\n{"attempt": 2}\n'
    assert (here / "b").read_bytes().endswith(b'{"its node was lo\n{"attempt": 2}\n')
    assert (here / "c").read_bytes() == (here / "d").read_bytes() == b'{"attempt": 2}\n'


def test_files_that_lack_bytes_are_named(here: Path) -> None:
    copy = FileCopies(here, ["a", "b"])
    copy.add({"a": (0, b"1234")})
    assert copy.lacks({"a": 4, "b": 0, "stranger": 9}) == {}
    assert copy.lacks({"a": 6, "b": 1}) == {"a": 4, "b": 0}


def test_a_batch_is_limited_and_each_file_has_its_share(there: Path, here: Path) -> None:
    names = [f"log-{i}" for i in range(20)]
    for name in names:
        write(there / name, bytes(2 * CHUNK_BYTES))
    parts_read = read_appended(there, dict.fromkeys(names, 0))
    assert sorted(parts_read) == sorted(names)
    assert sum(len(data) for _, data in parts_read.values()) <= CHUNK_BYTES
    assert len({len(data) for _, data in parts_read.values()}) == 1
    assert len(read_appended(there, {"log-0": 0})["log-0"][1]) == CHUNK_BYTES
    copy, batches = FileCopies(here, ["log-0"]), 0
    while copy.add(read_appended(there, copy.have)):
        batches += 1
    assert batches == 2
    assert copy.have["log-0"] == 2 * CHUNK_BYTES


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
    copy = FileCopies(here, ["a"])
    with full_disk(6):
        assert copy.add(read_appended(there, copy.have))
        assert copy.have == {"a": 6}
        assert not copy.add(read_appended(there, copy.have))
    assert copy.add(read_appended(there, copy.have))
    assert (here / "a").read_bytes() == b"0123456789"
