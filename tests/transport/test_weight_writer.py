"""A file of weights is one of safetensors' own, whatever is in it."""

from __future__ import annotations

import errno
import json
import resource
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nbtrain.transport import weights
from nbtrain.transport.tensor_kinds import DTYPES
from nbtrain.transport.weight_reader import WeightReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    """Return one of each kind, some of them on one memory, one of them not finite."""
    whole = torch.arange(24.0)
    each = {name: whole.to(getattr(torch, name.partition(".")[2])) for name in DTYPES}
    each |= {f"odd{i}": torch.full((i,), i, dtype=torch.int8) for i in (0, 1, 7)}
    each |= {'Zürich 🏔 "1"\'': whole[:5], "part": whole[3:], "scalar": torch.tensor(2.5)}
    return {**each, "across": whole.view(4, 6).t(), "nan": torch.tensor([1.0, torch.nan])}


def test_safetensors_reads_every_kind_of_tensor(path: Path) -> None:
    content = tensors()
    assert weights.save(weights.WeightFile(content, {"kind": "model"}), path) == ["nan"]
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


def test_a_file_without_tensors_is_one_too(path: Path) -> None:
    weights.save(weights.WeightFile({}, {"kind": "model"}), path)
    assert safetensors.torch.load_file(path) == {}
    with WeightReader(path) as file:
        file.check()


def test_tensors_are_aligned_for_who_maps_them(path: Path) -> None:
    weights.save(weights.WeightFile(tensors(), {}), path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            size = tensors()[name].element_size()
            assert entry["data_offsets"][0] % size == 0


def test_it_is_written_where_no_thread_can_be_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    weights.save(weights.WeightFile(tensors(), {}), path)
    with WeightReader(path) as file:
        file.check()


def test_what_the_disk_refuses_is_an_oserror(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            weights.save(weights.WeightFile({"a": torch.ones(4096)}), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
