"""The function that trains is in the cell, and nothing calls it."""

from __future__ import annotations

import pytest

from nbtrain.checks import lint
from nbtrain.planning.cell import read_cell
from tests.support.cells import must_run
from tests.support.kernel import Notebook

TRAIN = "def train(model):\n    accelerator.backward(model.loss)\n"


def notes(source: str) -> list[tuple[int, str]]:
    findings = lint.lint(read_cell(source, "<cell>", {}))
    return [(f.place.line, f.text) for f in findings if f.code == "not-called"]


def test_what_ran_instead_is_named(notebook: Notebook) -> None:
    out = notebook.run("%%distributed\ndef train():\n    return 1\ndef evaluate():\n    return 2")
    assert (
        "line 2, column 1: the ranks run this cell and call evaluate(), its last function; nothing "
        "calls train(). Make `def train` the last statement of the cell [not-called]"
    ) in out.board
    assert notebook.value("nbtrain.last_run().value") == 2


def test_a_magic_above_the_function_is_refused(notebook: Notebook) -> None:
    out = notebook.run("%%distributed\n%%time\ndef train():\n    return 1")
    assert out.ename == "PlanError"
    assert (
        "line 2, column 1: `%%time` runs the rest of the cell by itself, so nothing calls "
        "train(). Delete this line"
    ) in out.evalue
    must_run(notebook, "%%distributed -n 1\n%%time\nprint('one', 'two')")


def test_a_statement_behind_the_function_is_no_call() -> None:
    ((line, text),) = notes(f"{TRAIN}print('ready')")
    assert line == 1
    assert text.startswith("the ranks run this cell; nothing calls train().")


@pytest.mark.parametrize(
    "rest",
    [
        "train(model)",
        "def main():\n    train(model)",
        "def run_training(model):\n    trainer.fit(model)",
        "def go(model):\n    model.fit()",
    ],
)
def test_a_function_that_something_calls_is_left_in_peace(rest: str) -> None:
    assert notes(TRAIN + rest) == []
    assert notes("def helper():\n    return 1\n" + TRAIN) == []


@pytest.mark.parametrize(
    "rest",
    [
        "train(step)\ndef h(): pass",
        "def fit(): pass\nfit()\ndef train(): pass",
        "def helper(): return 1",
    ],
)
def test_a_magic_above_a_cell_that_trains_is_left_in_peace(rest: str) -> None:
    above = "get_ipython().run_cell_magic('capture', 'out', {!r})"
    assert notes(above.format(rest)) == []
    ((line, _),) = notes(above.format("import torch\ndef train(): pass\ndef main(): train()"))
    assert line == 1
