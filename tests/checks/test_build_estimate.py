"""How much each rank would load, read off the files of the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel, BertTokenizer

from nbtrain.checks import build_estimate
from nbtrain.checks.build_estimate import CheckpointLoad
from nbtrain.findings import Place
from nbtrain.planning import cell
from nbtrain.planning.plan import Call
from nbtrain.system.text import format_bytes
from tests.support.kernel import Notebook

SMALL = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
SIZE = sum(t.numel() * 4 for t in BertModel(SMALL).parameters())


def loads(source: str, **namespace: Any) -> list[CheckpointLoad]:
    return build_estimate.find_loads(cell.read_cell(source, "c", namespace))


@pytest.mark.parametrize(
    "line", ["BertModel.from_pretrained(path)", "t.BertModel.from_pretrained(path)"]
)
def test_a_checkpoint_is_as_large_as_its_files(line: str, tmp_path: Path) -> None:
    BertModel(SMALL).save_pretrained(tmp_path)
    source = f"def train():\n    model = {line}"
    (load,) = loads(source, path=str(tmp_path))
    assert load.bytes == pytest.approx(SIZE, rel=0.02)
    assert load.place == Place("", 2, 13)
    assert loads(source.replace("(path", f"({str(tmp_path)!r}")) == [load]


@pytest.mark.parametrize(
    "source",
    [
        "def train(model): model(1)",
        "def train():\n    m = BertModel.from_pretrained('no/such-model')",
        "def train():\n    m = BertModel.from_pretrained(make())",
        "def train():\n    m = BertModel.from_pretrained(*args)",
        "def train():\n    m = BertModel.from_pretrained(config)",
        "def train():\n    t = BertTokenizer.from_pretrained(path)",
        "x = 1",
    ],
)
def test_what_is_not_known_is_nothing(source: str, tmp_path: Path) -> None:
    BertModel(SMALL).save_pretrained(tmp_path)
    names = {"BertModel": BertModel, "BertTokenizer": BertTokenizer}
    assert loads(source, path=str(tmp_path), config=SMALL, **names) == []
    assert build_estimate.find_loads(Call(len)) == []


def test_ranks_that_load_more_than_there_is_are_warned_of_and_their_end_is_explained(
    notebook: Notebook, tmp_path: Path
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # 4 TiB, which take no room
    notebook.run("class Model: pass")
    out = notebook.run(
        "%%distributed -n 2\ndef train(build=False):\n"
        f"    build and Model.from_pretrained({str(tmp_path)!r})\n"
        "    raise MemoryError"
    )
    assert out.ename == "MemoryError"
    assert "2 ranks may need" in out.board
    assert "Each rank builds 4.0 TiB" in out.board
    assert "too much for this host's memory: each of 2 ranks loads a separate copy" in out.traceback
    assert "(line 3): 2 x 4.0 TiB = 8.0 TiB" in out.traceback
    assert build_estimate.ADVICE in out.traceback


def test_what_ranks_load_is_reported_with_what_to_write_instead() -> None:
    loaded = [CheckpointLoad(Place("", 3, 1), SIZE), CheckpointLoad(Place("In[2]", 4, 1), 2)]
    total, available = SIZE + 2, 1 << 28
    assert build_estimate.explain(loaded, 8, available) == (
        f"if memory ran out: each of 8 ranks loads a separate copy of the model (line 3): "
        f"8 x {format_bytes(total)} = {format_bytes(8 * total)}, and {format_bytes(available)} "
        "were available",
        build_estimate.ADVICE,
    )
    (reason, _) = build_estimate.explain(loaded, 8, SIZE)
    assert reason.startswith("too much for this host's memory: each of 8")
    assert build_estimate.explain(loaded, 1, SIZE) == ()
    assert build_estimate.explain(loaded, 8, 1 << 30) == ()  # too little to be the reason
    assert build_estimate.explain([], 8, None) == ()
