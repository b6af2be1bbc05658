"""PEFT's adapters, put into a rank's model, arrive in the notebook's, whatever the method."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.transport.weights.models import named_tensors
from nbtrain.transport.weights.state_io import WeightReader
from nbtrain.ui import text_summary

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 8)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.second(self.first(self.embed(x)).relu())))
        return result


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["first", "second"], **options})


def train(net: Any, wrap: Callable[[Any], Any]) -> Any:
    """Train what `wrap` returns; return the bits and the output of the model that it was given."""
    model = wrap(net)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    batch = torch.arange(12)
    for _ in range(3):
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(net), net(batch).tolist()


def bits(net: torch.nn.Module) -> dict[str, Any]:
    named = named_tensors(net).items()
    return {n: (str(t.dtype), t.requires_grad, t.tolist()) for n, t in named}


def wrapped_by(config: Any, *more: Any) -> Callable[[Any], Any]:
    def wrap(net: Any) -> Any:
        model = peft.get_peft_model(net, config)
        for index, other in enumerate(more):
            model.add_adapter(f"more{index}", other)
        return model

    return wrap


def inside(net: Any) -> Any:
    peft.get_peft_model(net.body, peft.LoraConfig(r=2, target_modules=["0"]))
    return net


WAYS: dict[str, Callable[[Any], Any]] = {
    "LoRA": wrapped_by(lora()),
    "DoRA": wrapped_by(lora(use_dora=True)),
    "PiSSA": wrapped_by(lora(init_lora_weights="pissa")),
    "an embedding and a whole layer": wrapped_by(
        lora(target_modules=["embed"], modules_to_save=["head"])
    ),
    "tokens": wrapped_by(lora(trainable_token_indices={"embed": [3, 4]})),
    "parameters": wrapped_by(lora(target_modules=[], target_parameters=["first.weight"])),
    "two": wrapped_by(lora(), lora(r=3)),
    "in a part": inside,
    "IA3": wrapped_by(
        peft.IA3Config(target_modules=["first", "second"], feedforward_modules=["second"])
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_notebooks_model_is_what_the_ranks_is(way: str) -> None:
    net = Net().to(torch.bfloat16 if way == "DoRA" else torch.float32)
    alike, parts = copy.deepcopy(net), {id(p) for p in net.parameters()}
    seed = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not updated")
        run = nbtrain.launch(train, net, WAYS[way], num_processes=1, view="none")
    assert torch.equal(torch.get_rng_state(), seed)
    theirs, output = run.value
    assert bits(net) == theirs
    assert net(torch.arange(12)).tolist() == output
    assert parts <= {id(p) for p in net.parameters()}  # an optimizer of the notebook has them
    run.load(alike)
    assert bits(alike) == theirs
    assert "PEFT's adapter `default`" in text_summary.summary(run.state, 0)


def merge(net: Any) -> Any:
    model = peft.get_peft_model(net, lora())
    model.base_model.model.first.lora_B["default"].weight.data += 1
    model.merge_adapter()
    return bits(net), net(torch.arange(12)).tolist()


def test_a_merged_adapter_is_not_added_twice() -> None:
    net = Net()
    theirs, output = nbtrain.launch(merge, net, num_processes=1, view="none").value
    assert (bits(net), net(torch.arange(12)).tolist()) == (theirs, output)


def test_a_second_run_goes_on_where_the_model_is_as_in_one_process() -> None:
    net = Net()
    for rank in (2, 2, 3):
        way = wrapped_by(lora(r=rank))
        run = nbtrain.launch(train, net, way, num_processes=1, view="none")
        assert bits(net) == run.value[0]
        assert net.first.lora_A["default"].weight.shape == (rank, 8)


def test_only_what_the_training_changed_is_sent() -> None:
    net = Net()
    run = nbtrain.launch(train, net, WAYS["LoRA"], num_processes=1, view="none")
    with WeightReader(run.folder / "weights" / "net.safetensors") as file:
        assert file.names()
        assert all("lora_" in name for name in file.names())


def wrap_a_part(net: Any) -> Any:
    net.body = peft.get_peft_model(net.body, peft.LoraConfig(r=2, target_modules=["0"]))
    return net


def test_what_peft_cannot_add_so_arrives_in_a_model_that_is_changed_alike() -> None:
    net, way = Net(), wrap_a_part
    with pytest.warns(UserWarning, match="change the notebook's `net` in the same way"):
        run = nbtrain.launch(train, net, way, num_processes=1, view="none")
    assert [finding.code for finding in run.state.findings].count("changed-model") == 1
    run.load(way(net))
    assert bits(net) == run.value[0]
