"""A model's tensors in a file, and back in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from nbtrain.errors import NbtrainError
from nbtrain.transport.weights import state_io
from nbtrain.transport.weights.models import named_tensors
from nbtrain.transport.weights.state_io import WeightFile, WeightReader
from nbtrain.transport.weights.tensors import fingerprints, is_lazy


class Net(torch.nn.Module):
    """Has tied weights, buffers of three kinds and a frozen part."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("cache", torch.rand(2), persistent=False)
        self.register_buffer("row", torch.arange(3).expand(4, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embed(x)))
        return result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def save(module: torch.nn.Module, path: Path) -> WeightFile:
    parcel = state_io.module_file(module, named_tensors(module))
    state_io.save(parcel, path)
    return parcel


def load(path: Path, target: object, **options: bool) -> None:
    with WeightReader(path) as file:
        state_io.prepare_load(file, target, **options)()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(named_tensors(one).values(), named_tensors(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_model_is_loaded_in_place(path: Path) -> None:
    theirs, mine = Net().eval(), Net()
    theirs.norm.running_mean += 3  # type: ignore[operator]
    parcel = save(theirs, path)
    assert "head.weight" not in parcel.tensors
    before = {n: (id(t), t.data_ptr()) for n, t in named_tensors(mine).items()}
    load(path, mine)
    assert same(mine, theirs)
    assert {n: (id(t), t.data_ptr()) for n, t in named_tensors(mine).items()} == before
    assert mine.head.weight is mine.embed.weight
    assert mine.training
    assert not mine.norm.bias.requires_grad
    assert mine.embed.weight.requires_grad


def test_the_notebook_keeps_its_dtype(path: Path) -> None:
    theirs, mine = Net().bfloat16(), Net()
    save(theirs, path)
    load(path, mine)
    assert mine.embed.weight.dtype == torch.float32
    assert torch.equal(mine.embed.weight, theirs.embed.weight.float())


def test_what_was_only_cast_is_no_less_precise_here(path: Path) -> None:
    mine = Net()
    with torch.no_grad():
        mine.embed.weight[0, 0] = 1e5  # infinite in half precision
    theirs = copy.deepcopy(mine).half()
    save(theirs, path)
    before = copy.deepcopy(mine)
    load(path, mine)
    assert same(mine, before)
    with torch.no_grad():
        theirs.norm.weight += 1
    save(theirs, path)
    load(path, mine)
    assert torch.equal(mine.embed.weight, before.embed.weight)
    assert (mine.norm.weight == 2).all()


def test_only_what_differs_is_written(path: Path) -> None:
    mine = Net()
    mine.register_buffer("table", torch.tensor([float("nan"), 1.0]))
    theirs = copy.deepcopy(mine)
    with torch.no_grad():
        theirs.norm.weight += 1
    save(theirs, path)
    before = {name: t._version for name, t in named_tensors(mine).items()}
    load(path, mine)
    written = {n for n, t in named_tensors(mine).items() if t._version != before[n]}
    assert written == {"norm.weight"}


def _trained(net: Net, *parts: torch.Tensor) -> WeightFile | None:
    """Return what is sent after a change of some parts."""
    before = fingerprints(named_tensors(net))
    with torch.no_grad():
        for part in parts:
            part += 1
    return state_io.module_changes(net, named_tensors(net), state_io.extra_states(net), before)


def test_only_what_changed_is_sent(path: Path) -> None:
    theirs = Net()
    first, other = copy.deepcopy(theirs), Net()
    parcel = _trained(theirs, theirs.norm.weight)
    assert parcel is not None
    assert parcel.tensors.keys() == {"norm.weight"}
    assert parcel.about["parameters"] == 4
    state_io.save(parcel, path)
    mine = copy.deepcopy(first)
    load(path, mine)
    assert same(mine, theirs)
    with pytest.raises(
        NbtrainError, match=r"`.*weight` did not change in the run, so it was not saved"
    ):
        load(path, other)
    assert not torch.equal(other.norm.weight, theirs.norm.weight)
    load(path, other, is_handed_over=True)  # changed in the notebook meanwhile
    assert torch.equal(other.norm.weight, theirs.norm.weight)
    assert not torch.equal(other.embed.weight, theirs.embed.weight)


def _with_integers() -> torch.nn.Module:
    net = Net()
    net.norm.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    return net


def _untied() -> torch.nn.Module:
    net = Net()
    net.head.weight = torch.nn.Parameter(net.embed.weight.detach() + 1)
    return net


@pytest.mark.parametrize(
    ("build_theirs", "build_mine", "reason"),
    [
        (
            Net,
            lambda: Net(width=5),
            r"`embed.weight` is \[6, 4\] in the rank, \[6, 5\] in the notebook; \d more differ",
        ),
        (Net, lambda: torch.nn.LazyLinear(3), "the rank did not save `weight`"),
        (_with_integers, Net, r"`norm.weight` is int in the rank, float in the notebook$"),
        (_untied, Net, "`embed.weight` and `head.weight` are tied in the notebook"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    path: Path, build_theirs: Any, build_mine: Any, reason: str
) -> None:
    save(build_theirs(), path)
    mine = build_mine()
    before = [t.clone() for t in named_tensors(mine).values() if not is_lazy(t)]
    with pytest.raises(NbtrainError, match=reason):
        load(path, mine)
    now = [t for t in named_tensors(mine).values() if not is_lazy(t)]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_an_expanded_buffer_gets_memory_of_its_own(path: Path) -> None:
    theirs, mine = Net(), Net()
    row = mine.row
    theirs.row = torch.tensor([7, 8, 9]).expand(4, -1)
    save(theirs, path)
    load(path, mine)
    assert mine.row is row
    assert torch.equal(row, theirs.row)
    theirs.row = torch.arange(12).reshape(4, 3)  # which no expanded one could hold
    save(theirs, path)
    load(path, mine)
    assert mine.row is row
    assert torch.equal(row, theirs.row)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizer_goes_on_as_the_ranks_would(path: Path, kind: str) -> None:
    def optimizer(net: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(net.parameters(), lr=lr)
        return made

    theirs, mine = Net(), Net()
    of_theirs, of_mine = optimizer(theirs, 0.1), optimizer(mine, 0.7)
    step(theirs, of_theirs)
    save(theirs, path)
    load(path, mine)
    state_io.save(state_io.state_file(of_theirs), path)
    load(path, of_mine)
    assert of_mine.param_groups[0]["lr"] == 0.1
    assert of_mine.param_groups[0]["params"][0] is mine.embed.weight
    step(theirs, of_theirs)
    step(mine, of_mine)
    assert same(mine, theirs)


def test_an_optimizer_of_other_parameters_is_refused(path: Path) -> None:
    net = Net()
    state_io.save(state_io.state_file(torch.optim.AdamW(net.parameters())), path)
    with pytest.raises(NbtrainError, match="other shapes"):
        load(path, torch.optim.AdamW(Net(5).parameters()))
    with pytest.raises(NbtrainError, match="holds an optimizer, not a model"):
        load(path, net)


def _fused(net: Net) -> None:
    step(net, torch.optim.AdamW(net.parameters(), fused=True))


def _data(net: Net) -> None:
    net.norm.weight.data[2] += 1e-6


def _swapped(net: Net) -> None:
    with torch.no_grad():
        net.embed.weight.copy_(net.embed.weight.flip(0))


def _counted(net: Net) -> None:
    net.norm.num_batches_tracked += 1  # type: ignore[operator]


@pytest.mark.parametrize("change", [_fused, _data, _swapped, _counted])
def test_a_fingerprint_tells_every_change(change: Any) -> None:
    net = Net()
    before = fingerprints(named_tensors(net))
    assert before == fingerprints(named_tensors(net))
    change(net)
    assert before != fingerprints(named_tensors(net))
