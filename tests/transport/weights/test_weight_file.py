"""A file of weights is one of safetensors, and is used only if it is what the rank wrote."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nbtrain.errors import NbtrainError
from nbtrain.transport.weights import state_io
from nbtrain.transport.weights.models import named_tensors
from nbtrain.transport.weights.state_io import WeightFile, WeightReader, save, stamp
from nbtrain.transport.weights.tensors import PLAIN_DTYPES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a small model."""
    model = torch.nn.Linear(64, 32)
    path = tmp_path / "model.safetensors"
    save(state_io.module_file(model, named_tensors(model)), path)
    return path


def load(path: Path, target: torch.nn.Module) -> None:
    with WeightReader(path) as file:
        state_io.prepare_load(file, target)()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)


def _huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def _negative_offsets(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("damage", [_cut, _one_bit, _huge_header, _negative_offsets])
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, 12345, -1)
    with pytest.raises(NbtrainError, match=r"belongs to another user \(uid 12345\)"):
        WeightReader(path)


def test_a_load_that_fails_halfway_says_that_the_model_has_some_of_its_tensors(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file system may fail, or a device's memory be full."""
    original = WeightReader.tensors

    def tensors(file: WeightReader, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(original(file, names))
        raise OSError("the disk is gone")

    monkeypatch.setattr(WeightReader, "tensors", tensors)
    target = torch.nn.Linear(64, 32)
    with WeightReader(path) as file:
        load_it = state_io.prepare_load(file, target)
        with pytest.raises(state_io.PartlyLoaded, match=r"^only 1 of its 2 tensors .*disk is gone"):
            load_it()


def test_it_leaves_no_descriptor(path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    load(path, torch.nn.Linear(64, 32))
    _one_bit(path)
    with pytest.raises(NbtrainError):
        load(path, torch.nn.Linear(64, 32))
    _cut(path)
    with pytest.raises(NbtrainError):
        WeightReader(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


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


def tensors() -> dict[str, torch.Tensor]:
    """Return one of each kind, some of them on one memory, one of them not finite."""
    whole = torch.arange(24.0)
    each = {name: whole.to(getattr(torch, name)) for name in PLAIN_DTYPES}
    each |= {f"odd{i}": torch.full((i,), i, dtype=torch.int8) for i in (0, 1, 7)}
    each |= {'Zürich 🏔 "1"\'': whole[:5], "part": whole[3:], "scalar": torch.tensor(2.5)}
    each |= {"across": whole.view(4, 6).t(), "nan": torch.tensor([1.0, torch.nan])}
    return {**each, "no rows": torch.empty(0, 3), "nothing of it": whole[4:4]}


def test_safetensors_reads_every_kind_of_tensor(path: Path) -> None:
    content = tensors()
    assert save(WeightFile(content, {"kind": "model"}), path) == ["nan"]
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == content.keys()
    for name, tensor in content.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].view(-1).tolist() == tensor.reshape(-1).tolist() or name == "nan"
    assert path.stat().st_mode & 0o777 == 0o600
    with WeightReader(path) as file:
        file.check()
        assert file.about["not_finite"] == ["nan"]


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
