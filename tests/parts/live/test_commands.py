"""What a user types of live ranks, without any: ``test_live_ranks`` has the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbtrain.errors import PlanError
from nbtrain.part import PASS, Typed
from nbtrain.parts.live import commands as live
from tests.support.kernel import Notebook


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", [0]), ("0,2-3", [0, 2, 3]), ("3, 1", [1, 3]), ("1-1,1", [1])]
)
def test_ranks_are_read(text: str, ranks: list[int]) -> None:
    assert live.read_ranks(text, 4) == ranks


@pytest.mark.parametrize(
    "text",
    ["", "a", "0-", "1,,2", "4", f"0-{10**9 - 1}", f"{'9' * 5000}-0"],
)
def test_what_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="rank"):
        live.read_ranks(text, 4)


@pytest.mark.parametrize("name", ["stop", "status", "vars", "push", "pull"])
def test_commands_without_live_ranks_say_how_to_start_them(name: str) -> None:
    with pytest.raises(PlanError, match=r"%nbtrain start -n 2"):
        live.answer(name, "", {})


def tensor(name: str = "w", mark: str = "x", **more: Any) -> dict[str, Any]:
    about = {"name": name, "type": "Tensor", "shape": [2, 3], "dtype": "float32", "device": "cpu"}
    return {**about, "bytes": 24, "parts": {"": mark}, **more}


def marks(by_rank: dict[int, list[dict[str, Any]]]) -> list[str]:
    return [re.split("  +", line)[1] for line in lines(by_rank)[1:]]


def lines(by_rank: dict[int, list[dict[str, Any]]]) -> list[str]:
    table = live.variables(by_rank)
    assert isinstance(table, dict)
    return table["text/plain"].splitlines()


def test_the_table_marks_what_differs() -> None:
    assert marks({0: [tensor()], 1: [tensor()]}) == ["same"]
    assert marks({0: [tensor()], 1: [tensor(mark="y")]}) == ["≠"]
    assert marks({0: [tensor()], 1: [tensor(shape=[3])]}) == ["≠ kind"]
    assert marks({0: [tensor()], 1: []}) == ["only rank 0"]
    one, other = {"a": "1", "b.c": "2"}, {"a": "1", "b.c": "3"}
    assert marks({0: [tensor(parts=one)], 1: [tensor(parts=other)]}) == ["≠ b.c"]


def test_the_table_shows_shape_and_size() -> None:
    line = lines({0: [tensor()]})[1]
    assert line.split() == ["w", "same", "Tensor", "2×3", "float32", "cpu", "24", "B"]
    assert live.variables({0: [], 1: []}) == "the ranks have no variables"


def test_the_table_fits_a_terminal_and_is_html_in_a_notebook() -> None:
    odd = tensor("<b>" + "w" * 90, type="DistributedDataParallelOfMine", parts={"p" * 30: "1"})
    table = live.variables({0: [odd], 1: [{**odd, "parts": {"p" * 30: "2"}}]})
    assert isinstance(table, dict)
    assert all(len(line) <= 120 for line in table["text/plain"].splitlines())
    assert "≠ " + "p" * 30 in table["text/plain"]
    assert "&lt;b&gt;www" in table["text/html"]
    assert table["text/html"].count("<tr") == 2


def test_odd_names_and_numbers_of_ranks_break_nothing(notebook: Notebook) -> None:
    notebook.run("ranks, net = 'mine', torch.nn.Linear(2, 1)\nglobals()[3] = globals()[None] = 4")
    assert not notebook.run("%distributed -n 2 net.weight.sum()").ename
    try:
        out = notebook.run("%nbtrain start -n 2")
        assert "`ranks` keeps the value that you gave it" in out.stdout
        assert notebook.value("ranks") == "mine"
        out = notebook.run("%%rank 1-0\n1")
        assert (out.ename, out.evalue) == ("PlanError", "'1-0' names no ranks: write 0-1")
        assert "[rank 1] 1" in notebook.run("%%rank 1-1\n1").stdout
        out = notebook.run("%nbtrain vars")
        assert "net" in out.board
        assert not notebook.run("%nbtrain push net").ename
        assert not notebook.run("%nbtrain pull net").ename
    finally:
        notebook.run("%nbtrain stop\ndel globals()[3], globals()[None], ranks")


def test_a_run_that_is_named_is_stopped_instead_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live.live_ranks, "current", lambda: object())
    assert live.command(Typed("stop", " 12", {}, str)) is PASS
    assert live.command(Typed("stop", " --help", {}, str)) is PASS


def test_a_cell_for_some_ranks_is_a_magic_with_a_help(notebook: Notebook) -> None:
    out = notebook.run("%%rank\n1")
    assert (out.ename, "%%rank needs the ranks" in out.evalue) == ("PlanError", True)
    find = "get_ipython().object_inspect('%%rank')"
    assert notebook.value(f"{find}['docstring']").startswith("Run this cell on some of the live")
    notebook.run("%unload_ext nbtrain")
    assert notebook.value("'rank' in get_ipython().magics_manager.magics['cell']") is False
    notebook.run("%load_ext nbtrain")


def test_whoever_runs_the_host_switches_live_ranks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "live")
    with pytest.raises(PlanError, match="%nbtrain start is switched off"):
        live.answer("start", "-n 1", {})
