"""Ranks that stay between cells, in a real kernel: what a user types, and reads."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import nbtrain
from nbtrain.errors import NbtrainError
from nbtrain.parts.live.live_ranks import _hello
from nbtrain.transport.channel import Listener, connect
from tests.parts.live.contract import JOIN, SETUP, SUM
from tests.support.kernel import Notebook

FORGET = "for name in {*globals()} - first_names: del globals()[name]"
"""Has the notebook, or the ranks, begin anew."""


@pytest.fixture(scope="module")
def kernel(shared_kernel: Notebook) -> Notebook:
    names = "del model_before, same\nfirst_names = {*globals(), 'first_names', 'ranks'}"
    shared_kernel.run(f"{SETUP}\n{names}")
    return shared_kernel


@pytest.fixture
def live(kernel: Notebook) -> Notebook:
    """Two live ranks of the module's kernel, in one process group and without variables."""
    are_two = kernel.value("'ranks' in globals() and not ranks.has_ended and len(ranks) == 2")
    if not are_two or kernel.run(f"%%distributed\n{FORGET}").ename:
        kernel.run("%nbtrain stop")
        started = kernel.run("%nbtrain start -n 2")
        assert "2 ranks live" in started.stdout, started
        kernel.run("%%distributed\nfirst_names = {*globals(), 'first_names'}")
    kernel.run(f"{FORGET}\nmodel = torch.nn.Linear(4, 1)")
    assert not kernel.run(JOIN).ename
    return kernel


@pytest.fixture
def folder(live: Notebook) -> Path:
    """Where the notebook's modules are."""
    return Path(live.value("os.getcwd()"))


def children(notebook: Notebook) -> list[psutil.Process]:
    return notebook.process.children(recursive=True)


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


def test_what_ranks_print_and_show_has_their_rank(live: Notebook) -> None:
    out = live.run("%%distributed\nprint('hello')\nif rank: print('second')")
    assert out.stdout.splitlines() == ["[ranks 0–1] hello", "[rank 1] second"]
    assert live.run("%distributed 6 * 7").stdout == "[ranks 0–1] 42\n"
    out = live.run("%%distributed\nfrom IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    assert [d["text/html"] for d in out.displays] == ["<b>0</b>"]  # and no board for a short cell
    assert live.run("%%distributed --ranks 0\nrank").stdout == "[rank 0] 0\n"
    assert "there is no rank 7" in live.run("%%rank 7\nrank").evalue
    live.run("%%distributed\nhistory = [rank]")
    assert live.run("%%distributed\nhistory").stdout.splitlines()[0] == "[rank 0] [0]"  # no magic


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("get_ipython().run_cell('1 / 0')", "ZeroDivisionError"),
        ("import sys\nsys.exit(3)", "RuntimeError"),
    ],
)
def test_a_cell_that_fails_on_all_ranks_leaves_their_group(
    live: Notebook, cell: str, error: str
) -> None:
    out = live.run(f"%%distributed\n{cell}")
    assert out.ename == error
    assert "process group" not in out.stdout
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"


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


STEP = "model(torch.ones(2, 4)).sum().backward(); optimizer.step()"

TIED = "[p is q for p, q in zip(optimizer.param_groups[0]['params'], model.parameters())]"


def test_an_optimizer_that_is_pulled_steps_the_notebooks_model(live: Notebook) -> None:
    live.run(TRAIN.replace("SGD", "AdamW"))
    live.run("same = model")
    live.run("%nbtrain pull model, optimizer, weights")
    assert live.value("same is model and torch.equal(model.weight, weights)")
    assert live.value("[w.shape == weights.shape for w in ranks['weights']]") == [True, True]
    assert live.value(TIED) == [True, True]
    assert live.value("float(optimizer.state[model.weight]['step'])") == 3.0
    live.run(f"before = model.weight.detach().clone(); {STEP}")
    assert live.value("not torch.equal(before, model.weight)")
    # The notebook has one by now, which takes the state of the ranks' in place.
    live.run("mine = optimizer")
    live.run("%%distributed\noptimizer.step()")
    live.run("%nbtrain pull optimizer")
    assert live.value("mine is optimizer and float(mine.state[model.weight]['step'])") == 4.0


