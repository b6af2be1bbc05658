"""Cells on a Ray cluster of several simulated nodes: as anywhere else, and from both nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.cluster_trainings import DDP, RESUMES, SPIN
from tests.support.kernel import Notebook, Outputs
from tests.support.strangers import listening
from tests.support.waiting import wait_until

from .runs import number_of
from .simulated import Simulated

HANGS = """
def hangs():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(3))
"""


def test_a_cell_trains_on_two_nodes_and_the_weights_come_home(notebook: Notebook) -> None:
    notebook.run("torch.manual_seed(0); model = torch.nn.Linear(4, 1); before = id(model)")
    out = notebook.run(f"%%distributed -e ray --nodes 2 -n 2\n{DDP}", timeout=120)
    assert not out.ename, out.traceback
    notebook.run("run = nbtrain.last_run()")
    first, second = notebook.value("run.results")
    assert first == second == notebook.value("[p.tolist() for p in model.parameters()]")
    assert notebook.value("id(model) == before")
    nodes = notebook.value("[r.node for r in run.state.ranks]")
    assert len(set(nodes)) == 2
    assert all(node in out.board for node in nodes)
    assert notebook.value("[run.logs(r) for r in (0, 1)]") == [
        "trained on node 0 of 2",
        "trained on node 1 of 2",
    ]
    steps = notebook.value("[g.step.dropna().tolist() for _, g in run.history.groupby('rank')]")
    assert all(set(range(20)) <= set(of_rank) for of_rank in steps)
    assert notebook.value("len(run.state.hosts)") == 2


LOOP = """
def train(model):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
    steps = 0
    for x, y in torch.utils.data.DataLoader(data, batch_size=1):
        ((ddp(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        time.sleep(0.005)
    return steps
"""


def ask(notebook: Notebook, code: str) -> Outputs:
    """Make a request, and again if it was called off: on a busy host, a rank may be too late."""
    for _ in range(10):
        out = notebook.run(code, timeout=60)
        if "made no step" not in out.evalue:
            break
    assert not out.ename, out.traceback
    return out


@pytest.mark.part("steering")
def test_a_training_on_two_nodes_finishes_at_one_step(notebook: Notebook) -> None:
    notebook.run("model = torch.nn.Linear(4, 1); before = model.weight.detach().clone()")
    out = notebook.run(f"%%distributed -e ray --nodes 2 -n 4 --background\n{LOOP}", timeout=120)
    assert not out.ename, out.traceback
    ask(notebook, "run = nbtrain.last_run(); run.finish(); run.wait()")
    steps, *others = notebook.value("run.results")
    assert others == [steps] * 3
    assert steps < 4000
    assert notebook.value("run.state.message").startswith(f"finished early at step {steps}")
    assert notebook.value("bool((model.weight != before).any())")


@pytest.mark.part("steering")
def test_the_notebook_looks_at_a_model_that_trains_on_two_nodes(notebook: Notebook) -> None:
    notebook.run("model = torch.nn.Linear(4, 1); before = model.weight.detach().clone()")
    out = notebook.run(f"%%distributed -e ray --nodes 2 -n 4 --background\n{LOOP}", timeout=120)
    assert not out.ename, out.traceback
    for _ in range(2):
        ask(notebook, "run = nbtrain.last_run(); step = run.peek()")
    assert notebook.value("step") > 1
    peeked = notebook.value("model.weight.tolist()")
    assert notebook.value("before.tolist()") != peeked
    ask(notebook, "run.finish(); run.wait()")
    assert notebook.value("model.weight.tolist()") != peeked
    made = notebook.value("[s.status for s in run.state.steered if s.status == 'applied']")
    assert made == ["applied"] * 3
    assert notebook.value("[*(run.folder / 'peeks').iterdir()]") == []


@pytest.mark.part("profile")
@pytest.mark.part("steering")
def test_the_steps_of_ranks_on_two_nodes_are_recorded_and_come_home(notebook: Notebook) -> None:
    notebook.run("model = torch.nn.Linear(4, 1)")
    options = "-e ray --nodes 2 -n 4 --background --profile"
    out = notebook.run(f"%%distributed {options}\n{LOOP}", timeout=120)
    assert not out.ename, out.traceback
    notebook.run("run = nbtrain.last_run()")
    steps = "[r.progress.steps if r.progress else 0 for r in run.state.ranks]"
    wait_until(lambda: min(notebook.value(steps)) > 10, 60)
    ask(notebook, "later = run.profile(steps=2)")
    assert not notebook.value("run.state.is_over")
    ask(notebook, "run.finish(); run.wait()")
    numbers = "[[[s.number for s in r.steps] for r in p.comparison.ranks] for p in run.profiles]"
    first, second = notebook.value(numbers)
    assert first == [[3, 4, 5]] * 4
    assert second == [second[0]] * 4
    assert len(second[0]) == 2
    assert notebook.value("later.save('merged.json.gz').stat().st_size > 1000")


UNEVEN = """
import random, time
from pathlib import Path
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking.run_folder import RunFolder

def train():
    torch.distributed.init_process_group("gloo")
    draw = random.Random(nbtrain.rank())
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rates = []
    while not nbtrain.should_stop():
        weight.grad = torch.ones_like(weight)
        torch.distributed.all_reduce(weight.grad, op=torch.distributed.ReduceOp.MAX)
        before = weight.item()
        optimizer.step()
        rates.append(round(before - weight.item(), 6))
        time.sleep(draw.random() * 0.03)
    return rates

run = nbtrain.launch(train, engine="ray", nodes=2, num_processes=4, background=True, view="none")
draw = random.Random(0)
for number in range(60):
    settings = {"lr": float(number + 2)}
    write(RunFolder(run.folder), Action("turn", settings=settings), "by the test")
    time.sleep(draw.choice([0.0, 0.05, 0.3]))
while sum(s.status != "pending" for s in run.state.steered) < 60:
    time.sleep(0.1)
"""

EXPECTED = """
expected = [1.0] * len(run.value)
for asked in run.state.steered:
    if asked.action == "turn" and asked.step is not None:
        new = float(asked.label.removeprefix("lr "))
        expected[asked.step :] = [new] * (len(expected) - asked.step)
"""


@pytest.mark.part("steering")
def test_many_requests_on_two_nodes_are_each_carried_out_at_one_step(notebook: Notebook) -> None:
    out = notebook.run(UNEVEN, timeout=170)
    assert not out.ename, out.traceback
    ask(notebook, "run.finish(); run.wait()")
    assert notebook.value("run.state.status") == "succeeded"
    notebook.run(EXPECTED)
    assert notebook.value("[rates == expected for rates in run.results]") == [True] * 4
    assert notebook.value("sum(s.status == 'applied' for s in run.state.steered)") > 30


@pytest.mark.part("steering")
def test_a_run_on_two_nodes_starts_from_the_checkpoint_of_another(notebook: Notebook) -> None:
    notebook.run("model = torch.nn.Linear(4, 1); before = model.weight.detach().clone()")
    line = "%%distributed -e ray --nodes 2 -n 4 --background"
    out = notebook.run(f"{line}\n{LOOP}", timeout=120)
    assert not out.ename, out.traceback
    ask(notebook, "run = nbtrain.last_run(); path = run.keep('here')")
    assert notebook.value("(path / 'optimizer-0.pt').exists()")
    number = notebook.value("run.folder.name")
    ask(notebook, "run.finish(); run.wait()")
    out = notebook.run(f"{line} --start-from {number} --turn lr=/3\n{LOOP}", timeout=120)
    assert not out.ename, out.traceback
    ask(notebook, "run = nbtrain.last_run(); run.finish(); run.wait()")
    assert notebook.value("run.state.status, run.state.message")[0] == "succeeded"
    codes = notebook.value("[each.code for each in run.state.findings]")
    assert "loop-begins-at-start" in codes
    assert notebook.value("run.summary().changes[0]") == "lr /3 at step 0"


def test_a_failure_is_raised_with_the_cells_line_and_the_next_run_works(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed -e ray --nodes 2 -n 4\n"
        "def train():\n"
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "    if dist.get_rank() == 2:\n"
        "        raise ValueError('rank two it was')\n"
        "    while True:\n"
        "        dist.all_reduce(torch.ones(1))\n",
        timeout=120,
    )
    assert out.ename == "ValueError"
    assert "rank two it was" in out.evalue
    assert "raise ValueError('rank two it was')" in out.traceback
    assert notebook.value("nbtrain.last_run().failure.rank") == 2
    assert notebook.value("[r.status for r in nbtrain.last_run().state.ranks].count('failed')") >= 1


def test_ranks_tell_their_stacks_die_and_stop_like_others(notebook: Notebook) -> None:
    notebook.run(SPIN)
    notebook.run(
        "run = nbtrain.launch(spin, engine='ray', nodes=2, num_processes=2, background=True)"
    )
    wait_until(lambda: notebook.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    assert notebook.value("[s.location.function for s in run.stacks()]") == ["spin", "spin"]
    killed = notebook.value(
        "[(os.kill(run.state.ranks[1].pid, 9), run.wait()) and run.failure.rank, str(run.failure)]"
    )
    assert killed[0] == 1
    assert "killed by SIGKILL" in killed[1]
    assert "rank 0 failed because of it" in killed[1]
    notebook.run(
        "run = nbtrain.launch(spin, engine='ray', nodes=2, num_processes=2, background=True)"
    )
    wait_until(lambda: notebook.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    notebook.run("run.stop(); run.wait()")
    assert notebook.value("run.state.status") == "interrupted"


def test_who_waits_for_whom_is_told_across_nodes(notebook: Notebook) -> None:
    notebook.run(HANGS)
    notebook.run(
        "run = nbtrain.launch(hangs, engine='ray', nodes=2, num_processes=2, background=True,\n"
        "                     hang_after=2)"
    )
    wait_until(lambda: "rank 0 waits" in notebook.value("run.state.hang"), 60)
    told = notebook.value("run.state.hang")
    notebook.run("run.stop(); run.wait()")
    assert re.search(r"^rank 1 is at In\[\d+\], line 6: time.sleep\(600\);", told), told
    assert "rank 0 waits in all_reduce #3 for it" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--nodes 2 -n 8", "have 4 CPU free (for 4 ranks each), but the run needs 2 such nodes"),
        (
            "--nodes 3 -n 3",
            "2 of 3 nodes have 1 CPU free (for 1 rank each), but the run needs 3 such nodes",
        ),
        ("--nodes 2 -n 3", "3 ranks cannot be shared equally by 2 nodes"),
        ("-n 1 --resources unicorn=1", "0 of 0 unicorn free"),
        ("-n 1 --address 192.0.2.77:6379", "no Ray cluster answers at 192.0.2.77:6379"),
        ("-n 1 --address ray://x:10001", "Start the notebook on a node of the cluster"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_there_is(
    notebook: Notebook, options: str, told: str
) -> None:
    before = notebook.value("len(nbtrain.runs())")
    out = notebook.run(f"%%distributed -e ray {options}\nprint('started')", timeout=60)
    assert told in out.evalue, out.evalue
    assert notebook.value("len(nbtrain.runs())") == before


def test_a_module_beside_the_notebook_travels_and_one_that_a_node_lacks_is_named(
    notebook: Notebook,
) -> None:
    notebook.run(
        "open('beside_it.py', 'w').write('def answer():\\n    return 42\\n')\nimport beside_it\n"
        "open('data.txt', 'w').write('data')"
    )
    out = notebook.run(
        "%%distributed -e ray -n 1\n(beside_it.answer(), open('data.txt').read())", timeout=60
    )
    assert not out.ename, out.traceback
    assert tuple(notebook.value("nbtrain.last_run().value")) == (42, "data")
    notebook.run(
        "import sys; os.makedirs('../elsewhere', exist_ok=True)\n"
        "open('../elsewhere/only_here.py', 'w').write('x = 1')\n"
        "sys.path.append('../elsewhere'); import only_here"
    )
    out = notebook.run("%%distributed -e ray -n 1\nonly_here.x", timeout=60)
    assert "lacks only_here" in out.evalue


def test_a_package_beside_the_notebook_travels_without_its_data(notebook: Notebook) -> None:
    """The ranks import it from Ray's copy, as on a node that lacks the notebook's folder."""
    notebook.run(
        "os.makedirs('travels/deep/data', exist_ok=True)\n"
        "for name in ('__init__.py', 'deep/leaf.py', 'weights', 'deep/data/x', 'table.csv'):\n"
        "    open(f'travels/{name}', 'w').write('')\nhome = os.getcwd()"
    )
    out = notebook.run(
        "%%distributed -e ray -n 1\nimport sys\nos.chdir('/')\n"
        "sys.path[:] = [p for p in sys.path if p and not p.startswith(home)]\n"
        "import travels.deep.leaf\nplace = os.path.dirname(travels.__file__)\n"
        "sorted(f for _, _, files in os.walk(place) for f in files if not f.endswith('.pyc'))",
        timeout=60,
    )
    assert not out.ename, out.traceback
    assert notebook.value("nbtrain.last_run().value") == ["__init__.py", "leaf.py"]


TELLS = "os.getppid(), os.environ['RANK'], os.getcwd()"


def _nodes_processes(notebook: Notebook, cell: str = TELLS, options: str = "") -> list[int]:
    """Run on two nodes; return the processes of nbtrain's there that started the ranks."""
    magic = f"%%distributed -e ray --nodes 2 -n 2 --view none {options}"
    out = notebook.run(f"{magic}\n{cell}", timeout=120)
    assert not out.ename, out.traceback
    return [int(told[0]) for told in notebook.value("nbtrain.last_run().results")]


def test_the_next_run_goes_on_with_the_processes_of_the_last(notebook: Notebook) -> None:
    """Also after one that failed; a change beside the notebook or a lost process needs new ones."""
    first = _nodes_processes(notebook)
    ports = listening(first)  # Ray's own, and not those where ranks met
    failing = "%%distributed -e ray --nodes 2 -n 2\nif os.environ['RANK'] == '1': os.abort()\n"
    assert notebook.run(f"{failing}time.sleep(600)", timeout=120).ename == "RankDied"
    all_cpus = "%%distributed -e ray --nodes 2 -n 4 --view none\nos.getppid()"  # all are free again
    assert not notebook.run(all_cpus, timeout=120).ename
    assert set(notebook.value("nbtrain.last_run().results")) == set(first)
    assert listening(first) == ports
    notebook.run(f"os.kill({first[1]}, 9)")
    wait_until(lambda: not psutil.pid_exists(first[1]))
    second = _nodes_processes(notebook)
    assert set(second) & set(first) == {first[0]}
    write = "open('counted.py', 'w').write('number = {}\\n')\nimport counted"
    notebook.run(write.format(1))
    cell = "import counted\nos.getppid(), counted.number"
    before = _nodes_processes(notebook, cell)
    notebook.run(write.format(22))
    after = _nodes_processes(notebook, cell)
    assert not set(before) & set(after)
    assert [told[1] for told in notebook.value("nbtrain.last_run().results")] == [22, 22]
    wait_until(lambda: not any(map(psutil.pid_exists, before)))


def test_a_driver_that_was_lost_between_two_runs_is_started_anew(notebook: Notebook) -> None:
    first = _nodes_processes(notebook)
    notebook.run("from nbtrain.engines.remote.client import kept; kept['ray']._process.kill()")
    assert not set(first) & set(_nodes_processes(notebook))


def test_a_lost_node_is_named_and_the_run_goes_on_from_its_checkpoint_on_another(
    cluster: Simulated, notebook: Notebook
) -> None:
    cluster.tell("add")
    notebook.run(RESUMES)
    notebook.run(
        "run = nbtrain.launch(train, engine='ray', nodes=2, num_processes=2, background=True,\n"
        "                     max_restarts=1)"
    )
    wait_until(lambda: notebook.value("all((r.step or 0) > 20 for r in run.state.ranks)"), 60)
    lost = notebook.value("run.state.ranks[1].node")
    ids = notebook.value("[n for n in run.state.hosts]")
    assert lost in ids
    began = time.monotonic()
    cluster.tell(f"kill {number_of(cluster, lost)}")
    wait_until(lambda: notebook.value("run.state.attempt") == 2)
    print(f"told after {time.monotonic() - began:.1f} s")
    assert f"its node {lost} (" in notebook.value("run.state.message")
    notebook.run("run.wait()", timeout=120)
    assert notebook.value("run.state.status") == "succeeded"
    assert all(start >= 20 for start in notebook.value("run.results"))


def test_a_detached_run_goes_on_without_its_kernel_and_is_shown_in_another(
    cluster: Simulated, start_kernel: Callable[..., Notebook]
) -> None:
    first = start_kernel()
    first.run(f"import os; os.environ['RAY_ADDRESS'] = {cluster.address!r}")
    first.run("%load_ext nbtrain\nimport torch, time, nbtrain")
    first.run(SPIN.replace("100_000", "150"))
    first.run("run = nbtrain.launch(spin, engine='ray', nodes=2, num_processes=2, detach=True)")
    wait_until(lambda: first.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    first.process.kill()
    second = start_kernel()
    second.run("%load_ext nbtrain\nfrom nbtrain.lifecycle import catalog")
    second.run("run = catalog.find_run().wait()", timeout=100)
    assert second.value("run.state.status") == "succeeded"
    logged = "[g.dropna(subset=['x']).step.tolist() for _, g in run.history.groupby('rank')]"
    assert second.value(logged) == [list(range(150))] * 2
