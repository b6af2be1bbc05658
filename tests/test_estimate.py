"""How much a rank would build, told without building it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Notebook
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from nbtrain import cell, estimate
from nbtrain.host import in_words
from nbtrain.plan import Call

SMALL = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
SIZE = sum(t.numel() * 4 for t in BertModel(SMALL).parameters())


def built(source: str, **namespace: Any) -> int:
    return estimate.bytes_built(cell.read_cell(source, "c", namespace))


@pytest.mark.parametrize(
    "line",
    [
        "m = BertModel(config)",
        "m = BertModel(config=config)",
        "m = AutoModel.from_config(config)",
        "m = BertModel(config).to('cuda')",
        "m = BertModel(BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2))",
        "m = AutoModel.from_config(AutoConfig.from_pretrained(SAVED))",
    ],
)
def test_a_model_of_a_configuration_is_measured_on_no_device(line: str, tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    line = line.replace("SAVED", repr(str(tmp_path)))
    names = {
        "BertModel": BertModel,
        "BertConfig": BertConfig,
        "AutoConfig": AutoConfig,
        "AutoModel": AutoModel,
        "config": SMALL,
    }
    before = torch.get_rng_state()
    size = built(f"def train():\n    {line}", **names)
    assert size == pytest.approx(SIZE, rel=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_is_as_large_as_its_files(tmp_path: Path) -> None:
    BertModel(SMALL).save_pretrained(tmp_path)
    source = "def train():\n    model = BertModel.from_pretrained(path)"
    size = built(source, BertModel=BertModel, path=str(tmp_path))
    assert size == pytest.approx(SIZE, rel=0.02)
    assert built(source, BertModel=BertModel, path="no/such-model") == 0


@pytest.mark.parametrize(
    "source",
    [
        "def train(model): model(1)",
        "def train():\n    m = Own()",
        "def train():\n    m = BertModel(make())",
        "def train():\n    m = BertModel(*args)",
        "def train():\n    m = BertModel()",
        "def train():\n    m = BertModel(Own())",
        "def train():\n    m = BertModel(type(config)(**kw))",
        "def train():\n    m = AutoModel.from_config(AutoConfig.from_pretrained('no/such-model'))",
        "x = 1",
    ],
)
def test_what_cannot_be_told_is_nothing(source: str) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            raise AssertionError("code of the user's was run")

    names = {"AutoModel": AutoModel, "AutoConfig": AutoConfig, "BertModel": BertModel}
    assert built(source, Own=Own, config=SMALL, **names) == 0
    assert estimate.bytes_built(Call(len)) == 0


def test_ranks_that_build_more_than_there_is_are_warned_of(notebook: Notebook) -> None:
    notebook.run(
        "from transformers import BertConfig, BertModel\n"
        "huge = BertConfig(hidden_size=16384, intermediate_size=65536, num_hidden_layers=24,\n"
        "                  num_attention_heads=16)"
    )
    out = notebook.run("%%distributed -n 2\ndef train(build=False):\n    build and BertModel(huge)")
    assert out.ename == "", out.traceback
    assert "2 ranks may need" in out.board
    assert "each builds 2" in out.board  # some 290 GB


def test_what_ranks_build_is_told_with_the_lines_to_write_instead() -> None:
    source = (
        "@decorated\n"
        "def train(epochs=3, *, lr=1e-3):\n"
        "    tokenizer = load()\n"
        "    net = BertModel(config)  # large\n"
        "    net.train()\n"
    )
    names = {"BertModel": BertModel, "config": SMALL}
    task = cell.read_cell(source, "c", names)
    size = in_words(SIZE)
    told = estimate.words(task, 8, 1 << 30)
    assert told == (
        f"should memory have been short: each of 8 ranks builds a model of its own (line 4): "
        f"8 x {size} = {in_words(8 * SIZE)}, and {in_words(1 << 30)} were available",
        "build it once, in a cell above, and every rank shares it:  net = BertModel(config)",
        "line 4 goes",
        "line 2 becomes:  def train(net, epochs=3, *, lr=0.001):",
    )
    assert estimate.words(task, 8, SIZE)[0].startswith("too much for this host's memory: each of 8")
    assert estimate.words(cell.read_cell("def f(model): ...", "c", {}), 8, None) == ()


@pytest.mark.parametrize(
    "line",
    [
        "self.m = BertModel(config)",
        "return BertModel(config)",
        "a = b = BertModel(config)",
        "m = wrapped(BertModel(config))",
        "m = BertModel(own)",
        "self = BertModel(config)",
    ],
)
def test_where_there_is_more_to_it_no_lines_are_shown(line: str) -> None:
    names = {"BertModel": BertModel, "config": SMALL}
    task = cell.read_cell(f"def train(self, own=None):\n    {line}", "c", names)
    assert estimate.words(task, 2, None)[1:] == (
        "build it once, in a cell above, and every rank shares it: the function gets it as a "
        "parameter",
    )


def test_a_model_that_is_moved_where_it_is_built_is_only_moved() -> None:
    names = {"BertModel": BertModel, "config": SMALL}
    source = "def train(n=1):\n    m = BertModel(config).to(device, torch.bfloat16).train()"
    assert estimate.words(cell.read_cell(source, "c", names), 2, None)[1:] == (
        "build it once, in a cell above, and every rank shares it:  m = BertModel(config)",
        "line 2 becomes:  m = m.to(device, torch.bfloat16).train()",
        "line 1 becomes:  def train(m, n=1):",
    )


def test_a_call_is_told_to_hand_the_model_over() -> None:
    def train(epochs: int) -> None:
        model = BertModel(SMALL)
        model.train(epochs > 0)

    told = estimate.words(Call(train, (3,)), 2, None)
    assert told[-2].endswith("def train(model, epochs: int) -> None:")
    assert told[-1].startswith("where it is launched, the function is handed the model")


def test_no_code_of_a_repository_is_run_and_nobody_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoConfig": "configuration_strange.Strange"}}'
    )
    (tmp_path / "configuration_strange.py").write_text("raise SystemExit('this ran')")
    for trust in ("", ", trust_remote_code=True"):
        source = f"AutoModel.from_config(AutoConfig.from_pretrained({str(tmp_path)!r}{trust}))"
        names = {"AutoModel": AutoModel, "AutoConfig": AutoConfig}
        assert built(f"def train():\n    m = {source}", **names) == 0
