"""Ranks that stay between cells, in a real kernel: what a user types, and reads."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbtrain
from nbtrain.errors import NbtrainError
from nbtrain.lifecycle import follower, limits
from nbtrain.lifecycle.follower import Follower
from nbtrain.parts.live.live_ranks import LiveRanks, _hello
from nbtrain.planning.plan import Call, Plan
from nbtrain.tracking.event_log import Reader
from nbtrain.tracking.replay import initial_state
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RunState
from nbtrain.transport.channel import Listener, connect
from tests.support.kernel import Notebook

SETUP = """%load_ext nbtrain
import os, time, torch, nbtrain
import torch.distributed as dist
model = torch.nn.Linear(4, 1)"""

JOIN = """%%distributed
import torch.distributed as dist
dist.init_process_group("gloo")
rank = nbtrain.rank()"""

SUM = """%%distributed
t = torch.ones(1)
dist.all_reduce(t)
t"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Notebook]:
    """Two live ranks of a kernel, in one process group."""
    notebook = Notebook(tmp_path / "home", tmp_path, warm=True)
    try:
        notebook.run(SETUP)
        started = notebook.run("%nbtrain start -n 2")
        assert "2 ranks live" in started.stdout, started
        assert not notebook.run(JOIN).ename
        yield notebook
    finally:
        notebook.close()


def children(notebook: Notebook) -> list[psutil.Process]:
    return notebook.process.children(recursive=True)


def test_variables_stay_from_cell_to_cell(live: Notebook) -> None:
    live.run("%%distributed\ncount = 10 * rank")
    live.run("%%distributed\ncount += 1")
    out = live.run("%%distributed\ncount")
    assert out.stdout.splitlines() == ["[rank 0] 1", "[rank 1] 11"]
    assert not live.value("'count' in globals()")
    live.run("%%distributed\nhistory = [rank]")
    assert live.run("%%distributed\nhistory").stdout.splitlines()[0] == "[rank 0] [0]"  # no magic
    out = live.run("%%distributed\nget_ipython().run_cell('1 / 0')")
    assert out.ename == "ZeroDivisionError"


def test_what_keeps_a_rank_from_a_task_is_told_and_the_ranks_stay(live: Notebook) -> None:
    kind = "class Licensed:\n    def __setstate__(self, state): raise LookupError('expired')"
    live.run(f"{kind}\nlicensed = Licensed()\nlicensed.x = 1")
    for cell in ("%%distributed\nlicensed", "ranks.run(print, licensed)"):
        assert live.run(cell).ename == "LookupError"
    assert not live.run("%%rank 1\nimport os\nos.dup = None").ename  # it cannot open a cell's log
    out = live.run("%%distributed\nrank")
    assert out.ename == "RankDied"
    assert "TypeError" in out.evalue
    assert live.value("ranks.dead()") == []


def test_names_are_those_that_python_stores(live: Notebook) -> None:
    """In NFKC, which a name that is typed as a text is not."""
    micro, first, bold = "\N{MICRO SIGN}", "\N{LATIN SMALL LIGATURE FI}rst", "\U0001d431"
    assert not live.run(f"{first} = 5\n%nbtrain push {first}").ename
    assert not live.run(f"%%distributed --as {bold}\n{micro} = {first} + 1").ename
    assert live.value(f"{bold}.state.status") == "succeeded"
    assert not live.run(f"%nbtrain pull {micro}").ename
    assert live.value(f"{micro}, ranks['{micro}']") == (6, [6, 6])
    assert not live.run(f"%%distributed -n 2 --new --out {bold}@all\n{bold} = 7").ename
    assert live.value(bold) == [7, 7]
    assert live.value(f"ranks.push(**{{'{bold}': 8}}), ranks['x']") == (None, [8, 8])


def test_equal_outputs_are_shown_once_and_prints_have_their_rank(live: Notebook) -> None:
    out = live.run("%%distributed\nprint('hello')\nif rank: print('second')")
    assert out.stdout.splitlines() == ["[ranks 0–1] hello", "[rank 1] second"]
    assert live.run("%distributed 6 * 7").stdout == "[ranks 0–1] 42\n"


def test_a_short_cell_shows_no_board_and_a_long_one_does(live: Notebook) -> None:
    assert not live.run("%%distributed\nx = 1").displays
    long = live.run("%%distributed\nimport time\ntime.sleep(1.5)")
    assert "succeeded" in long.board


