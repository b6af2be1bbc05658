"""Debuggers in ranks, through the input box of a cell of a real kernel."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.parts.live.contract import JOIN, SUM
from tests.support.kernel import Notebook, Outputs

STOPS = """def train():
    x = nbtrain.rank() * 10
    breakpoint()
    y = x + 1
    return y"""

FAILS = """import torch.distributed as dist
def half(value):
    if nbtrain.rank() == 1:
        raise ValueError("odd")
    dist.all_reduce(torch.ones(1))
half(7 + nbtrain.rank())"""


@pytest.fixture(scope="module")
def live(shared_kernel: Notebook) -> Iterator[Notebook]:
    started = shared_kernel.run("%nbtrain start -n 2")
    assert "2 ranks live" in started.stdout
    assert not shared_kernel.run(JOIN).ename
    yield shared_kernel
    shared_kernel.run("%nbtrain stop")


def plain(out: Outputs) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", out.stdout)


def asked(out: Outputs) -> list[int]:
    """The ranks that were asked, one after the other."""
    return [int(prompt.partition(")")[0].removeprefix("(rank ")) for prompt in out.prompts]


def once_both_wait(*commands: str) -> Callable[[Outputs], str | None]:
    """Type the commands once both ranks are in the debugger, at the prompt of rank 0."""
    left = iter(("rank 0", *commands))

    def type_next(out: Outputs) -> str | None:
        seen = re.findall(r"^\[rank (\d)\] here", plain(out), re.M)
        return next(left, None) if {*seen} == {"0", "1"} else "all !print('here')"

    return type_next


@pytest.mark.parametrize("engine", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_breakpoint_opens_a_prompt_for_each_rank(notebook: Notebook, engine: str) -> None:
    commands = once_both_wait("p x", "all p x", "rank 1", "n", "p 'y is', y", "c", "c")
    out = notebook.run(f"%%distributed -n 2 -e {engine}\n{STOPS}", answers=commands)
    assert not out.ename, out
    text = plain(out)
    assert re.search(r"rank \d stopped at In\[\d+\], line 5", text)
    assert "p x: show x" in text
    assert text.count("all p x: ask every rank") == 1
    assert "[rank 0] 0\n[rank 1] 10\n" in text
    assert "('y is', 11)" in text
    assert asked(out)[-7:] == [0, 0, 0, 1, 1, 1, 0]
    assert notebook.value("nbtrain.last_run().results") == [1, 11]


@pytest.mark.parametrize("given", ["", "error"])
def test_post_mortem_opens_the_debugger_where_it_was_raised(notebook: Notebook, given: str) -> None:
    cell = (
        "import pdb\n"
        "def train():\n"
        "    try:\n"
        "        q = 5\n"
        "        1 / 0\n"
        "    except ZeroDivisionError as error:\n"
        f"        pdb.post_mortem({given})\n"
        "    return 7"
    )
    out = notebook.run(f"%%distributed -n 1\n{cell}", answers=["p 'q is', q", "q"])
    assert not out.ename, out
    assert "'q is', 5" in plain(out)
    assert re.search(r"rank 0 stopped at In\[\d+\], line 6", plain(out))
    assert notebook.value("nbtrain.last_run().value") == 7


def test_quitting_ends_the_run_as_an_interrupt_does(notebook: Notebook) -> None:
    out = notebook.run(f"%%distributed -n 2\n{STOPS}", answers=["q"])
    assert out.ename == "KeyboardInterrupt"
    assert "from the debugger" in out.evalue
    assert "interrupted" in out.board
    assert len(out.prompts) == 1  # the other rank does not ask any more


def test_an_interrupt_ends_a_run_whose_rank_asks(notebook: Notebook) -> None:
    out = notebook.run(f"%%distributed -n 1\n{STOPS}", interrupt_on="stopped at")
    assert out.ename == "KeyboardInterrupt"
    assert "by an interrupt" in out.evalue
    assert not notebook.run("%%distributed -n 1\n1").ename


def test_a_debugged_run_stops_where_it_fails_and_then_fails(notebook: Notebook) -> None:
    cell = "def train():\n    x = nbtrain.rank()\n    assert x == 0, 'odd'\n    return x"
    out = notebook.run(f"%%distributed -n 2 --debug\n{cell}", answers=["p 'x is', x", "q"])
    assert out.ename == "AssertionError"
    text = plain(out)
    assert "rank 1 stopped at" in text
    assert "AssertionError: odd" in text
    assert "u: go up to the caller" in text
    assert "('x is', 1)" in text
    assert "failed" in out.board


def test_other_ranks_wait_without_a_verdict(notebook: Notebook) -> None:
    """What waits for a rank in the debugger is in no hang."""
    cell = (
        "import torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    if nbtrain.rank() == 0:\n"
        "        breakpoint()\n"
        "    dist.barrier()"
    )
    look = "!import time; time.sleep(5)"
    out = notebook.run(f"%%distributed -n 2 --hang-after 2\n{cell}", answers=[look, "c"])
    assert not out.ename
    assert "stuck" not in out.board
    assert "hang" not in out.board.lower()


def test_where_nobody_can_type_a_breakpoint_is_refused(tmp_path: Path) -> None:
    with closing(Notebook(tmp_path / "home", tmp_path, allow_stdin=False)) as kernel:
        kernel.run("%load_ext nbtrain")
        out = kernel.run(f"%%distributed -n 1\n{STOPS}")
        assert "breakpoint() cannot ask you here" in out.evalue
        out = kernel.run("%%distributed -n 1 --debug\n1")
        assert "--debug has no effect here" in out.stdout
        assert "needs the foreground" in kernel.run("%%distributed --debug --background\n1").evalue
        started = kernel.run(f"%%distributed -n 1 --background --as run\n{STOPS}")
        assert not started.ename
        assert "cannot ask you here" in kernel.value("(run.wait(), str(run.exception))[1]")


def test_after_an_ordinary_run_debug_says_how(notebook: Notebook) -> None:
    assert notebook.run("%%distributed -n 1\n1 / 0").ename == "ZeroDivisionError"
    out = notebook.run("%debug")
    assert not out.prompts
    assert "Run the cell with --debug" in out.stdout
    assert notebook.run("1 / 0").ename == "ZeroDivisionError"
    assert notebook.run("%debug", answers=["q"]).prompts == ["ipdb> "]


@pytest.mark.parametrize("other", ["raise ValueError('planted')", "time.sleep(600)"])
def test_quitting_ends_the_cell_whatever_the_other_rank_does(live: Notebook, other: str) -> None:
    cell = f"%%distributed\nimport time\nif nbtrain.rank():\n    {other}\nelse:\n    breakpoint()"
    out = live.run(cell, answers=["p 'here'", "q"], timeout=60)
    assert out.ename == ("ValueError" if "raise" in other else "KeyboardInterrupt"), out
    assert live.run("%distributed 1 + 1").stdout == "[ranks 0–1] 2\n"


def test_debug_opens_on_the_rank_that_failed(live: Notebook) -> None:
    assert live.run(f"%%distributed\n{FAILS}").ename == "ValueError"
    out = live.run("%debug", answers=["p 'value is', value", "u", "q"])
    assert asked(out) == [1, 1, 1]
    assert "('value is', 8)" in plain(out)
    out = live.run("%nbtrain debug --rank 0", answers=["u", "u", "p 'value is', value", "q"])
    assert asked(out) == [0, 0, 0, 0]
    assert "('value is', 7)" in plain(out)
    assert "no rank 2" in live.run("%nbtrain debug --rank 2").evalue
    assert "takes only a rank" in live.run("%nbtrain debug here").evalue
    assert "[ranks 0–1] tensor([2.])" in live.run(SUM).stdout
    assert "no cell has failed" in live.run("%nbtrain debug").evalue


def test_the_prompt_moves_on_where_a_rank_waits_for_another(live: Notebook) -> None:
    """One steps into a collective, for which the other one has to leave its debugger."""
    cell = "%%distributed\nbreakpoint()\ndist.all_reduce(t)\nt"
    out = live.run(cell, answers=once_both_wait("n", "c", "c"))
    assert not out.ename, out
    assert "rank 0 is at work." in out.stdout
    assert asked(out)[-3:] == [0, 1, 0]


def test_a_rank_that_is_killed_in_the_debugger_ends_the_run(notebook: Notebook) -> None:
    def kill(out: Outputs) -> None:
        if "stopped at" in out.stdout and not killed:
            killed.append(1)
            for child in notebook.process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one of an earlier cell has ended
                    if "orphan_reaper" not in " ".join(child.cmdline()):
                        child.kill()

    killed: list[int] = []
    notebook.run("%nbtrain stop")
    out = notebook.run(f"%%distributed -n 1\n{STOPS}", during=kill)
    assert out.ename == "RankDied"
    with_psutil = [p.status() for p in notebook.process.children()]
    assert psutil.STATUS_ZOMBIE not in with_psutil


def test_a_variable_may_be_called_rank_and_an_output_may_be_huge(notebook: Notebook) -> None:
    cell = "def train():\n    rank, all = 40 + nbtrain.rank(), 5\n    breakpoint()\n    return rank"
    huge = "p '\N{SNOWMAN}' * 20_000_000"
    typed = ["rank", "p 'all is', all", "!rank = 7", "rank 7", "all p rank", huge, "interact", "c"]
    out = notebook.run(f"%%distributed -n 1\n{cell}", answers=typed)
    text = plain(out)
    assert not out.ename, out.traceback
    assert "\n40\n" in text
    assert "('all is', 5)" in text
    assert "There is no rank 7. In the debugger: rank 0." in text
    assert "[rank 0] 7\n" in text
    assert "characters more" in text
    assert "`interact` does not work here" in text
    assert len(text) < 3_000_000
    assert notebook.value("nbtrain.last_run().value") == 7
