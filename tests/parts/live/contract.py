"""What live ranks do on every engine: checks of two ranks that live in a kernel.

A kernel has `SETUP` done and ``%nbtrain start`` typed, with the options of its engine.
"""

from __future__ import annotations

import psutil

from tests.support.kernel import Notebook

SETUP = """
import os, time, torch, nbtrain
import torch.distributed as dist
model = torch.nn.Linear(4, 1)
model_before, same = model.weight.detach().clone(), model"""

JOIN = """%%distributed
import os, time, torch, nbtrain
import torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group("gloo")
rank = nbtrain.rank()"""

SUM = """%%distributed
t = torch.ones(1)
dist.all_reduce(t)
t"""


def variables_stay_from_cell_to_cell(live: Notebook) -> None:
    live.run("%%distributed\ncount = 10 * rank")
    live.run("%%distributed\ncount += 1")
    out = live.run("%%distributed\ncount")
    assert out.stdout.splitlines() == ["[rank 0] 1", "[rank 1] 11"]
    assert not live.value("'count' in globals()")


def a_collective_works_in_one_cell_after_another(live: Notebook) -> None:
    for _ in range(2):
        assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def a_cell_on_one_rank(live: Notebook) -> None:
    assert live.run("%%rank 1\nprint('here')\nrank").stdout.splitlines() == [
        "[rank 1] here",
        "[rank 1] 1",
    ]


def a_long_cell_has_the_board(live: Notebook) -> None:
    out = live.run("%%distributed\nfor step in range(15): nbtrain.log(x=step); time.sleep(0.1)")
    assert "succeeded" in out.board
    assert live.value("nbtrain.last_run().history['x'].tolist()")[-1] == 14.0


def tensors_are_pushed_and_pulled(live: Notebook) -> None:
    live.run("torch.manual_seed(0)\nbig = torch.randn(300_000)")
    pushed = live.run("%nbtrain push big")
    assert not pushed.ename, pushed.evalue
    live.run("%%distributed\ntwice = 2 * big + rank")
    for rank in (0, 1):
        pulled = live.run(f"%nbtrain pull twice --rank {rank}")
        assert not pulled.ename, pulled.evalue
        assert live.value(f"torch.equal(twice, 2 * big + {rank})")
    assert live.value("[str(v) for v in ranks['rank']]") == ["0", "1"]


def a_model_is_pulled_in_place(live: Notebook) -> None:
    live.run("%nbtrain push model")
    cell = "%%distributed\nwith torch.no_grad(): model.weight += 1\nweight = model.weight.detach()"
    assert not live.run(cell).ename
    pulled = live.run("%nbtrain pull model weight")
    assert not pulled.ename, pulled.evalue
    assert live.value("same is model and torch.equal(model.weight, weight)")
    assert live.value("torch.equal(weight, model_before + 1)")


def a_function_runs_with_a_model_as_launch_does(live: Notebook) -> None:
    live.run(
        "def work(x, m):\n    for p in m.parameters(): p.data.fill_(x)\n"
        "    return x + nbtrain.rank()"
    )
    out = live.run("run = ranks.run(work, 2.0, model)")
    assert not out.ename, out.traceback
    assert live.value("run.results, model.weight.unique().tolist()") == ([2.0, 3.0], [2.0])
    live.run("with torch.no_grad(): model.weight.copy_(model_before)")


def an_exception_of_one_rank_leaves_ranks_that_work(live: Notebook) -> None:
    live.run("%%distributed\nkept = rank + 5")
    out = live.run("%%distributed\nif rank == 1: raise ValueError('planted')\n" + SUM[14:])
    assert (out.ename, out.evalue) == ("ValueError", "planted"), out
    assert "raise ValueError('planted')" in out.traceback
    assert "formed a new process group" in out.stdout
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
    assert live.run("%distributed kept").stdout.splitlines() == ["[rank 0] 5", "[rank 1] 6"]