def test_rich_output_of_the_first_rank_is_displayed(live: Notebook) -> None:
    out = live.run("%%distributed\nfrom IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    assert [d["text/html"] for d in out.displays if "text/html" in d] == ["<b>0</b>"]


def test_a_cell_on_some_ranks(live: Notebook) -> None:
    assert live.run("%%rank 1\nrank").stdout == "[rank 1] 1\n"
    assert live.run("%%distributed --ranks 0\nrank").stdout == "[rank 0] 0\n"
    assert "there is no rank 7" in live.run("%%rank 7\nrank").evalue


def test_what_ranks_lack_is_sent_and_what_changed_is_named(live: Notebook) -> None:
    live.run("lr = 0.5\ndef double(x): return 2 * x")
    out = live.run("%distributed double(lr)")
    assert "sent to the ranks, which did not have it: `double`, `lr`" in out.stdout
    assert "[ranks 0–1] 1.0" in out.stdout
    live.run("lr = 0.25")
    changed = live.run("%distributed lr").stdout
    assert "the notebook's `lr` changed" in changed
    assert "%nbtrain push lr" in changed
    assert "[ranks 0–1] 0.5" in changed
    live.run("%nbtrain push lr")
    assert live.run("%distributed lr").stdout == "[ranks 0–1] 0.25\n"


def test_what_a_sent_function_calls_and_reads_is_named_when_it_changed(live: Notebook) -> None:
    live.run("import math\nconfig, unknown = {'lr': 1}, math.nan")
    live.run("def inner(): return config['lr']\ndef outer(): return inner(), unknown")
    assert "[ranks 0–1] (1, nan)" in live.run("%distributed outer()").stdout
    assert (
        live.run("%distributed outer()").stdout == "[ranks 0–1] (1, nan)\n"
    )  # nan has not changed
    live.run("def inner(): return -config['lr']")
    assert "the notebook's `inner` changed" in live.run("%distributed outer()").stdout
    live.run("config = {'lr': 2}")
    changed = live.run("%distributed outer()").stdout
    assert "the notebook's `config`, `inner` changed" in changed
    live.run("%nbtrain push config, inner")
    assert live.run("%distributed outer()").stdout == "[ranks 0–1] (-2, nan)\n"


def test_a_function_that_is_sent_does_not_replace_what_it_reads(live: Notebook) -> None:
    live.run("%%distributed\nsize = 100")
    live.run("size = 1\ndef show(): return size")
    assert "[ranks 0–1] 100" in live.run("%distributed show()").stdout


TRAIN = """%%distributed
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(3):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
weights = model.module.weight.detach().clone()"""


def test_a_model_is_pulled_bit_for_bit_in_place(live: Notebook) -> None:
    live.run("same = model")
    assert not live.run(TRAIN).ename
    live.run("%nbtrain pull model weights")
    assert live.value("same is model and torch.equal(model.weight, weights)")
    assert live.value("[w.shape == weights.shape for w in ranks['weights']]") == [True, True]


STEP = "model(torch.ones(2, 4)).sum().backward(); optimizer.step()"

TIED = "[p is q for p, q in zip(optimizer.param_groups[0]['params'], model.parameters())]"


def test_an_optimizer_that_is_pulled_steps_the_notebooks_model(live: Notebook) -> None:
    live.run(TRAIN.replace("SGD", "AdamW"))
    live.run("%nbtrain pull model, optimizer")
    assert live.value(TIED) == [True, True]
    assert live.value("float(optimizer.state[model.weight]['step'])") == 3.0
    live.run(f"before = model.weight.detach().clone(); {STEP}")
    assert live.value("not torch.equal(before, model.weight)")
    # The notebook has one by now, which takes the state of the ranks' in place.
    live.run("mine = optimizer")
    live.run("%%distributed\noptimizer.step()")
    live.run("%nbtrain pull optimizer")
    assert live.value("mine is optimizer and float(mine.state[model.weight]['step'])") == 4.0


def test_what_only_the_ranks_have_is_pulled_as_one(live: Notebook) -> None:
    live.run(
        "%%distributed\nnet = torch.nn.Linear(4, 1)\n"
        "opt = torch.optim.AdamW(net.parameters())\n"
        "schedule = torch.optim.lr_scheduler.StepLR(opt, 1)"
    )
    out = live.run("%nbtrain pull schedule, opt, net")
    assert not out.ename, out.evalue
    assert live.value(
        "opt.param_groups[0]['params'][0] is net.weight and schedule.optimizer is opt"
    )


@pytest.mark.parametrize("order", [("net", "opt", "plan"), ("plan", "opt", "net")])
def test_a_model_and_its_optimizer_are_one_thing_in_whichever_cells_they_are_read(
    live: Notebook, order: tuple[str, ...]
) -> None:
    live.run("net = torch.nn.Linear(4, 1)\nopt = torch.optim.AdamW(net.parameters())")
    live.run("plan = torch.optim.lr_scheduler.StepLR(opt, 1)")
    for name in order:
        assert "sent to the ranks" in live.run(f"%distributed _ = {name}").stdout
    tied = "opt.param_groups[0]['params'][0] is net.weight, plan.optimizer is opt"
    assert "(True, True)" in live.run(f"%distributed {tied}").stdout


def test_a_model_and_its_optimizer_are_one_thing_on_a_rank_of_its_own(live: Notebook) -> None:
    live.run("net = torch.nn.Linear(4, 1)\nopt = torch.optim.AdamW(net.parameters())")
    live.run("%%rank 0\n_ = net")
    out = live.run("%%rank 0\nopt.param_groups[0]['params'][0] is net.weight")
    assert "[rank 0] True" in out.stdout


def test_a_pull_that_fails_changes_nothing(live: Notebook) -> None:
    live.run("first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)")
    live.run("%nbtrain push first, second")
    live.run("%%distributed\n_ = first.weight.data.zero_()\nsecond = torch.nn.Linear(3, 3)")
    out = live.run("%nbtrain pull first second --rank 1")
    assert (
        "`second` of rank 1 and the notebook's `second` differ in more than their values"
        in out.evalue
    )
    assert live.value("bool(first.weight.abs().sum() > 0)")


def test_a_model_that_is_pushed_goes_on_in_what_the_ranks_made_of_it(live: Notebook) -> None:
    live.run(TRAIN)
    live.run("torch.nn.init.constant_(model.weight, 7.0)")
    assert not live.run("%nbtrain push model").ename
    check = "type(model).__name__, model.module.weight.unique().item()"
    tied = TIED.replace("model.", "model.module.")
    assert "('DistributedDataParallel', 7.0)" in live.run(f"%distributed {check}").stdout
    assert "[True, True]" in live.run(f"%distributed {tied}").stdout
    live.run("optimizer = torch.optim.SGD(model.parameters(), lr=0.25)")
    assert not live.run("%nbtrain push model, optimizer").ename
    assert "[True, True]" in live.run(f"%distributed {tied}").stdout
    group = "type(optimizer).__name__, optimizer.param_groups[0]['lr']"
    assert "('AcceleratedOptimizer', 0.25)" in live.run(f"%distributed {group}").stdout


def test_a_push_of_another_kind_of_model_replaces_it_and_names_what_is_left(live: Notebook) -> None:
    live.run(TRAIN)
    live.run("class Net(torch.nn.Linear):\n    def forward(self, x): return super().forward(x) * 2")
    live.run("model = Net(4, 1)")
    out = live.run("%nbtrain push model")
    assert "in the ranks, `optimizer` still refers to what was replaced" in out.stdout
    assert "%nbtrain push model, optimizer replaces all of them" in out.stdout
    assert "'Net'" in live.run("%distributed type(model).__name__").stdout


CHANGES = {
    "a class that is defined anew": (
        "class Net(torch.nn.Linear):\n    def forward(self, x): return 5 + 0 * x.sum()",
        "net = Net(4, 1)",
        "net(torch.ones(1, 4)).item() == 5",
    ),
    "what needs no gradient": ("1", "net.bias.requires_grad_(False)", "not net.bias.requires_grad"),
    "a setting": ("1", "net.scale = 3.0", "net.scale == 3.0"),
    "the mode": ("1", "net.eval()", "not net.training"),
    "an expanded buffer": (
        "1",
        "net.register_buffer('mask', torch.full((1,), 7.0).expand(3))",
        "net.mask.tolist() == [7.0] * 3",
    ),
    "lazy parameters": ("1", "net = torch.nn.LazyLinear(2)", "net(torch.ones(1, 3)).shape[1] == 2"),
    "packed weights": (
        "1",
        "net = torch.ao.quantization.quantize_dynamic(\n"
        "    torch.nn.Sequential(torch.nn.Linear(4, 1)), {torch.nn.Linear}).eval()\n"
        "x = net(torch.ones(1, 4)).item()",
        "net(torch.ones(1, 4)).item() == x",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_all_of_a_model_arrives_that_is_pushed(live: Notebook, change: str) -> None:
    first, second, check = CHANGES[change]
    live.run("class Net(torch.nn.Linear): pass\nnet = Net(4, 1)")
    assert not live.run("%nbtrain push net").ename
    live.run(f"{first}\n{second}")
    out = live.run("%nbtrain push net, x" if "x = " in second else "%nbtrain push net")
    assert not out.ename, out.evalue
    assert live.run(f"%distributed {check}").stdout == "[ranks 0–1] True\n"


def test_an_optimizer_of_other_parameters_is_not_loaded_into_the_ranks_own(live: Notebook) -> None:
    live.run("pair = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2) for n in 'ab'})")
    live.run("opt = torch.optim.SGD(pair.a.parameters(), lr=1.0)")
    live.run("%nbtrain push pair, opt")
    live.run("opt = torch.optim.SGD(pair.b.parameters(), lr=1.0)")
    assert not live.run("%nbtrain push opt").ename
    steps = "opt.param_groups[0]['params'][0] is pair.b.weight"
    assert live.run(f"%distributed {steps}").stdout == "[ranks 0–1] True\n"
    live.run("plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)\n")
    live.run("%nbtrain push plan")
    live.run("plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)\n")
    live.run("%nbtrain push plan")
    check = "plan.lr_lambdas[0](1), plan.optimizer is opt"
    assert live.run(f"%distributed {check}").stdout == "[ranks 0–1] (0.5, True)\n"


def test_an_optimizer_is_not_pulled_without_its_model(live: Notebook) -> None:
    live.run(
        "%%distributed\nnet = torch.nn.Linear(3, 3)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=1.0)"
    )
    out = live.run("%nbtrain pull opt")
    assert "it trains `net`: pull that, too" in out.evalue
    assert not live.run("%nbtrain pull opt net").ename
    assert live.value("opt.param_groups[0]['params'][0] is net.weight")
    live.run("%%distributed\nxs = torch.zeros(2, requires_grad=True)\nown = torch.optim.SGD([xs])")
    assert not live.run("%nbtrain pull own").ename  # of no model


def test_an_optimizer_of_another_model_than_the_ranks_have_is_not_sent_alone(
    live: Notebook,
) -> None:
    live.run("model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=1)")
    out = live.run("%distributed model, optimizer")
    assert out.ename == "PlanError"
    assert "`%nbtrain push model, optimizer` sends both" in out.evalue
    assert not live.run("%nbtrain push model, optimizer").ename
    assert "[True, True]" in live.run(f"%distributed {TIED}").stdout


def test_models_in_a_list_get_the_new_group_after_a_collective_that_failed(live: Notebook) -> None:
    live.run("%%distributed\nmodels = {'a': [torch.nn.parallel.DistributedDataParallel(model)]}")
    assert live.run("%%rank 0\ndist.barrier()", timeout=100).ename
    out = live.run("%%distributed\nmodels['a'][0](torch.ones(2, 4)).sum().backward()\n'trained'")
    assert "[ranks 0–1] 'trained'" in out.stdout, out.evalue


def test_vars_show_where_ranks_differ(live: Notebook) -> None:
    live.run(TRAIN)
    same = live.run("%nbtrain vars").stdout
    assert next(line for line in same.splitlines() if line.startswith("model")).endswith("same")
    live.run("%%rank 1\nwith torch.no_grad():\n    model.module.bias += 1")
    table = live.run("%nbtrain vars").stdout
    line = next(line for line in table.splitlines() if line.startswith("model"))
    assert line.endswith("≠ module.bias")


def test_an_exception_of_one_rank_leaves_ranks_that_work(live: Notebook) -> None:
    live.run("%%distributed\nkept = rank + 5")
    for _ in range(3):
        out = live.run("%%distributed\nif rank == 1: raise ValueError('planted')\n" + SUM[14:])
        assert (out.ename, out.evalue) == ("ValueError", "planted")
        assert "formed a new process group" in out.stdout
        assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
        counting = "%distributed dist.group.WORLD._get_sequence_number_for_group() > 0"
        assert live.run(counting).stdout == "[ranks 0–1] True\n"
    assert live.run("%distributed kept").stdout.splitlines() == ["[rank 0] 5", "[rank 1] 6"]


def test_ranks_that_abort_their_group_as_with_nccl_form_a_new_one(live: Notebook) -> None:
    """gloo aborts nothing, but its processes are in no group after it either."""
    live.run("%%distributed\nfrom nbtrain.parts.live import groups")
    live.run("%distributed setattr(groups, '_can_abort', lambda backend: True)")
    live.run(
        "%%distributed\nnet = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))"
    )
    for _ in range(2):
        out = live.run("%%distributed\nif rank == 1: raise ValueError('planted')\n" + SUM[14:])
        assert (out.ename, out.evalue) == ("ValueError", "planted"), out.traceback
        assert "formed a new process group" in out.stdout
        assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
        out = live.run("%distributed net(torch.ones(1, 4) * rank).sum().backward()")
        assert not out.ename, out.traceback
    out = live.run(
        "%%distributed\nif rank == 0:\n    print('in it', flush=True)\n    dist.barrier()\n"
        "else:\n    time.sleep(600)",
        interrupt_on="in it",
    )
    assert out.ename == "KeyboardInterrupt", out
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_an_exception_of_all_ranks_leaves_the_group_alone(live: Notebook) -> None:
    out = live.run("%distributed 1 / 0")
    assert out.ename == "ZeroDivisionError"
    assert "process group" not in out.stdout


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("if rank == 0: dist.all_reduce(torch.ones(1))", "rank 0 waits in all_reduce #1"),
        (
            "dist.all_reduce(torch.ones(1)) if rank else dist.all_gather_object([0, 0], 1)",
            "these do not match",
        ),
    ],
)
def test_a_deadlock_ends_the_cell_and_not_the_ranks(live: Notebook, cell: str, said: str) -> None:
    out = live.run(f"%%distributed\n{cell}", timeout=100)
    assert out.ename in ("RunTimeout", "RuntimeError"), out
    assert said in out.evalue or out.ename == "RuntimeError"
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_a_collective_of_a_cell_on_some_ranks_names_the_others(live: Notebook) -> None:
    out = live.run("%%rank 0\ndist.all_reduce(torch.ones(1))", timeout=100)
    assert "rank 1 does not run this cell" in out.evalue.lower()
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
    again = live.run("%%rank 1\ndist.barrier()", timeout=100)  # the group counts anew
    assert "stopped because of a deadlock" in again.evalue
    assert "rank 0 does not run this cell" in again.evalue.lower()


def test_an_interrupt_ends_the_cell_and_not_the_ranks(live: Notebook) -> None:
    live.run("%%distributed\nkept = 1")
    before = live.value("ranks.pids")
    out = live.run(
        "%%distributed\nimport time\nwhile True: time.sleep(0.1)", interrupt_on="running"
    )
    assert out.ename == "KeyboardInterrupt"
    assert live.run("%distributed kept").stdout == "[ranks 0–1] 1\n"
    assert live.value("ranks.pids") == before


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_leaves_the_others_their_variables(live: Notebook, dead: int) -> None:
    live.run(
        "%%distributed\nkept = torch.full((2,), 3.0 + rank)\n_ = model.weight.data.fill_(rank)"
    )
    out = live.run(f"%%distributed\nif rank == {dead}: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert out.ename == "RankDied"
    assert f"rank {dead} was killed by SIGKILL" in out.evalue
    assert "%nbtrain restart" in live.run("%distributed 1").evalue
    live.run("same = model")
    other = 1 - dead
    assert not live.run(f"%nbtrain pull kept model --rank {other}").ename
    assert live.value("kept.tolist()") == [3.0 + other] * 2
    assert live.value(f"same is model and model.weight.tolist() == [[{other}.0] * 4]")
    assert "2 ranks live" in live.run("%nbtrain restart").stdout
    assert live.run("%distributed 1 + 1").stdout == "[ranks 0–1] 2\n"


def test_a_mistake_in_a_command_costs_nothing(live: Notebook) -> None:
    live.run("%%distributed\nkept = rank")
    assert "--bogus" in live.run("%nbtrain restart --bogus").evalue
    assert "there is no rank 7" in live.run("%nbtrain pull kept --rank 7").evalue
    live.run("%nbtrain pull kept --rank 1")
    assert live.value("kept") == 1
    assert live.run("%distributed kept").stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_run_is_launch_on_live_ranks(live: Notebook) -> None:
    live.run("def work(x, m):\n    for p in m.parameters(): p.data.fill_(x)\n    return x + rank")
    live.run("run = ranks.run(work, 2.0, model)")
    assert live.value("run.results, model.weight.unique().tolist()") == ([2.0, 3.0], [2.0])


def test_options_of_the_start_are_refused_and_new_ranks_can_be_had(live: Notebook) -> None:
    assert "takes effect only when ranks start" in live.run("%%distributed -n 3\n1").evalue
    assert "--new" in live.run("%%distributed --detach\n1").evalue
    out = live.run("%%distributed --new -n 3 --view text\nnbtrain.world_size()")
    assert "all ranks → 3" in out.stdout
    assert "live ranks are already running" in live.run("%nbtrain start -n 2").evalue


def test_nothing_is_left_when_ranks_are_stopped(live: Notebook, tmp_path: Path) -> None:
    assert not list(tmp_path.glob("nbtrain-live-*"))  # which a killed kernel would leave
    assert "2 ranks stopped" in live.run("%nbtrain stop").stdout
    assert not children(live)
    assert not list(tmp_path.glob("nbtrain-live-*"))
    assert "there are no live ranks" in live.run("%nbtrain status").evalue
    out = live.run("%%distributed -n 2 --view text\nnbtrain.rank()")
    assert "rank 1 → 1" in out.stdout


def test_they_end_with_the_kernel(live: Notebook) -> None:
    left = children(live)
    assert len(left) >= 2
    live.process.kill()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def test_idle_ranks_end_themselves_and_the_next_cell_says_so(live: Notebook) -> None:
    live.run("%nbtrain stop")
    assert "must be a number of seconds" in live.run("%nbtrain start --idle-timeout 0").evalue
    live.run("%nbtrain start -n 2 --idle-timeout 0.5")
    out = live.run("%%distributed\nimport time\ntime.sleep(1.5)\n'no idleness'")
    assert "no idleness" in out.stdout + out.board, out
    psutil.wait_procs(children(live), timeout=60)
    live.run("while not ranks.has_ended: time.sleep(0.01)")
    gone = "ended themselves after 0.5 s without a cell"
    assert gone in live.run("%%distributed -n 2\nnbtrain.rank()").evalue
    assert gone in live.run("%nbtrain status").evalue
    assert gone in live.run("ranks['x']").evalue
    assert "2 ranks live" in live.run("%nbtrain restart").stdout
    psutil.wait_procs(children(live), timeout=60)


@pytest.mark.parametrize(
    "end",
    [
        "%%distributed\nos._exit(3)",
        "%%distributed\nos.kill(os.getpid(), 9)",
        "for p in psutil.Process().children(): p.kill()\n"
        "while not ranks.has_ended: time.sleep(0.01)",
    ],
)
def test_a_cell_for_live_ranks_that_are_gone_runs_nowhere(live: Notebook, end: str) -> None:
    live.run("import psutil, time\nmodel = torch.nn.Linear(1, 1)\nran = []")
    live.run(end)
    for _ in range(2):  # until the user decides
        out = live.run("%%distributed\ndef train(model): model.weight.data.fill_(7)")
        assert out.ename == "PlanError"
        assert "The live ranks have ended; variables that only they had are lost" in out.evalue
        assert "`%nbtrain restart` starts new live ranks" in out.evalue
        assert live.value("model.weight.item()") != 7
    assert not live.run("%%distributed --new -n 2\nnbtrain.rank()").ename
    assert "have already ended" in live.run("%nbtrain stop").stdout
    live.run("%%distributed -n 2\nnbtrain.rank()")
    assert live.value("nbtrain.last_run().results") == [0, 1]


def test_spawned_ranks_live_too(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path / "home", tmp_path, warm=True)
    try:
        notebook.run(SETUP)
        assert "2 ranks live (spawn" in notebook.run("%nbtrain start -n 2 -e spawn").stdout
        assert not notebook.run(JOIN).ename
        assert notebook.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
        assert not notebook.run(TRAIN).ename
        notebook.run("%nbtrain pull model weights")
        assert notebook.value("torch.equal(model.weight, weights)")
    finally:
        notebook.close()


def test_outside_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbtrain

    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path))
    with nbtrain.start(num_processes=2) as ranks:
        assert ranks.run(nbtrain.rank).results == [0, 1]
        ranks.push(x=[1, 2])
        assert ranks["x"] == [[1, 2], [1, 2]]
        began = time.monotonic()
    assert ranks.has_ended
    assert time.monotonic() - began < 60


