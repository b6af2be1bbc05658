"""Where a rank left its process, in the words of the exception that the notebook raises."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

import nbtrain
from nbtrain.errors import RankDied
from tests.support.kernel import Notebook
from tests.support.runs import launch


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("sys.exit(3)", "exited with code 3"),
        ("os._exit(7)", "exited with code 7"),
        ("os._exit(0)", "exited with code 0 before its function had returned"),
    ],
)
def test_the_call_and_its_line_are_named(notebook: Notebook, call: str, end: str) -> None:
    out = notebook.run(
        "%%distributed -n 2\n"
        "import os, sys\n"
        "def leave():\n"
        f"    {call}\n"
        "def train():\n"
        "    if nbtrain.rank() == 1: leave()\n"
        "    time.sleep(60)\n"
    )
    assert out.ename == "RankDied"
    number = notebook.value("len(get_ipython().history_manager.input_hist_parsed) - 2")
    assert f"rank 1 {end} ({call} at In[{number}], line 4)" in out.evalue
    assert ("os._exit ends a process at once" in out.traceback) == ("os" in call)


def forks() -> int:
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    child.start()
    child.join()
    return child.exitcode or 0


def test_a_process_that_a_rank_starts_may_end_as_it_likes() -> None:
    assert launch(forks, n=1).value == 5


def leaves_wrongly() -> None:
    os._exit("seven")  # type: ignore[arg-type]


def test_a_call_that_is_wrong_is_the_ranks_own_error() -> None:
    with pytest.raises(TypeError):
        launch(leaves_wrongly, n=1)


def leaves_by_a_library() -> None:
    sys.exit("these words")


def test_words_are_kept() -> None:
    with pytest.raises(RankDied, match=r"sys.exit\('these words'\) at test_exits.py, line \d+"):
        launch(leaves_by_a_library, n=1)
    run = nbtrain.last_run()
    assert run is not None
    assert run.logs(0) == "these words"


@pytest.mark.part("live")
def test_the_cell_of_an_exit_is_named_where_the_rank_does_not_have_it(notebook: Notebook) -> None:
    notebook.run("import sys\ndef leaves():\n    sys.exit(3)")
    number = notebook.value("len(In) - 2")
    out = notebook.run("nbtrain.launch(leaves, num_processes=1, engine='spawn')")
    if notebook.value("hasattr(get_ipython().compile, '_filename_map')"):  # not IPython 7
        assert f"(sys.exit(3) at In[{number}], line 3)" in out.evalue
    assert not notebook.run("%nbtrain start -n 1").ename
    try:
        out = notebook.run("%%distributed\nimport sys\nsys.exit(4)")
        number = notebook.value("len(In) - 2")
        assert out.evalue == f"sys.exit(4) at In[{number}], line 3, which does not end live ranks"
    finally:
        notebook.run("%nbtrain stop")


EXITS = """
import sys
class ExitsHere:
    def __reduce__(self): sys.exit(4)
def leave(): sys.exit(5)
class ExitsThere:
    def __reduce__(self): return (leave, ())
"""


@pytest.mark.parametrize(("kind", "code"), [("ExitsHere", 4), ("ExitsThere", 5)])
def test_a_value_that_exits_when_it_is_copied_costs_itself_alone(
    notebook: Notebook, kind: str, code: int
) -> None:
    notebook.run(EXITS)
    out = notebook.run(f"%%distributed -n 2 --out x,y\nx = {kind}(); y = {code}")
    assert not out.ename
    assert "x was not updated: " in out.board
    assert f"it calls sys.exit({code})" in out.board
    assert notebook.value("y") == code
    out = notebook.run(f"nbtrain.launch({kind}, num_processes=1)")
    assert f"it calls sys.exit({code})" in out.board + out.evalue
    if kind == "ExitsHere":
        out = notebook.run("bad = ExitsHere()\nnbtrain.launch(lambda: bad, engine='spawn')")
        assert out.ename == "PlanError"
        assert "cannot be sent to a fresh process (it calls sys.exit(4))" in out.evalue
