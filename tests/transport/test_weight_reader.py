"""A file of weights is used only if it is, bit by bit, what the rank wrote."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nbtrain.errors import NbtrainError
from nbtrain.transport import weight_reader, weights
from nbtrain.transport.weight_reader import WeightReader, stamp
from tests.support.waiting import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a small model."""
    model = torch.nn.Linear(64, 32)
    path = tmp_path / "model.safetensors"
    weights.save(weights.of_module(model, weights.named_tensors(model)), path)
    return path


def load(path: Path, target: torch.nn.Module) -> None:
    with WeightReader(path) as file:
        weights.prepared_load(file, target)()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _cut_in_the_header(path: Path) -> None:
    os.truncate(path, 50)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)


def _another_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[32, 64]", b"[64, 32]"))


def _more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def _no_json(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"x" + data[9:])


def _negative_offsets(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    "damage",
    [
        *(_cut, _cut_in_the_header, _empty, _one_bit, _another_shape, _more, _huge_header),
        *(_no_json, _negative_offsets),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_is_changed(
    path: Path, damage: Callable[[Path], None]
) -> None:
    target = torch.nn.Linear(64, 32)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    damage(path)
    with pytest.raises(NbtrainError, match=f"{path} is damaged: "):
        load(path, target)
    assert all(target.state_dict()[name].equal(tensor) for name, tensor in before.items())


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(NbtrainError, match="is not a file that a run saved"):
        WeightReader(path)


def test_a_file_of_an_earlier_version_says_how_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "early.safetensors"
    about = json.dumps({"kind": "model"})
    safetensors.torch.save_file({"weight": torch.ones(2)}, path, {"nbtrain": about})
    with pytest.raises(NbtrainError, match=r"an earlier version.*load_file"):
        WeightReader(path)


def test_what_is_no_file_of_this_user_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    for place, reason in (
        (link, "is a link"),
        (pipe, "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
    ):
        with pytest.raises(NbtrainError, match=reason):
            WeightReader(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, 12345, -1)
    with pytest.raises(NbtrainError, match=r"belongs to another user \(uid 12345\)"):
        WeightReader(path)


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_who_would_cut_an_open_file_short_waits_until_it_is_closed(path: Path) -> None:
    target, size = torch.nn.Linear(64, 32), path.stat().st_size
    with WeightReader(path) as file:
        load_it = weights.prepared_load(file, target)
        code = f"import os; print('go', flush=True); os.truncate({str(path)!r}, 3)"
        cutter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert cutter.stdout is not None
        assert cutter.stdout.readline() == b"go\n"
        wchan = Path(f"/proc/{cutter.pid}/stat")
        wait_until(lambda: wchan.read_text().rpartition(")")[2].split()[0] in "SD")
        load_it()
        assert path.stat().st_size == size
    cutter.wait()
    cutter.stdout.close()
    assert path.stat().st_size == 3
    assert target.weight.isfinite().all()


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_file_is_read_alike_mapped_and_not(
    path: Path, has_lease: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.transport.weight_reader.CHUNK", 4096)
    monkeypatch.setattr("nbtrain.transport.weight_writer.CHUNK", 4096)
    if not has_lease:
        monkeypatch.setattr("nbtrain.transport.weight_reader._take_lease", lambda _: None)
    model, target = torch.nn.Linear(100, 32), torch.nn.Linear(100, 32)
    weights.save(weights.of_module(model, weights.named_tensors(model)), path)
    load(path, target)
    assert target.weight.equal(model.weight)
    assert target.bias.equal(model.bias)


def test_a_deleted_file_that_is_open_is_still_read(path: Path) -> None:
    expected = safetensors.torch.load_file(path)
    target = torch.nn.Linear(64, 32)
    with WeightReader(path) as file:
        path.unlink()
        path.write_bytes(b"another file")
        weights.prepared_load(file, target)()
    assert target.weight.equal(expected["weight"])


def test_a_file_that_fails_while_it_is_loaded_is_said_to_be_loaded_in_part(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lease can be had: on a network, off Linux."""
    monkeypatch.setattr("nbtrain.transport.weight_reader._take_lease", lambda descriptor: None)
    target = torch.nn.Linear(64, 32)
    with WeightReader(path) as file:
        load_it = weights.prepared_load(file, target)
        os.truncate(path, path.stat().st_size - 4 * 64 * 31)
        with pytest.raises(weights.PartlyLoaded, match=r"^only \d of its 2 tensors were loaded"):
            load_it()


def test_it_leaves_no_descriptor(path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    load(path, torch.nn.Linear(64, 32))
    _one_bit(path)
    with pytest.raises(NbtrainError):
        load(path, torch.nn.Linear(64, 32))
    _empty(path)
    with pytest.raises(NbtrainError):
        WeightReader(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been read for its checksum."""
    read = list[str]()
    original = weight_reader.checksum

    def counting(chunks: Iterator[torch.Tensor]) -> str:
        read.append(original(chunks))
        return read[-1]

    monkeypatch.setattr(weight_reader, "checksum", counting)
    return read


def _has_leases(path: Path) -> bool:
    with WeightReader(path) as file:
        return weight_reader._has_lease(file._descriptor)


def test_what_nobody_has_touched_since_the_rank_wrote_it_is_not_read_twice(
    path: Path, checks: list[str]
) -> None:
    if not _has_leases(path):
        pytest.skip("this file system has no leases")
    written = stamp(path)
    with WeightReader(path, written) as file:
        file.check()
    assert not checks
    with path.open("r+b"), WeightReader(path, written) as file:  # somebody could write to it
        file.check()
    assert len(checks) == 2
    with WeightReader(path) as file:  # nobody says how it was
        file.check()
    assert len(checks) == 4


@pytest.mark.parametrize("way", ["write", "map"])
def test_what_somebody_has_touched_is_checked(path: Path, way: str) -> None:
    written, times = stamp(path), path.stat()
    with path.open("r+b") as file:
        if way == "map":
            with mmap.mmap(file.fileno(), 0) as mapping:
                mapping[-1000] ^= 4
        else:
            file.seek(-1000, os.SEEK_END)
            file.write(b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with WeightReader(path, written) as reader, pytest.raises(NbtrainError, match="is damaged"):
        reader.check()


def test_what_is_on_the_disk_only_is_checked(tmp_path: Path, checks: list[str]) -> None:
    model = torch.nn.Linear(1000, 1000)
    path = tmp_path / "model.safetensors"
    weights.save(weights.of_module(model, weights.named_tensors(model)), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if weight_reader._is_in_memory(file.fileno()):
            pytest.skip("this file system has all in memory")
    with WeightReader(path, stamp(path)) as reader:
        reader.check()
    assert len(checks) == 2