SHARDED = """%%distributed
from torch.distributed.fsdp import fully_shard
m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
fully_shard(m)
m(torch.ones(2, 4)).sum().backward()"""


def test_a_sharded_model_is_described_without_a_collective(live: Notebook) -> None:
    assert not live.run(SHARDED).ename
    table = live.run("%nbtrain vars")
    assert "25 parameters" in table.stdout, table
    assert live.value("repr(ranks['m'][0])").startswith("<not sent: ")
    live.run("%%distributed\nwhole = m[0].weight.full_tensor().detach()")
    live.run("torch.manual_seed(7)")  # forked ranks make what the notebook would make
    live.run("m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))")
    live.run("before = m[0].weight.clone()\n%nbtrain pull m whole")
    assert live.value("torch.equal(before, whole), torch.equal(m[0].weight, whole)") == (
        False,
        True,
    )
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


@pytest.mark.slow
def test_a_rank_that_answers_no_question_is_given_up(live: Notebook, tmp_path: Path) -> None:
    live.run(
        "%%distributed\nclass Slow:\n    def __reduce__(self):\n"
        "        while True:\n            try: time.sleep(60)\n"
        "            except KeyboardInterrupt: pass\n"
        "import time\nslow = Slow() if rank else 1"
    )
    live.run("from nbtrain.parts.live import limits\nlimits.REPLY_TIMEOUT_S = 1.0")
    assert "rank 1 did not answer within 1 s" in live.run("ranks['slow']").evalue
    assert "%nbtrain restart" in live.run("%distributed 1").evalue
    assert "2 ranks live" in live.run("%nbtrain restart").stdout