def an_exception_of_one_rank_ends_what_the_others_compute(live: Notebook) -> None:
    cell = "%%distributed\nif rank == 1: raise ValueError('planted')\nwhile True: time.sleep(0.1)"
    out = live.run(cell, timeout=60)
    assert (out.ename, out.evalue) == ("ValueError", "planted"), out
    assert "did not react" not in out.stdout
    assert live.run("%distributed rank").stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def a_deadlock_ends_the_cell_and_names_the_collective(live: Notebook) -> None:
    out = live.run("%%distributed\nif rank == 0: dist.all_reduce(torch.ones(1))", timeout=100)
    assert "rank 0 waits in all_reduce" in out.evalue, out
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def a_deadlock_ends_at_an_interrupt(live: Notebook) -> None:
    cell = "%%distributed\nif rank == 0: dist.all_reduce(torch.ones(1))"
    assert live.run(cell, interrupt_on="running").ename == "KeyboardInterrupt"
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def an_interrupt_ends_the_cell_and_not_the_ranks(live: Notebook) -> None:
    live.run("%%distributed\nkept, process = 1, os.getpid()")
    before = live.value("ranks['process']")
    out = live.run("%%distributed\nwhile True: time.sleep(0.1)", interrupt_on="running")
    assert out.ename == "KeyboardInterrupt", out
    assert live.run("%distributed kept").stdout == "[ranks 0–1] 1\n"
    assert live.value("ranks['process']") == before


def a_cell_in_the_background_brings_its_result_and_can_be_stopped(live: Notebook) -> None:
    out = live.run("%%distributed --background\nkept = 10 + rank\nkept")
    assert not out.ename, out.traceback
    live.run("run = nbtrain.last_run().wait()")
    assert live.value("run.results, run.state.status") == ([10, 11], "succeeded")
    live.run("%%distributed --background\nwhile True: time.sleep(0.1)")
    live.run("nbtrain.last_run().stop()")
    assert live.value("nbtrain.last_run().state.status") == "interrupted"
    assert live.run("%distributed kept").stdout.splitlines() == ["[rank 0] 10", "[rank 1] 11"]


def a_rank_that_dies_leaves_the_others_their_variables(live: Notebook) -> None:
    live.run("%%distributed\nkept = torch.full((2,), 3.0)")
    out = live.run("%%distributed\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert out.ename == "RankDied", out
    assert "rank 1 was killed by SIGKILL" in out.evalue
    assert "%nbtrain restart" in live.run("%distributed 1").evalue
    live.run("%nbtrain pull kept")
    assert live.value("kept.tolist()") == [3.0, 3.0]
    assert "2 ranks live" in live.run("%nbtrain restart").stdout
    assert live.run("%distributed 1 + 1").stdout == "[ranks 0–1] 2\n"


def stop_leaves_nothing(live: Notebook) -> None:
    processes = [psutil.Process(pid) for pid in live.value("list(ranks.pids.values())")]
    assert "2 ranks stopped" in live.run("%nbtrain stop").stdout
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    live.run("import tempfile, glob")
    pattern = "f'{tempfile.gettempdir()}/nbtrain-live-{os.getpid()}-*'"
    assert live.value(f"glob.glob({pattern})") == []
    assert "there are no live ranks" in live.run("%nbtrain status").evalue


CHECKS = (
    variables_stay_from_cell_to_cell,
    a_collective_works_in_one_cell_after_another,
    a_cell_on_one_rank,
    a_long_cell_has_the_board,
    tensors_are_pushed_and_pulled,
    a_model_is_pulled_in_place,
    a_function_runs_with_a_model_as_launch_does,
    an_exception_of_one_rank_leaves_ranks_that_work,
    an_exception_of_one_rank_ends_what_the_others_compute,
    a_deadlock_ends_the_cell_and_names_the_collective,
    a_deadlock_ends_at_an_interrupt,
    an_interrupt_ends_the_cell_and_not_the_ranks,
    a_cell_in_the_background_brings_its_result_and_can_be_stopped,
    a_rank_that_dies_leaves_the_others_their_variables,
    stop_leaves_nothing,
)
"""Each works alone, and after any other: `begin` comes first."""


WITHOUT_THE_RECORDER = [
    check for check in CHECKS if check is not a_deadlock_ends_the_cell_and_names_the_collective
]
"""Those for ranks whose flight recorders cannot be asked within seconds."""


def begin(notebook: Notebook, options: str) -> None:
    """Have two ranks live in a process group; those that do already go on."""
    if not notebook.value("'ranks' in globals() and not ranks.has_ended"):
        notebook.run("torch.manual_seed(1)\nmodel.reset_parameters()")
        notebook.run("model_before = model.weight.detach().clone()")
        started = notebook.run(f"%nbtrain start -n 2 {options}", timeout=150)
        assert "2 ranks live" in started.stdout, started
    joined = notebook.run(JOIN)
    assert not joined.ename, joined.traceback
