"""How much a rank would build, told without building it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from nbtrain.planning import build_estimate, cell
from nbtrain.planning.plan import Call
from nbtrain.system.text import format_bytes
from tests.support.kernel import Notebook

SMALL = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
SIZE = sum(t.numel() * 4 for t in BertModel(SMALL).parameters())


def built(source: str, **namespace: Any) -> int:
    return build_estimate.bytes_built(cell.read_cell(source, "c", namespace))


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
    assert build_estimate.bytes_built(Call(len)) == 0


def test_ranks_that_build_more_than_there_is_are_warned_of(notebook: Notebook) -> None:
    notebook.run(
        "from transformers import BertConfig, BertModel\n"
        "huge = BertConfig(hidden_size=16384, intermediate_size=65536, num_hidden_layers=24,\n"
        "                  num_attention_heads=16)"
    )
    out = notebook.run("%%distributed -n 2\ndef train(build=False):\n    build and BertModel(huge)")
    assert out.ename == "", out.traceback
    assert "2 ranks may need" in out.board
    assert "Each rank builds 2" in out.board  # some 290 GB


def test_what_ranks_build_is_reported_with_what_to_write_instead() -> None:
    source = (
        "@decorated\ndef train(epochs=3):\n    net = BertModel(config)  # large\n    net.train()"
    )
    task = cell.read_cell(source, "c", {"BertModel": BertModel, "config": SMALL})
    size = format_bytes(SIZE)
    assert build_estimate.advice(task, 8, 1 << 28) == (
        f"if memory ran out: each of 8 ranks builds a model of its own (line 3): "
        f"8 x {size} = {format_bytes(8 * SIZE)}, and {format_bytes(1 << 28)} were available",
        build_estimate.ADVICE,
    )
    assert build_estimate.advice(task, 8, SIZE)[0].startswith(
        "too much for this host's memory: each of 8"
    )
    assert build_estimate.advice(task, 1, SIZE) == ()
    assert build_estimate.advice(task, 8, 1 << 30) == ()  # too little to be the reason
    assert build_estimate.advice(cell.read_cell("def f(model): ...", "c", {}), 8, None) == ()


def test_no_code_of_a_repository_is_run_and_nobody_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoConfig": "configuration_strange.Strange"}}'
    )
    (tmp_path / "configuration_strange.py").write_text("raise SystemExit('this ran')")
    for trust in ("", ", trust_remote_code=True"):
        source = f"AutoModel.from_config(AutoConfig.from_pretrained({str(tmp_path)!r}{trust}))"
        names = {"AutoModel": AutoModel, "AutoConfig": AutoConfig}
        assert built(f"def train():\n    m = {source}", **names) == 0
