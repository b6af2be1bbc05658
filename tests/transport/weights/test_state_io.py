"""A model's tensors in a file, and back in place."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbtrain.errors import NbtrainError
from nbtrain.transport.weights import state_io
from nbtrain.transport.weights.models import named_tensors
from nbtrain.transport.weights.state_io import WeightFile, WeightReader
from nbtrain.transport.weights.tensors import fingerprints, has_same_bits, is_lazy, odd_weights


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
    return state_io.module_changes(net, named_tensors(net), before)


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


def test_a_model_that_changed_for_the_most_part_is_sent_whole(path: Path) -> None:
    theirs, mine = Net(), Net()
    parcel = _trained(theirs, theirs.embed.weight, *theirs.norm.parameters(), theirs.cache)
    assert parcel is not None
    state_io.save(parcel, path)
    load(path, mine)
    assert same(mine, theirs)
    assert mine.head.weight is mine.embed.weight


def test_a_part_that_was_untied_and_not_changed_is_refused(path: Path) -> None:
    theirs = Net()
    theirs.rest = torch.nn.Linear(100, 1)
    mine = copy.deepcopy(theirs)
    before = fingerprints(named_tensors(theirs))
    theirs.head.weight = torch.nn.Parameter(theirs.embed.weight.detach() + 1)
    parcel = state_io.module_changes(theirs, named_tensors(theirs), before)
    assert parcel is not None
    state_io.save(parcel, path)
    with pytest.raises(
        NbtrainError, match=r"`head.weight` and `embed.weight` are tied in the notebook"
    ):
        load(path, mine)


def _meta() -> torch.nn.Module:
    return torch.nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize("build", [_meta, lambda: torch.nn.LazyLinear(3)])
def test_of_a_model_that_no_file_can_have_only_a_change_is_told(build: Any) -> None:
    net = build()
    before = fingerprints(named_tensors(net))
    assert state_io.module_changes(net, named_tensors(net), before) is None
    with pytest.raises(NbtrainError, match="has no memory in the rank"):
        state_io.module_changes(net, named_tensors(net), {})


def test_a_default_device_of_the_user_changes_no_fingerprint() -> None:
    found = named_tensors(Net())
    before = fingerprints(found)
    odd_weights.cache_clear()
    with torch.device("meta"):
        assert fingerprints(found) == before


def test_a_tensor_that_cannot_be_read_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError

    monkeypatch.setattr("nbtrain.transport.weights.tensors.weighted_sums", refuse)
    parcel = _trained(Net())
    assert parcel is not None
    assert "embed.weight" in parcel.tensors


def test_ranks_but_the_first_keep_no_state_of_an_optimizer() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    assert state_io.state_file(optimizer).tensors
    assert not state_io.state_file(optimizer, keep=False).tensors


def _deeper() -> torch.nn.Module:
    net = Net()
    net.more = torch.nn.Linear(1, 1)
    return net


def _without_memory() -> torch.nn.Module:
    net = Net()
    net.norm.to("meta")
    return net


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
        (Net, _deeper, "the rank did not save `more.weight`; 1 more differ"),
        (_deeper, Net, "the rank has `more.weight`, the notebook's object does not; 1 more"),
        (Net, _without_memory, "`norm.weight` has no memory in the notebook"),
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


def _lazy() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())


def test_lazy_parameters_take_the_shape_that_they_have_in_the_rank(path: Path) -> None:
    mine, theirs = _lazy(), _lazy()
    batch = torch.rand(5, 3)
    theirs(batch)
    save(theirs, path)
    before = {name: id(tensor) for name, tensor in named_tensors(mine).items()}
    load(path, mine)
    assert same(mine, theirs)
    assert {name: id(tensor) for name, tensor in named_tensors(mine).items()} == before
    assert torch.equal(mine.eval()(batch), theirs.eval()(batch))
    assert type(mine[0]) is torch.nn.Linear  # the first batch makes it one, as it always does
    assert same(mine, theirs)


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


def test_tensors_that_are_untied_but_equal_fit_a_tied_one(path: Path) -> None:
    theirs, mine = Net(), Net()
    theirs.head.weight = torch.nn.Parameter(theirs.embed.weight.detach().clone())
    save(theirs, path)
    load(path, mine)
    assert same(mine, theirs)


def test_a_cache_that_grew_is_left_as_it_is(path: Path) -> None:
    theirs, mine = Net(), Net()
    theirs.cache = torch.zeros(7)
    cache = mine.cache.clone()  # type: ignore[operator]
    save(theirs, path)
    load(path, mine)
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
    load(path, mine)
    assert mine.weight.tolist() == [[0, 1, 2, 3]]
    assert mine.bias.tolist() == [3]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor"])
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


def test_what_an_optimizer_has_that_no_file_can_is_named() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(TypeError, match=r"param_groups'\]\[0\]\['hook'\] is a builtin"):
        state_io.state_file(optimizer)


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


def test_names_are_those_without_wrappers(path: Path) -> None:
    theirs, mine = Net(), Net()
    save(torch.compile(theirs, backend="eager"), path)  # type: ignore[arg-type]
    load(path, mine)
    assert same(mine, theirs)


@pytest.mark.parametrize("part", ["_orig_mod", "module", "a_orig_mod", "_fsdp_wrapped_module"])
@pytest.mark.parametrize("name", ["weight", "_orig_mod_", "module_"])
@pytest.mark.parametrize("wraps", [False, True])
def test_names_that_wrappers_or_files_use_are_the_users_too(
    part: str, name: str, wraps: bool, path: Path
) -> None:
    def build(factor: int) -> torch.nn.Module:
        made: Any = torch.nn.Linear(2, 2) if wraps else torch.nn.Module()
        if wraps:  # a wrapper that has tensors of its own
            made = torch.compile(made, backend="eager")
        made.add_module(part, torch.nn.Linear(2, 2))
        for own in (name, f"{name}'"):
            made._parameters[own] = torch.nn.Parameter(torch.zeros(2, 2))
        for index, parameter in enumerate(made.parameters()):
            torch.nn.init.constant_(parameter, factor * index)
        return made

    trained, target = build(1), build(0)
    save(trained, path)
    load(path, target)
    assert list(map(str, target.parameters())) == list(map(str, trained.parameters()))


class Keyed(torch.optim.SGD):
    """Has keys in its state that differ only in their types, or in where a dot stands."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["1"] = {1: torch.tensor(1.0), "1": torch.tensor(2.0)}
            self.state[p]["1.1"] = torch.tensor(3.0)
            self.state[p]["1.1'"] = [torch.tensor(4.0)]
            self.state[p]["1.1'.0"] = torch.tensor(5.0)


