"""A model that the ranks change, and not only train: the notebook has it, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.cells import must_run, needs
from tests.support.kernel import Notebook

PREPARE = """
import re

def bits(model):
    every = [*model.named_parameters(), *model.named_buffers()]
    for part in model.modules():
        if isinstance(part, torch.ao.nn.quantized.dynamic.Linear):
            weight = part.weight()
            every += [("w", weight.int_repr()), ("scale", weight.q_scale()), ("b", part.bias())]
    return {
        re.sub("_orig_mod.|module.", "", name):
            (str(t.dtype), t.tolist()) if hasattr(t, "dtype") else t
        for name, t in every
    }

def steps(model, *shape, x=None, loss=lambda out: out.square().sum()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss(model(torch.rand(shape) if x is None else x)).backward()
        optimizer.step()
        optimizer.zero_grad()

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3))

    def forward(self, x):
        return self.linear(x) + self.mask
"""


class Change(NamedTuple):
    """A model of the notebook, and what the function does with it."""

    model: str
    train: str
    needs: tuple[str, ...] = ()


GPT = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel
def small():
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=1,
        vocab_size=10, n_positions=16, n_embd=16, n_layer=2, n_head=2
    ))
ids = torch.arange(8).view(2, 4)
"""
LORA = """
    from peft import LoraConfig, get_peft_model
    wrapped = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=0.1)
    for _ in range(3):
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
"""

ARRIVES = {
    "LoRA by PEFT": Change("small()", LORA, ("transformers", "peft")),
    "lazy": Change(
        "torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())",
        "model(torch.rand(2, 3)); steps(model, 2, 3)",
    ),
    "compiled": Change(
        "torch.nn.Linear(3, 3)", "steps(torch.compile(model, backend='eager'), 2, 3)"
    ),
    "packed weights": Change(
        "torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(3, 3)))",
        "model[0].set_weight_bias(model[0].weight(), torch.ones(3))",
    ),
    "an expanded buffer, replaced": Change(
        "Masked()", "model.mask = torch.full((1, 3), 7.0).expand(2, 3); steps(model, 2, 3)"
    ),
}


def launch(kernel: Notebook, change: Change) -> str:
    """Train in two ranks; return the board."""
    needs(*change.needs)
    more = GPT if change.needs else ""
    out = must_run(kernel, f"{PREPARE}{more}\nmodel = {change.model}\nbefore = model")
    out = must_run(
        kernel,
        f"%%distributed -n 2\ndef train(model):\n    {change.train}\n"
        # Its own report: the ranks do not meet, so that another one may have none yet.
        "    rank = os.environ['RANK']\n"
        "    report = open(os.environ['NBTRAIN_RUN'] + f'/rank-000{rank}.jsonl').read()\n"
        "    return bits(model), 'changed-model' in report or 'rounded-model' in report",
    )
    return out.board


@pytest.mark.parametrize("name", ARRIVES)
def test_a_changed_model_arrives_bit_by_bit(notebook: Notebook, name: str) -> None:
    board = launch(notebook, ARRIVES[name])
    assert "not updated" not in board
    assert notebook.value("(bits(model), False) == nbtrain.last_run().value and model is before")
    assert ("model: PEFT's adapter `default` added, " in board) == ("LoRA" in name)
    assert not notebook.run("model.eval()" + "(ids).logits" * ("LoRA" in name)).ename


