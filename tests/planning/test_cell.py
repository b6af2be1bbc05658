"""Reading a magic's line and a cell's source."""

from __future__ import annotations

import pytest

from nbtrain.errors import PlanError
from nbtrain.planning import cell
from nbtrain.planning.plan import Cell, Parameter


def test_the_last_statement_decides_what_a_cell_is() -> None:
    read = cell.read_cell("x = 1\n@d\ndef f(a, /, b, c=1, *rest, d, e=2, **more): ...", "c", {})
    assert read.function == "f"
    assert read.parameters == (
        Parameter("a", None, True),
        Parameter("b"),
        Parameter("c", "1"),
        Parameter("d"),
        Parameter("e", "2"),
    )
    assert cell.read_cell("def f(): ...\nf()", "c", {}).function is None
    assert cell.read_cell("class A: ...", "c", {}).function is None
    assert cell.read_cell("await x", "c", {}).function is None


@pytest.mark.parametrize("source", ["def f(", "return 1", "x = = 1", "nonlocal x"])
def test_a_cell_that_python_would_refuse_is_refused(source: str) -> None:
    with pytest.raises(SyntaxError):
        cell.read_cell(source, "c", {})


def test_a_cell_of_comments_is_nothing_to_run() -> None:
    with pytest.raises(PlanError, match="empty"):
        cell.read_cell("# nothing\n", "c", {})


def test_a_star_import_leaves_the_check_to_the_rank() -> None:
    cell.check_parameters(cell.read_cell("from math import *\ndef f(tau): ...", "c", {}))
    with pytest.raises(PlanError, match="`tau`"):
        cell.check_parameters(cell.read_cell("def f(tau): ...", "c", {}))


def test_titles_show_small_values() -> None:
    values = {"model": object(), "epochs": 3, "name": "x"}
    read = cell.read_cell("def train(model, epochs, name, k=1): ...", "c", values)
    assert cell.title(read) == "train(model, epochs=3, name, k=1)"
    assert cell.title(Cell("\n# why\nx + 1\n", "c", {})) == "x + 1"
    assert cell.title(Cell("import os\nfrom a import b\nwork()", "c", {})) == "work()"
    assert cell.title(Cell("import os", "c", {})) == "import os"
    assert len(cell.title(Cell("x" * 200, "c", {}))) == 60


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("def f(password='hunter2x', lr=0.1): pass", "f(password, lr=0.1)"),
        ("def f(config={'api_key': 'k3yK3yk3y'}): pass", "f(config)"),
        ("def f(tokenizer='gpt2', mode='fast'): pass", "f(tokenizer='gpt2', mode='fast')"),
        ("import hub\nhub.login(token='hf_abcdefghij0123456789ab')", "hub.login(token='…')"),
        ("password = 'hunter2x'", "password = '…'"),
        ("get_ipython().run_line_magic('env', 'WANDB_API_KEY=abc')", "%env"),
        ("get_ipython().system('wandb login abcdef')", "!wandb"),
        ('login("0123456789abcdef0123456789abcdef01234567")', 'login("…")'),
        ("headers = f'Bearer a1b2c3d4e5f6g7h8'", "headers = f'…'"),
        ("train()  # token a1b2c3d4", "train()  # token …"),
        ("class A:\n    pin_password = 123456", "class A"),
        ("from a import (\n    b,\n)\nwork()", "work()"),
        ("from a import (\n    b,\n)", "from a import ("),
        ('key = "a1b2c3d4e5f6g7h8i9"', 'key = "…"'),
    ],
)
def test_secrets_of_the_source_are_kept_out_of_titles(source: str, title: str | None) -> None:
    shown = cell.title(cell.read_cell(source, "c", {}))
    assert "a1b2" not in shown
    assert title is None or shown == title


def test_texts_are_kept_out_of_titles() -> None:
    read = cell.read_cell("def train(key, n): ...", "c", {"key": "hunter2", "n": 10**5000})
    assert cell.title(read) == "train(key, n)"