def test_a_model_and_its_optimizer_are_one_thing_in_whichever_cells_they_are_read(
    live: Notebook,
) -> None:
    live.run("net = torch.nn.Linear(4, 1)\nopt = torch.optim.AdamW(net.parameters())")
    live.run("plan = torch.optim.lr_scheduler.StepLR(opt, 1)")
    for name in ("plan", "opt", "net"):
        assert "sent to the ranks" in live.run(f"%distributed _ = {name}").stdout
    tied = "opt.param_groups[0]['params'][0] is net.weight, plan.optimizer is opt"
    assert "(True, True)" in live.run(f"%distributed {tied}").stdout


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


def test_all_of_a_model_arrives_that_is_pushed(live: Notebook) -> None:
    live.run("class Net(torch.nn.Linear): pass\nnet = Net(4, 1)")
    assert not live.run("%nbtrain push net").ename
    live.run("net.eval()\nnet.bias.requires_grad_(False)\nnet.scale = 3.0")
    live.run("net.register_buffer('mask', torch.full((1,), 7.0).expand(3))")
    assert not live.run("%nbtrain push net").ename
    check = "net.training, net.bias.requires_grad, net.scale, net.mask.tolist()"
    expected = "(False, False, 3.0, [7.0, 7.0, 7.0])"
    assert live.run(f"%distributed {check}").stdout == f"[ranks 0–1] {expected}\n"
    live.run("class Net(torch.nn.Linear):\n    def forward(self, x): return 5 + 0 * x.sum()")
    live.run("net = Net(4, 1)")
    assert not live.run("%nbtrain push net").ename
    check = "net(torch.ones(1, 4)).item() == 5"
    assert live.run(f"%distributed {check}").stdout == "[ranks 0–1] True\n"


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


def test_models_in_a_list_get_the_new_group_after_an_exception(live: Notebook) -> None:
    live.run("%%distributed\nmodels = {'a': [torch.nn.parallel.DistributedDataParallel(model)]}")
    assert live.run("%%distributed\nif rank: raise ValueError\ndist.barrier()").ename
    out = live.run("%%distributed\nmodels['a'][0](torch.ones(2, 4)).sum().backward()\n'trained'")
    assert "[ranks 0–1] 'trained'" in out.stdout, out.evalue


def test_vars_show_where_ranks_differ(live: Notebook) -> None:
    live.run(TRAIN)
    same = live.run("%nbtrain vars").board
    assert next(line for line in same.splitlines() if line.startswith("model")).split()[1] == "same"
    live.run("%%rank 1\nwith torch.no_grad():\n    model.module.bias += 1")
    table = live.run("%nbtrain vars").board
    line = next(line for line in table.splitlines() if line.startswith("model"))
    assert "  ≠ module.bias  " in line


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
    live.run("%nbtrain stop")  # these ranks would abort it in the next test, too


def test_a_collective_of_a_cell_on_some_ranks_names_the_others(live: Notebook) -> None:
    out = live.run("%%rank 0\ndist.all_reduce(torch.ones(1))", timeout=100)
    assert "rank 1 does not run this cell" in out.evalue.lower()
    assert live.run(SUM).stdout == "[ranks 0–1] tensor([2.])\n"
    again = live.run("%%rank 1\ndist.barrier()", timeout=100)  # the group counts anew
    assert "stopped because of a deadlock" in again.evalue
    assert "rank 0 does not run this cell" in again.evalue.lower()


def test_a_mistake_in_a_command_costs_nothing(live: Notebook) -> None:
    live.run("%%distributed\nkept = rank")
    assert "--bogus" in live.run("%nbtrain restart --bogus").evalue
    assert "there is no rank 7" in live.run("%nbtrain pull kept --rank 7").evalue
    live.run("%nbtrain pull kept --rank 1")
    assert live.value("kept") == 1
    assert live.run("%distributed kept").stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_options_of_the_start_are_refused_and_new_ranks_can_be_had(live: Notebook) -> None:
    assert "takes effect only when ranks start" in live.run("%%distributed -n 3\n1").evalue
    assert "--new" in live.run("%%distributed --detach\n1").evalue
    out = live.run("%%distributed --new -n 3 --view text\nnbtrain.world_size()")
    assert "all ranks → 3" in out.stdout
    assert "live ranks are already running" in live.run("%nbtrain start -n 2").evalue