def test_an_interrupted_question_leaves_ranks_that_work(live: Notebook) -> None:
    live.run(
        "%%distributed\nimport time\nclass Slow:\n    def __reduce__(self):\n"
        "        time.sleep(60)\nslow = Slow() if rank else 1"
    )
    out = live.run("print('asking', flush=True)\nranks['slow']", interrupt_on="asking")
    assert out.ename == "KeyboardInterrupt"
    assert live.run("%distributed rank").stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_a_question_that_is_interrupted_before_the_ranks_read_it_is_not_answered(
    live: Notebook,
) -> None:
    live.run(
        "%%distributed\nimport time\nclass Slow:\n    def __reduce__(self):\n"
        "        time.sleep(600)\nslow = Slow()"
    )
    processes = [psutil.Process(pid) for pid in live.value("list(ranks.pids.values())")]
    for _ in range(5):  # it is by chance how far a rank is when both messages are there
        for process in processes:
            process.suspend()
        out = live.run("print('asking', flush=True)\nranks['slow']", interrupt_on="asking")
        for process in processes:
            process.resume()
        assert out.ename == "KeyboardInterrupt"
        assert live.run("%distributed rank").stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_sys_exit_ends_the_cell_and_not_the_rank(live: Notebook) -> None:
    out = live.run("%%distributed\nimport sys\nif rank: sys.exit(3)")
    assert (out.ename, "sys.exit(3)" in out.evalue) == ("RuntimeError", True)
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_nothing_gathers_in_kernel_or_ranks(live: Notebook) -> None:
    count = "len(os.listdir('/proc/self/fd')), len(nbtrain.system.instrumentation.patches())"
    asking = "%%distributed --out held@all\nimport nbtrain.system.instrumentation\nheld = " + count

    def look() -> tuple[object, object]:
        live.run(asking)
        return live.value("held"), live.value("len(os.listdir('/proc/self/fd'))")

    live.run("%%rank 1\nonly_here = 1")
    for _ in range(3):
        live.run("%distributed rank")
    before = look()
    for _ in range(10):
        live.run("%distributed rank")
        assert "there is no variable" in live.run("ranks['only_here']").evalue
        assert live.run("%distributed 1 / 0").ename == "ZeroDivisionError"
    assert look() == before


