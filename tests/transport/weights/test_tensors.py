"""Tensors of every kind that a module may hold: they are copied back, or the reason is named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nbtrain
from nbtrain.transport.weights import state_io
from nbtrain.transport.weights.models import named_tensors
from nbtrain.transport.weights.state_io import WeightReader
from nbtrain.transport.weights.tensors import (
    fingerprint,
    fingerprints,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # that sparse, nested, quantized are in beta


class Tagged(Tensor):
    """A subclass without a content of its own."""


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _nested(seed: int, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([_numbers(seed, 2, 3), _numbers(seed, 4, 3)], layout=layout)


KINDS: dict[str, Callable[[int], Tensor]] = {
    "float64": lambda n: _numbers(n, 3).double(),
    "bfloat16": lambda n: _numbers(n, 3).bfloat16(),
    "float8_e4m3fn": lambda n: _numbers(n, 3).to(torch.float8_e4m3fn),
    "int8": lambda n: torch.arange(n, n + 5).to(torch.int8),
    "uint16": lambda n: torch.arange(n, n + 5).to(torch.uint16),
    "bool": lambda n: _numbers(n, 40) > 0,
    "complex128": lambda n: torch.complex(_numbers(n, 3), _numbers(n + 1, 3)).to(torch.complex128),
    "conjugated": lambda n: torch.complex(_numbers(n, 3), _numbers(n + 1, 3)).conj(),
    "0-dim": lambda n: _numbers(n),
    "not contiguous": lambda n: _numbers(n, 4, 5).t(),
    "channels last": lambda n: _numbers(n, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda n: _numbers(n, 1, 3).expand(2, 3),
    "sparse_coo": lambda n: torch.diag(torch.arange(float(n), n + 3)).to_sparse(),
    "sparse_csr": lambda n: torch.diag(torch.arange(float(n), n + 3)).to_sparse_csr(),
    "sparse_bsr": lambda n: torch.diag(torch.arange(float(n), n + 4)).to_sparse_bsr((2, 2)),
    "quantized": lambda n: torch.quantize_per_tensor(_numbers(n, 6), n / 10, n, torch.qint8),
    "quantized by channel": lambda n: torch.quantize_per_channel(
        _numbers(n, 2, 3), torch.tensor([0.1, n / 10]), torch.tensor([0, n]), 0, torch.quint8
    ),
    "nested": lambda n: _nested(n, torch.strided),
    "jagged": lambda n: _nested(n, torch.jagged),
    "a subclass": lambda n: _numbers(n, 3).as_subclass(Tagged),
}
"""A tensor of each kind, by its content: another one for 1 and for 2, which has as many values."""


class Holder(nn.Module):
    """A model with a tensor of some kind among its buffers, or its parameters."""

    def __init__(self, extra: Tensor, is_parameter: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        if is_parameter:
            self.extra = nn.Parameter(extra, requires_grad=False)
        else:
            self.register_buffer("extra", extra)


def give(model: Holder, extra: Tensor) -> None:
    """Have a model hold another tensor, as a training step would."""
    is_parameter = "extra" in dict(model.named_parameters())
    delattr(model, "extra")
    if is_parameter:
        model.extra = nn.Parameter(extra, requires_grad=False)
    else:
        model.register_buffer("extra", extra)
    with torch.no_grad():
        model.linear.weight += 1


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_and_loaded_in_place(kind: str, is_parameter: bool, tmp_path: Path) -> None:
    try:
        trained = Holder(KINDS[kind](1), is_parameter)
        here = Holder(KINDS[kind](1), is_parameter)
    except RuntimeError as error:
        pytest.skip(f"torch has no such parameter: {error}")
    before = fingerprints(named_tensors(trained))
    give(trained, KINDS[kind](2))
    content = state_io.module_changes(trained, named_tensors(trained), {}, before)
    assert content is not None
    state_io.save(content, tmp_path / "model")
    extra = here.extra
    with WeightReader(tmp_path / "model") as file:
        state_io.prepare_load(file, here, is_handed_over=True)()
    assert here.extra is extra
    assert fingerprint(extra) == fingerprint(KINDS[kind](2))
    assert here.linear.weight.equal(trained.linear.weight)


@pytest.mark.parametrize("is_parameter", [False, True])
def test_all_of_them_come_back_from_a_run(is_parameter: bool) -> None:
    models: dict[str, Holder] = {}
    for kind, build in KINDS.items():
        try:
            models[kind] = Holder(build(1), is_parameter)
        except RuntimeError:
            assert is_parameter  # torch has no parameter of some kinds
    assert len(models) > 15

    def train(models: dict[str, Holder]) -> None:
        for kind, model in models.items():
            give(model, KINDS[kind](2))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not updated")
        nbtrain.launch(train, models, num_processes=2, view="none")
    wrong = [k for k, m in models.items() if fingerprint(m.extra) != fingerprint(KINDS[k](2))]
    assert not wrong


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda n: torch.empty(n + 2, device="meta"), r"`extra` .*has no memory"),
        (lambda n: torch.full((3, 3), float(n)).to_mkldnn(), r"`extra` .*oneDNN"),
    ],
)
def test_what_cannot_come_back_is_named(extra: Callable[[int], Tensor], reason: str) -> None:
    model = Holder(extra(1), False)
    before = copy.deepcopy(model.linear.weight)

    def train(model: Holder) -> None:
        give(model, extra(2))

    with pytest.warns(UserWarning, match=f"model was not updated: {reason}"):
        nbtrain.launch(train, model, num_processes=2, view="none")
    assert model.linear.weight.equal(before)