def test_settings_of_any_class_of_number_or_dict_come_back_as_plain_ones(path: Path) -> None:
    net = Net()
    trained = torch.optim.SGD(net.parameters(), lr=np.float64(0.1))
    trained.state[net.embed.weight]["history"] = defaultdict(int, {"steps": 3})
    state_io.save(state_io.state_file(trained), path)
    target = torch.optim.SGD(net.parameters(), lr=0.7)
    load(path, target)
    assert type(target.param_groups[0]["lr"]) is float
    assert target.param_groups[0]["lr"] == 0.1
    assert target.state[net.embed.weight]["history"] == {"steps": 3}


def test_each_key_of_an_optimizers_state_has_its_own_tensor(path: Path) -> None:
    trained, target = (Keyed(Net().parameters(), lr=0.1) for _ in range(2))
    trained.step()
    state_io.save(state_io.state_file(trained), path)
    load(path, target)
    assert str(target.state_dict()) == str(trained.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("begin", [0, 1, 4])
@pytest.mark.parametrize("size", [0, 1, 24, 25])
def test_tensors_are_the_same_if_all_their_bits_are(
    dtype: torch.dtype, begin: int, size: int
) -> None:
    """Wherever they begin in their storages, and however many there are."""
    one = torch.ones(30, dtype=dtype)[begin : begin + size]
    other = torch.ones(size, dtype=dtype)
    assert has_same_bits(one, other)
    if size and dtype is not torch.bool:
        one[0] = other[0] = torch.nan
        assert has_same_bits(one, other)
    if size:
        other[-1] = 0
        assert not has_same_bits(one, other)