LATE = """%%distributed
import threading
go = threading.Event()
thread = threading.Thread(target=lambda: (go.wait(), print("late")))
thread.start()"""


def test_a_thread_that_outlives_its_cell_prints_into_the_one_that_runs(live: Notebook) -> None:
    assert live.run(LATE).stdout == ""
    assert live.run("%%distributed\ngo.set()\nthread.join()").stdout == "[ranks 0–1] late\n"


HELD = """from collections import Counter
import gc
def held():
    gc.collect()
    kinds = (type(o) for o in gc.get_objects())
    ours = (k for k in kinds if str(k.__module__).startswith("nbtrain"))
    return dict(Counter(f"{k.__module__}.{k.__qualname__}" for k in ours))"""


def test_cells_that_fail_one_after_the_other_are_not_kept(live: Notebook) -> None:
    live.run(HELD)

    def fail(times: int) -> dict[str, int]:
        for _ in range(times):
            assert live.run("%distributed 1 / 0").ename == "ZeroDivisionError"
        counts: dict[str, int] = live.value("held()")
        return counts

    early, later = fail(3), fail(6)
    assert {kind: n for kind, n in later.items() if n - early.get(kind, 0) >= 4} == {}


def test_of_runs_that_the_notebook_keeps_little_is_kept(live: Notebook) -> None:
    live.run(HELD)
    for _ in range(4):
        live.run("%distributed rank")
    held = live.value("held()")
    assert held["nbtrain.lifecycle.run.Run"] >= 4  # IPython has them in Out
    assert held.get("nbtrain.lifecycle.supervisor.Supervisor", 0) <= 2