STAYS = {
    "resized embeddings": Change(
        "small()",
        "model.resize_token_embeddings(13); "
        "steps(model, x=ids, loss=lambda out: out.logits.square().sum())",
        ("transformers",),
    ),
    "another dtype": Change(
        "torch.nn.Linear(3, 3)",
        "model.double(); steps(model, x=torch.rand(2, 3, dtype=torch.float64))",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_arrive_is_named_as_training_begins_with_the_line_that_brings_it(
    notebook: Notebook, name: str
) -> None:
    board = launch(notebook, STAYS[name])
    line = board.partition("After the run, `")[2].partition("` loads the trained weights")[0]
    assert line.startswith("model."), board
    assert line.endswith("; nbtrain.last_run().load(model)")
    assert notebook.value("nbtrain.last_run().value[1]")
    assert not notebook.value("bits(model) == nbtrain.last_run().value[0]")
    must_run(notebook, line)
    assert notebook.value("bits(model) == nbtrain.last_run().value[0]")


def test_an_adapter_of_live_ranks_is_pulled(notebook: Notebook) -> None:
    needs("peft", "transformers")
    notebook.run(f"{PREPARE}{GPT}\nmodel = small()\n%nbtrain start -n 2")
    try:
        must_run(notebook, f"%%distributed\ndef train(model):{LORA}    return 1")
        assert not notebook.run("%%distributed\ntheirs = bits(model)").ename
        assert not notebook.run("%nbtrain pull theirs model").ename
        assert notebook.value("bits(model) == theirs and 'lora_A' in str([*theirs])")
    finally:
        notebook.run("%nbtrain stop")


LAYERS = "torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))"
QUANTIZE = "torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)"

STRUCTURES = {
    "a new head": (LAYERS, "model[1] = torch.nn.Linear(3, 5)", "steps(model, 2, 3)"),
    "one more layer": (
        "Masked()",
        "model.extra = torch.nn.Linear(3, 4)",
        "model.forward = lambda x: model.extra(x); steps(model, 2, 3)",
    ),
    "quantized": ("torch.nn.Sequential(torch.nn.Linear(3, 3))", QUANTIZE, "pass"),
}
"""A model, what the function changes in it, and how it trains."""


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_model_that_the_user_changes_in_the_same_way_takes_the_weights(
    notebook: Notebook, name: str
) -> None:
    model, change, train = STRUCTURES[name]
    board = launch(notebook, Change(model, f"{change}; {train}"))
    line = "nbtrain.last_run().load(model)"
    if name != "quantized":  # it is reported when a training begins, if one does
        assert "the run changes more than the values of `model`: " in board
        assert "If the run ends like this, the notebook's `model` is not updated." in board
    assert f"change the notebook's `model` in the same way: `{line}` then loads" in board
    assert notebook.run(line).ename == "NbtrainError"
    assert not notebook.run(f"{change}; {line}").ename
    assert notebook.value("bits(model) == nbtrain.last_run().value[0]")


@pytest.mark.parametrize(
    "train",
    [
        "model.bfloat16(); steps(model, x=torch.rand(2, 3).bfloat16())",
        "model.mask = torch.rand(1, 3).expand(2, 3); steps(model, 2, 3)",
    ],
)
def test_nothing_is_said_of_a_model_that_arrives(notebook: Notebook, train: str) -> None:
    board = launch(notebook, Change("Masked()", train))
    assert "changes more than" not in board
    assert "rounded" not in board
    assert "12 parameters updated from rank 0" in board


HELD = """
import copy, functools
net, nets = torch.nn.Linear(3, 3), [torch.nn.Linear(3, 3)]
class Holder:
    def __init__(self):
        self.net = torch.nn.Linear(3, 3)
    def train(self):
        fit(self.net)
def fit(model):
    steps(model, 2, 3)
holder = Holder()
"""


@pytest.mark.parametrize(
    "call",
    [
        "nbtrain.notebook_launcher(fit, (copy.deepcopy(model),), 2)",
        "nbtrain.launch(functools.partial(fit, copy.deepcopy(model)))",
    ],
)
def test_an_argument_is_not_taken_for_the_variable_of_its_name(
    notebook: Notebook, call: str
) -> None:
    notebook.run(f"{PREPARE}{HELD}\nmodel = net")
    out = must_run(notebook, f"before = bits(model)\nrun = {call}\nassert bits(model) == before")
    assert "12 parameters updated from rank 0 (" in out.board
    assert ", in the model that was passed. " in out.board
    line = out.board.partition("is another model: ")[2].partition(" loads")[0]
    must_run(notebook, f"{line}\nassert bits(model) != before")
    notebook.run("del model")


@pytest.mark.parametrize(
    "call",
    [
        "nbtrain.launch(fit, nets[0])",
        "nbtrain.launch(holder.train)",
        "nbtrain.launch(lambda: fit(net))",
        "nbtrain.launch(fit, (model := torch.nn.Sequential(torch.nn.Linear(3, 3)))[0])",
    ],
)
def test_a_model_is_updated_wherever_the_notebook_holds_it(notebook: Notebook, call: str) -> None:
    notebook.run(f"{PREPARE}{HELD}")
    notebook.run("globals().pop('model', None)")
    out = must_run(notebook, f"result = {call}")
    assert "12 parameters updated from rank 0" in out.board
    assert "that was passed" not in out.board
