"""Reading a magic's line and a cell's source."""

from __future__ import annotations

import pytest

from nbtrain import cell
from nbtrain.errors import PlanError
from nbtrain.plan import Cell, Parameter


@pytest.mark.parametrize(
    ("line", "options", "expression"),
    [
        ("-n 2 f(x)", "-n 2", "f(x)"),
        ("f(x)", "", "f(x)"),
        ("-n2 --env A=1 g", "-n2 --env A=1", "g"),
        ("--num-processes=2 {'a': 1}", "--num-processes=2", "{'a': 1}"),
        ("--env 'A=b c' -e inline x -1", "--env 'A=b c' -e inline", "x -1"),
        ("-n 2 -- -x", "-n 2", "-x"),
        ("-n 2", "-n 2", ""),
        ("", "", ""),
    ],
)
def test_a_line_is_split_where_the_options_end(line: str, options: str, expression: str) -> None:
    found, rest = cell.split_options(line)
    assert (found.strip(), rest) == (options, expression)


def test_options_become_values() -> None:
    line = "-n 4 -e fork -p bf16 --env A=1 --env B=x=y --as r --view none --timeout 1.5"
    options = cell.parse_options(cell.split_words(line))
    assert options == cell.Options(
        4, "fork", "bf16", {"A": "1", "B": "x=y"}, bind="r", view="none", timeout=1.5
    )
    assert cell.parse_options(["-n", "auto"]).num_processes is None


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
    assert cell.title(Cell("\n# why\n  x + 1\n", "c", {})) == "x + 1"
    assert cell.title(Cell("import os\nfrom a import b\nwork()", "c", {})) == "work()"
    assert cell.title(Cell("import os", "c", {})) == "import os"
    assert len(cell.title(Cell("x" * 200, "c", {}))) == 60


def test_an_open_quote_is_not_lost() -> None:
    assert cell.split_options("-n 1 'abc") == ("-n 1", "'abc")


def test_texts_are_kept_out_of_titles() -> None:
    read = cell.read_cell("def train(key, n): ...", "c", {"key": "hunter2", "n": 10**5000})
    assert cell.title(read) == "train(key, n)"


def test_when_a_silence_is_a_hang_can_be_said() -> None:
    assert cell.parse_options([]).hang_after == 300
    assert cell.parse_options(["--hang-after", "2.5"]).hang_after == 2.5
    for off in ("off", "0"):
        assert cell.parse_options(["--hang-after", off]).hang_after is None
    with pytest.raises(PlanError, match="number of seconds"):
        cell.parse_options(["--hang-after", "soon"])


def test_what_comes_home_can_be_named() -> None:
    assert (cell.parse_options([]).out, cell.parse_options([]).sync) == ((), True)
    words = ["--out", "a,b", "c@all,", "-n", "2", "--out", "d", "a", "--no-sync"]
    options = cell.parse_options(words)
    assert (options.out, options.sync) == (("a", "b", "c@all", "d"), False)
    assert cell.split_options("--out a,b -n 2 train(x)") == ("--out a,b -n 2", "train(x)")
    for flag in ("--no-sync", "--background", "--detach"):
        assert cell.split_options(f"{flag} train(x)") == (flag, "train(x)")