def test_nothing_is_left_when_ranks_are_stopped(live: Notebook, folder: Path) -> None:
    assert not list(folder.glob("nbtrain-live-*"))  # which a killed kernel would leave
    assert "2 ranks stopped" in live.run("%nbtrain stop").stdout
    assert not children(live)
    assert not list(folder.glob("nbtrain-live-*"))
    assert "there are no live ranks" in live.run("%nbtrain status").evalue
    out = live.run("%%distributed -n 2 --view text\nnbtrain.rank()")
    assert "rank 1 → 1" in out.stdout


def test_they_end_with_the_kernel(start_kernel: Callable[..., Notebook]) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\n%nbtrain start -n 2")
    left = children(kernel)
    assert len(left) >= 2
    kernel.process.kill()
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


def test_ranks_import_from_where_the_notebook_does(live: Notebook, tmp_path: Path) -> None:
    (tmp_path / "of_the_user.py").write_text("class Thing: number = 7")
    (tmp_path / "colorsys.py").write_text("is_of_the_user = True")  # as one of Python's
    live.run(f"import sys, pathlib\nsys.path += [{str(tmp_path)!r}, pathlib.Path('x')]")
    assert not live.run("%%distributed\nimport of_the_user").ename
    live.run("import of_the_user\nthing = of_the_user.Thing()")
    live.run(
        "%%distributed\nimport colorsys\nnumber = thing.number, hasattr(colorsys, 'is_of_the_user')"
    )
    assert live.value("ranks['number']") == [(7, False)] * 2


def test_outside_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)  # too long for the name of a socket
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with nbtrain.start(num_processes=2) as ranks:
        assert ranks.run(nbtrain.rank).results == [0, 1]
        ranks.push(x=[1, 2])
        assert ranks["x"] == [[1, 2], [1, 2]]
    assert ranks.has_ended
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NbtrainError):
        nbtrain.start(2, config="no such file")
    assert set(os.listdir("/proc/self/fd")) == before


SHARDED = """%%distributed
from torch.distributed.fsdp import fully_shard
m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
fully_shard(m)
m(torch.ones(2, 4)).sum().backward()"""


def test_a_sharded_model_is_described_without_a_collective(live: Notebook) -> None:
    assert not live.run(SHARDED).ename
    table = live.run("%nbtrain vars").board
    assert "25 parameters" in table
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
    live.run("from nbtrain.parts.live import limits")
    live.run("before, limits.REPLY_TIMEOUT_S = limits.REPLY_TIMEOUT_S, 1.0")
    assert "rank 1 did not answer within 1 s" in live.run("ranks['slow']").evalue
    live.run("limits.REPLY_TIMEOUT_S = before")
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
    assert live.run("%nbtrain status").board.count("`sweep") == 2
    again = live.run("%%distributed --background\n1")
    assert "the ranks are busy with `sweep" in again.evalue
    live.run(f"import threading\nthreading.Timer(0.5, open, ({go!r}, 'w')).start()")
    out = live.run("%distributed found")
    assert "The ranks are busy with `sweep" in out.stdout
    assert out.stdout.splitlines()[-2:] == ["[rank 0] 10", "[rank 1] 11"]
    assert "idle for" in live.run("%nbtrain status").board
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


@pytest.mark.parametrize("how", RELOADS)  # last: the kernel has %autoreload after it
def test_ranks_run_the_code_of_a_module_that_the_notebook_has_loaded_anew(
    live: Notebook, folder: Path, how: str
) -> None:
    file = folder / "own_module.py"
    file.write_text(MODULE.format(1))
    live.run("import importlib, sys")
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
