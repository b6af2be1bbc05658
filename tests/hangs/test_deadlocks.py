"""Deadlocks that are certain are reported after seconds, with real ranks; what only takes long is
not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import nbtrain
from nbtrain.errors import RunTimeout
from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.runs import launch


def waits_in_a_circle() -> None:
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    first = groups[nbtrain.rank()]
    dist.all_reduce(torch.ones(2), group=first)
    dist.all_reduce(torch.ones(2), group=groups[1 - nbtrain.rank()])


@pytest.mark.slow
def test_a_certain_deadlock_ends_the_run_long_before_a_hang_is_due() -> None:
    with pytest.raises(RunTimeout, match="was stopped because of a deadlock") as caught:
        launch(waits_in_a_circle, n=2, hang_after=3000, timeout=120)
    assert "each waits for another of them, so none can continue" in str(caught.value)


_TALKING = """%%distributed -n 3 {options}
import torch.distributed as dist
def train():
    dist.init_process_group('gloo')
    dist.barrier()
    rank, x = nbtrain.rank(), torch.zeros(1)
    {call}
"""


TIMES = "limits.DEADLOCK_CHECK_AFTER_S, limits.DEADLOCK_CONFIRM_S"


@pytest.fixture
def hasty(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook whose runs look for a deadlock after half a second."""
    notebook.run(
        "import threading, torch\n"
        "from nbtrain.hangs import limits\n"
        f"usual = {TIMES}\n"
        f"{TIMES} = 0.5, 0.5"
    )
    yield notebook
    notebook.run(f"{TIMES} = usual")


_MISMATCH = "dist.barrier() if rank else dist.all_reduce(x)"


def test_ranks_that_can_never_continue_end_and_say_where_they_were(hasty: Notebook) -> None:
    out = hasty.run(_TALKING.format(options="--timeout 60", call=_MISMATCH))
    assert out.ename == "RunTimeout", out.traceback
    assert "was stopped because of a deadlock" in out.evalue
    assert "these do not match, so no rank can continue" in out.evalue


def test_who_wants_to_look_at_a_deadlock_keeps_it(hasty: Notebook) -> None:
    out = hasty.run(_TALKING.format(options="--timeout 6 --on-hang report", call=_MISMATCH))
    assert "took longer than its timeout" in out.evalue
    assert "these do not match, so no rank can continue" in out.evalue


_NO_DEADLOCK = {
    "a late message": "if rank == 1: time.sleep(3); dist.send(x, 0)\n    rank or dist.recv(x)",
    "a timeout that is handled": (
        "group = dist.new_group(timeout=datetime.timedelta(seconds=5))\n"
        "    if rank == 2: return\n"
        "    try: dist.barrier(group) if rank else dist.all_reduce(x, group=group)\n"
        "    except RuntimeError: pass"
    ),
}


@pytest.mark.parametrize("case", _NO_DEADLOCK)
def test_what_goes_on_or_ends_by_itself_is_no_deadlock(hasty: Notebook, case: str) -> None:
    hasty.run("import datetime")
    out = must_run(hasty, _TALKING.format(options="--timeout 60", call=_NO_DEADLOCK[case]))
    assert "✓" in out.board


@pytest.mark.slow
def test_a_timeout_repeats_the_verdict_and_a_stop_says_where_ranks_were(
    notebook: Notebook,
) -> None:
    cell = (
        "%%distributed -n 2 {}\n"
        "import torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    if nbtrain.rank() == 1:\n"
        "        print('asleep', flush=True); time.sleep(600)\n"
        "    dist.barrier()\n"
    )
    out = notebook.run(cell.format("--hang-after 1 --timeout 8"))
    assert out.ename == "RunTimeout"
    assert "line 6: print('asleep', flush=True); time.sleep(600)" in out.evalue
    assert "rank 0 waits in barrier #1 for it" in out.evalue
    out = notebook.run(cell.format("--view html"), interrupt_on="asleep")
    assert out.ename == "KeyboardInterrupt"
    assert "Rank 0 was at In[" in out.evalue
    assert "line 7: dist.barrier(); rank 1 was at In[" in out.evalue


_RETURNS = """%%distributed -n 2 --hang-after 2 --on-hang stop
import atexit, threading
def say_goodbye():
    time.sleep(600)
def train():
    if nbtrain.rank() == 1:
        {}
"""


@pytest.mark.parametrize(
    ("holds", "place"),
    [
        ("atexit.register(say_goodbye)", ": In[{}], line 4: time.sleep(600)"),
        ("threading.Thread(target=time.sleep, args=(600,)).start()", ""),
    ],
)
def test_a_rank_that_has_returned_and_does_not_end_is_no_silence(
    notebook: Notebook, holds: str, place: str
) -> None:
    out = notebook.run(_RETURNS.format(holds))
    assert out.ename == "RunTimeout", out.traceback
    assert re.search(r"Rank 1 returned \d\S* s ago, and its process has not ended", out.evalue)
    number = notebook.value("len(In) - 2")
    assert f"has not ended{place.format(number)}. Look for an exit handler" in out.evalue
    assert "✓" not in out.board
