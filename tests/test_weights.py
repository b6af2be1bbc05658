"""A model's tensors in a file, and back in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nbtrain import weights
from nbtrain.errors import NbtrainError
from nbtrain.fingerprints import fingerprints, is_lazy


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


def save(module: torch.nn.Module, path: Path) -> weights.Parcel:
    parcel = weights.of_module(module, weights.named_tensors(module))
    weights.save(parcel, path)
    return parcel


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(
        weights.named_tensors(one).values(), weights.named_tensors(other).values(), strict=True
    )
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_model_is_loaded_in_place(path: Path) -> None:
    theirs, mine = Net().eval(), Net()
    theirs.norm.running_mean += 3  # type: ignore[operator]
    parcel = save(theirs, path)
    assert "head.weight" not in parcel.tensors
    before = {n: (id(t), t.data_ptr()) for n, t in weights.named_tensors(mine).items()}
    weights.load(path, mine)
    assert same(mine, theirs)
    assert {n: (id(t), t.data_ptr()) for n, t in weights.named_tensors(mine).items()} == before
    assert mine.head.weight is mine.embed.weight
    assert mine.training
    assert not mine.norm.bias.requires_grad
    assert mine.embed.weight.requires_grad


def test_the_notebook_keeps_its_dtype(path: Path) -> None:
    theirs, mine = Net().bfloat16(), Net()
    save(theirs, path)
    weights.load(path, mine)
    assert mine.embed.weight.dtype == torch.float32
    assert torch.equal(mine.embed.weight, theirs.embed.weight.float())


def _wider() -> torch.nn.Module:
    return Net(width=5)


def _deeper() -> torch.nn.Module:
    net = Net()
    net.more = torch.nn.Linear(1, 1)
    return net


def _without_memory() -> torch.nn.Module:
    net = Net()
    net.norm.to("meta")
    return net


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (_wider, r"`embed.weight` is \[6, 4\] in the rank, \[6, 5\] here; \d more differ"),
        (_deeper, "`more.weight` is missing in what the rank saved; 1 more differ"),
        (_without_memory, "`norm.weight` has no memory here"),
        (lambda: torch.nn.LazyLinear(3), "`weight` has no memory here"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    path: Path, build: Any, told: str
) -> None:
    save(Net(), path)
    mine = build()
    before = [t.clone() for t in weights.named_tensors(mine).values() if not is_lazy(t)]
    with pytest.raises(NbtrainError, match=told):
        weights.load(path, mine)
    now = [t for t in weights.named_tensors(mine).values() if not is_lazy(t)]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_one_tensor_that_was_two_in_the_rank_is_refused(path: Path) -> None:
    theirs = Net()
    theirs.head.weight = torch.nn.Parameter(theirs.embed.weight.detach().clone())
    save(theirs, path)
    mine = Net()
    weights.load(path, mine)  # no longer tied, but equal
    assert same(mine, theirs)
    with torch.no_grad():
        theirs.head.weight += 1
    save(theirs, path)
    with pytest.raises(NbtrainError, match=r"`embed.weight` and `head.weight` are tied here"):
        weights.load(path, mine)


def test_a_cache_that_grew_is_left_as_it_is(path: Path) -> None:
    theirs, mine = Net(), Net()
    theirs.cache = torch.zeros(7)
    cache = mine.cache.clone()  # type: ignore[operator]
    save(theirs, path)
    weights.load(path, mine)
    assert torch.equal(mine.embed.weight, theirs.embed.weight)
    assert torch.equal(mine.cache, cache)  # type: ignore[arg-type]


def test_views_of_one_memory_are_saved_each(path: Path) -> None:
    flat = torch.arange(8.0)
    theirs, mine = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    theirs.weight, theirs.bias = (
        torch.nn.Parameter(flat[:4].view(1, 4)),
        torch.nn.Parameter(flat[3:4]),
    )
    save(theirs, path)
    weights.load(path, mine)
    assert mine.weight.tolist() == [[0, 1, 2, 3]]
    assert mine.bias.tolist() == [3]


def test_more_than_is_mapped_at_a_time_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAPPED", 8)
    theirs, mine = Net(), Net()
    save(theirs, path)
    weights.load(path, mine)
    assert same(mine, theirs)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor"])
def test_an_optimizer_goes_on_as_the_ranks_would(path: Path, kind: str) -> None:
    def optimizer(net: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(net.parameters(), lr=lr)
        return made

    theirs, mine = Net(), Net()
    of_theirs, of_mine = optimizer(theirs, 0.1), optimizer(mine, 0.7)
    step(theirs, of_theirs)
    save(theirs, path)
    weights.load(path, mine)
    weights.save(weights.of_optimizer(of_theirs), path)
    weights.load(path, of_mine)
    assert of_mine.param_groups[0]["lr"] == 0.1
    assert of_mine.param_groups[0]["params"][0] is mine.embed.weight
    step(theirs, of_theirs)
    step(mine, of_mine)
    assert same(mine, theirs)


def test_an_optimizer_of_other_parameters_is_refused(path: Path) -> None:
    net = Net()
    weights.save(weights.of_optimizer(torch.optim.AdamW(net.parameters())), path)
    with pytest.raises(NbtrainError, match="other shapes"):
        weights.load(path, torch.optim.AdamW(Net(5).parameters()))
    with pytest.raises(NbtrainError, match="is of an optimizer, not of a model"):
        weights.load(path, net)


def test_what_an_optimizer_has_that_no_file_can_is_named() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(TypeError, match=r"its param_groups.0.hook is a builtin"):
        weights.of_optimizer(optimizer)


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
    before = fingerprints(weights.named_tensors(net))
    assert before == fingerprints(weights.named_tensors(net))
    change(net)
    assert before != fingerprints(weights.named_tensors(net))


def test_names_are_those_without_wrappers(path: Path) -> None:
    theirs, mine = Net(), Net()
    save(torch.compile(theirs, backend="eager"), path)  # type: ignore[arg-type]
    weights.load(path, mine)
    assert same(mine, theirs)