def test_a_cell_that_defines_what_a_later_one_calls_brings_no_note(live: Notebook) -> None:
    define = (
        "%%distributed\n"
        "def train(steps):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(steps):\n"
        "        optimizer.step()\n"
        "    return steps\n"
        "is_ready = True"
    )
    out = live.run(define)
    assert out.stdout == "", out
    assert "[ranks 0–1] 3" in live.run("%%distributed\ntrain(3)").stdout


WAIT_FOR = """%%distributed {options}
import os, time
while not os.path.exists({go!r}): time.sleep(0.01)
found = 10 + rank
found"""


def test_a_background_cell_leaves_the_prompt_free_and_the_next_cell_waits(
    live: Notebook, tmp_path: Path
) -> None:
    go = str(tmp_path / "go")
    out = live.run(WAIT_FOR.format(go=go, options="--background --name sweep"))
    assert not out.ename, out.traceback
    assert not live.value("nbtrain.last_run().state.is_over")
    assert live.run("%nbtrain status").stdout.count("`sweep") == 2
    again = live.run("%%distributed --background\n1")
    assert "the ranks are busy with `sweep" in again.evalue
    live.run(f"import threading\nthreading.Timer(0.5, open, ({go!r}, 'w')).start()")
    out = live.run("%distributed found")
    assert "The ranks are busy with `sweep" in out.stdout
    assert out.stdout.splitlines()[-2:] == ["[rank 0] 10", "[rank 1] 11"]
    assert "idle for" in live.run("%nbtrain status").stdout
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_a_background_cell_brings_its_result_and_can_be_stopped(
    live: Notebook, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    live.run(WAIT_FOR.format(go=str(go), options="--background"))
    go.touch()
    live.run("run = nbtrain.last_run().wait()")
    assert live.value("run.results, run.state.status") == ([10, 11], "succeeded")
    go.unlink()
    live.run(WAIT_FOR.format(go=str(go), options="--background"))
    waiting = live.run("ranks['found']", interrupt_on="Waiting until it ends")
    assert waiting.ename == "KeyboardInterrupt"
    assert not live.value("nbtrain.last_run().state.is_over")
    live.run("nbtrain.last_run().stop()")
    assert live.value("nbtrain.last_run().state.status") == "interrupted"
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


def test_a_background_cell_that_fails_leaves_ranks_that_work(live: Notebook) -> None:
    out = live.run("%%distributed --background\nif rank: 1 / 0\ndist.barrier()")
    assert not out.ename, out.traceback
    live.run("run = nbtrain.last_run().wait()")
    assert live.value("type(run.exception).__name__") == "ZeroDivisionError"
    out = live.run(SUM)
    assert "formed a new process group" in out.stdout
    assert "tensor([2.])" in out.stdout
    live.run("%%rank 1 --background\nkept = 5")  # the other rank is none that must begin
    live.run("run = nbtrain.last_run().wait()")
    assert live.run("%%rank 1\nkept").stdout == "[rank 1] 5\n"


@pytest.mark.parametrize("background", [True, False])
def test_ranks_whose_task_in_the_background_is_over_take_the_next_one(
    background: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who has waited for the run may be back before the ranks are ready for another."""
    somebody_waits, recover = threading.Event(), LiveRanks._recover

    def recover_late(self: LiveRanks) -> None:
        if threading.current_thread() is not threading.main_thread():
            somebody_waits.wait()
        recover(self)

    class IsFree(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                somebody_waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(LiveRanks, "_recover", recover_late)
    first = Plan(Call(nbtrain.rank), "first", background=True, view="none")
    with nbtrain.start(2) as ranks:
        ranks._is_free = IsFree()
        ranks._is_free.set()
        try:
            ranks.run_plan(first).wait()
            assert not ranks._is_free.is_set()
            second = ranks.run_plan(replace(first, name="second", background=background))
            assert second.wait().results == [0, 1]
        finally:
            somebody_waits.set()
    assert "busy" not in capsys.readouterr().out


def test_live_ranks_can_be_stopped_while_a_background_cell_runs(
    live: Notebook, tmp_path: Path
) -> None:
    live.run(WAIT_FOR.format(go=str(tmp_path / "go"), options="--background"))
    assert "2 ranks stopped" in live.run("%nbtrain stop").stdout
    assert live.value("nbtrain.last_run().wait().state.is_over")
    assert not children(live)


@pytest.mark.parametrize(
    "first", [{"secret": "a guess", "rank": 0}, {"secret": "geheim-ö"}, {"rank": 0}, [1], "text"]
)
def test_who_does_not_know_the_secret_is_not_let_in(first: object) -> None:
    listener = Listener("127.0.0.1")
    there, here = connect(listener.address), listener.accept(5)
    assert here is not None
    there.send(first)  # type: ignore[arg-type]
    assert _hello(here, "the secret") is None
    with pytest.raises(EOFError):
        there.receive()
    for end in (there, listener):
        end.close()


def test_a_stranger_that_says_what_nobody_can_read_is_not_let_in_either() -> None:
    listener = Listener("127.0.0.1")
    stranger = socket.create_connection(listener.address)  # type: ignore[arg-type]
    here = listener.accept(5)
    assert here is not None
    nested = b"[" * 60_000
    stranger.sendall(struct.pack("!IQ", len(nested), 0) + nested)
    assert _hello(here, "the secret") is None
    stranger.close()
    listener.close()


def test_a_start_that_is_refused_leaves_no_socket() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NbtrainError) as refused:
        nbtrain.start(2, config="no such file")
    assert set(os.listdir("/proc/self/fd")) == before, refused.value


def test_a_long_path_of_temporary_files_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    notebook = Notebook(tmp_path / "home", tmp_path)
    try:
        notebook.run("%load_ext nbtrain")
        assert "2 ranks live" in notebook.run("%nbtrain start -n 2").stdout
        assert notebook.run("%distributed 1").stdout == "[ranks 0–1] 1\n"
        notebook.run("%nbtrain stop")
    finally:
        notebook.close()


def test_a_rank_may_say_hello_before_its_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    may_look, look, accept = threading.Event(), Follower._read_events, Listener.accept
    connected = []

    def nothing_yet(folder: RunFolder) -> tuple[RunState, float, Reader]:
        state = initial_state(folder.read_manifest())
        return state, 0.0, Reader(folder, state.world_size)

    def accepted(*args: Any) -> Any:
        if len(connected) == 2:  # and it waits, still
            may_look.set()
        if channel := accept(*args):
            connected.append(channel)
        return channel

    monkeypatch.setattr(limits, "START_TIMEOUT_S", 0.0)  # as after 20 s on a busy machine
    monkeypatch.setattr(follower, "catch_up", nothing_yet)
    monkeypatch.setattr(Follower, "_read_events", lambda self: may_look.is_set() and look(self))
    monkeypatch.setattr(Listener, "accept", accepted)
    with nbtrain.start(2) as ranks:
        known = [*ranks.pids]
        may_look.set()
        assert known == [0, 1]
        assert ranks.run(nbtrain.rank).results == [0, 1]


MODULE = """X = {0}
def f():
    return {0}
class C:
    def g(self):
        return {0}
"""
RELOADS = {
    "reload": "importlib.reload(own_module)\nfrom own_module import f, C\nc = C()",
    "autoreload": "%reload_ext autoreload\n%autoreload 2",
}


@pytest.mark.parametrize("how", RELOADS)
def test_ranks_run_the_code_of_a_module_that_the_notebook_has_loaded_anew(
    live: Notebook, tmp_path: Path, how: str
) -> None:
    file = tmp_path / "own_module.py"
    file.write_text(MODULE.format(1))
    live.run(f"import importlib, sys\nsys.path.insert(0, {str(tmp_path)!r})")
    live.run("sys.dont_write_bytecode = True  # two versions may have one modification time")
    live.run("import own_module\nfrom own_module import f, C\nc = C()")
    if how == "autoreload":
        live.run(RELOADS[how])
    see = "%%distributed\nf(), c.g(), own_module.f(), own_module.X"
    live.run(see)
    assert live.value("nbtrain.last_run().results") == [(1, 1, 1, 1)] * 2
    for version in (2, 3):
        file.write_text(MODULE.format(version))
        later = time.time() + 10 * version  # `%autoreload` looks for newer files
        os.utime(file, (later, later))
        live.run(RELOADS[how])
        assert live.value("f(), c.g(), own_module.f(), own_module.X") == (version,) * 4
        live.run("%nbtrain push f")
        live.run("%%rank 1\npass")
        live.run(see)
        assert live.value("nbtrain.last_run().results") == [(version,) * 4] * 2


COUNTER = """count = 0
def add():
    global count
    count += 1
    return count
def set_up():
    global parse, act
    from json import loads as parse
    act = lambda: 1
"""


def test_a_module_that_gets_a_function_in_the_notebook_keeps_its_state_in_ranks(
    live: Notebook, tmp_path: Path
) -> None:
    (tmp_path / "own_counter.py").write_text(COUNTER)
    live.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport own_counter")
    live.run("%%distributed\nown_counter.add()")
    live.run("own_counter.set_up()\nown_counter.extra = lambda: 2")
    live.run("%%distributed\nown_counter.add()")
    assert live.value("nbtrain.last_run().results") == [2, 2]


def test_a_module_that_does_not_load_in_the_ranks_is_tried_again(
    live: Notebook, tmp_path: Path
) -> None:
    """Not once: after the error, the ranks would go on with the old code."""
    file = tmp_path / "other_module.py"
    file.write_text("def f():\n    return 1\n")
    live.run(f"import importlib, os, sys\nsys.path.insert(0, {str(tmp_path)!r})")
    live.run("sys.dont_write_bytecode = True\nimport other_module")
    see = "%%distributed\nother_module.f()"
    live.run(see)
    raises = "import nbtrain\nassert not os.environ.get('BREAKS')\n"
    file.write_text(f"import os\n{raises}def f():\n    return 2\n")
    live.run("%%distributed\nos.environ['BREAKS'] = 'yes'")
    live.run("importlib.reload(other_module)")
    for _ in range(2):
        assert live.run(see).ename
    file.write_text("def f():\n    return 33\n")
    live.run("importlib.reload(other_module)")
    assert not live.run(see).ename
    assert live.value("nbtrain.last_run().results") == [33, 33]
