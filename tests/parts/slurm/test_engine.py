"""Cells on the nodes of a real Slurm job: as anywhere else, on both nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest

from tests.support.cluster_trainings import DDP, SPIN
from tests.support.kernel import Notebook
from tests.support.slurm import Job, SlurmCluster
from tests.support.waiting import is_gone, wait_until

pytestmark = pytest.mark.slurm

BACKGROUND = "run = nbtrain.launch(spin, engine='slurm', background=True, view='none'{})"


def start_spinning(notebook: Notebook, options: str = "") -> None:
    """Start ranks on both nodes that step until they are stopped, and wait for some steps."""
    notebook.run(SPIN)
    out = notebook.run(BACKGROUND.format(options), timeout=120)
    assert not out.ename, out.traceback
    wait_until(lambda: notebook.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)


def test_a_cell_trains_on_both_nodes_and_the_weights_come_home(notebook: Notebook) -> None:
    notebook.run("torch.manual_seed(0); model = torch.nn.Linear(4, 1); before = id(model)")
    out = notebook.run(f"%%distributed\n{DDP}", timeout=120)
    assert not out.ename, out.traceback
    notebook.run("run = nbtrain.last_run()")
    first, *others = notebook.value("run.results")
    assert others == [first] * 3  # two tasks a node
    assert first == notebook.value("[p.tolist() for p in model.parameters()]")
    assert notebook.value("id(model) == before")
    assert notebook.value("[r.node for r in run.state.ranks]") == ["n1", "n1", "n2", "n2"]
    assert "n2" in out.board
    assert notebook.value("[run.logs(r) for r in (0, 3)]") == [
        "trained on node 0 of 2",
        "trained on node 1 of 2",
    ]
    steps = notebook.value("[g.step.dropna().tolist() for _, g in run.history.groupby('rank')]")
    assert all(set(range(20)) <= set(of_rank) for of_rank in steps)
    assert notebook.value("len(run.state.hosts)") == 2


def test_the_weights_are_those_of_fresh_processes_on_one_host(notebook: Notebook) -> None:
    notebook.run(f"results = []{DDP}")
    for engine in ("spawn", "slurm"):
        notebook.run("torch.manual_seed(0); model = torch.nn.Linear(4, 1)")
        options = f"engine={engine!r}, num_processes=2, env={{'OMP_NUM_THREADS': '1'}}, view='none'"
        out = notebook.run(f"results.append(nbtrain.launch(train, model, {options}).results)")
        assert not out.ename, out.traceback
    here, there = notebook.value("results")
    assert here == there


def test_four_nodes_train_with_a_rank_each_in_their_order_and_stop(
    start_kernel_in: Callable[[Job], Notebook],
) -> None:
    with SlurmCluster(nodes=4) as cluster, closing(cluster.job(nodes=4)) as job:
        kernel = start_kernel_in(job)
        kernel.run("model = torch.nn.Linear(4, 1)")
        out = kernel.run(f"%%distributed --view none\n{DDP}", timeout=120)
        assert not out.ename, out.traceback
        kernel.run("run = nbtrain.last_run()")
        first, *others = kernel.value("run.results")
        assert others == [first] * 3
        assert kernel.value("[r.node for r in run.state.ranks]") == ["n1", "n2", "n3", "n4"]
        logs = [f"trained on node {node} of 4" for node in range(4)]
        assert kernel.value("[run.logs(rank) for rank in range(4)]") == logs
        cell = "os.environ['RANK'], os.environ['SLURMD_NODENAME']"
        kernel.run(f"%%distributed --view none\n{cell}", timeout=60)
        pairs = [tuple(pair) for pair in kernel.value("nbtrain.last_run().results")]
        assert pairs == [(str(rank), f"n{rank + 1}") for rank in range(4)]
        start_spinning(kernel)
        ranks = [psutil.Process(pid) for pid in kernel.value("[r.pid for r in run.state.ranks]")]
        kernel.run("run.stop(); run.wait()")
        assert kernel.value("run.state.status") == "interrupted"
        assert all(map(is_gone, ranks))


def test_ranks_are_no_tasks_of_slurm(notebook: Notebook) -> None:
    """Lightning and JAX would take a rank for a task, and connect it to others."""
    cell = "{n: v for n, v in os.environ.items() if n.startswith(('SLURM', 'PMI'))}"
    notebook.run(f"%%distributed --view none --env SLURM_EXTRA=1\n{cell}", timeout=60)
    for variables in notebook.value("nbtrain.last_run().results"):
        assert {"SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_EXTRA"} <= variables.keys()
        assert not [n for n in variables if re.search("TASK|PROCID|STEP|NODEID|LOCALID", n)]


def test_a_failure_is_raised_with_the_cells_line_and_the_next_run_works(notebook: Notebook) -> None:
    out = notebook.run(
        "%%distributed\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 2:\n"
        "    raise ValueError('rank two it was')\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(1))\n",
        timeout=120,
    )
    assert out.ename == "ValueError"
    assert "raise ValueError('rank two it was')" in out.traceback
    assert notebook.value("nbtrain.last_run().failure.rank") == 2
    out = notebook.run("%%distributed --view none\nos.environ['RANK']", timeout=60)
    assert notebook.value("nbtrain.last_run().results") == ["0", "1", "2", "3"]


def test_ranks_show_their_stacks_die_and_stop_like_others(notebook: Notebook) -> None:
    start_spinning(notebook)
    assert notebook.value("[s.location.function for s in run.stacks()]") == ["spin"] * 4
    killed = notebook.value(
        "[(os.kill(run.state.ranks[3].pid, 9), run.wait()) and run.failure.rank, str(run.failure)]"
    )
    assert killed[0] == 3
    assert "killed by SIGKILL" in killed[1]
    start_spinning(notebook)
    notebook.run("run.stop(); run.wait()")
    assert notebook.value("run.state.status") == "interrupted"


def test_an_interrupt_of_the_cell_stops_the_ranks_and_agents_stay(notebook: Notebook) -> None:
    cell = "os.getppid(), [time.sleep(0.02) for _ in range(5)]"
    notebook.run(f"%%distributed --view none\n{cell}", timeout=60)
    agents = notebook.value("[each[0] for each in nbtrain.last_run().results]")
    out = notebook.run(
        "%%distributed\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)",
        interrupt_on="ready",
        timeout=60,
    )
    assert out.ename == "KeyboardInterrupt"
    notebook.run(f"%%distributed --view none\n{cell}", timeout=60)
    assert notebook.value("[each[0] for each in nbtrain.last_run().results]") == agents


def test_ranks_have_the_variables_of_the_kernel_at_each_launch(notebook: Notebook) -> None:
    for value in ("first", "second"):
        notebook.run(f"os.environ['NBTRAIN_TEST_VALUE'] = {value!r}")
        cell = "%%distributed --view none\nos.environ.get('NBTRAIN_TEST_VALUE')"
        notebook.run(cell, timeout=60)
        assert notebook.value("nbtrain.last_run().results") == [value] * 4
    notebook.run("del os.environ['NBTRAIN_TEST_VALUE']")
    notebook.run(cell, timeout=60)
    assert notebook.value("nbtrain.last_run().results") == [None] * 4


def agent_of(rank_pid: int) -> psutil.Process:
    """Return nbtrain's process on the node of a rank: slurmstepd started it."""
    for process in psutil.Process(rank_pid).parents():
        parent = process.parent()
        if parent is not None and parent.name().startswith("slurmstepd"):
            return process
    raise AssertionError(rank_pid)


def test_an_agent_that_is_killed_is_named_and_its_ranks_end(notebook: Notebook) -> None:
    start_spinning(notebook)
    pids = notebook.value("[r.pid for r in run.state.ranks]")
    agent = agent_of(pids[3])
    ranks = [psutil.Process(pid) for pid in pids]
    agent.kill()
    wait_until(lambda: notebook.value("run.state.is_over"), 60)
    assert "nbtrain's process on n2 ended" in notebook.value("str(run.failure)")
    wait_until(lambda: all(map(is_gone, ranks)))
    out = notebook.run("%%distributed --view none\nos.environ['RANK']", timeout=60)
    assert not out.ename, out.traceback


def test_the_second_launch_uses_the_processes_of_the_first(notebook: Notebook) -> None:
    for _ in range(2):
        notebook.run("%%distributed --view none\nos.getpid()", timeout=60)
        pids = notebook.value("nbtrain.last_run().results")
        assert len(set(pids)) == 4
    cell = "import psutil\n[p.pid for p in psutil.Process().parents()]"
    chains = []
    for _ in range(2):
        notebook.run(f"%%distributed --view none\n{cell}", timeout=60)
        chains.append(notebook.value("nbtrain.last_run().results"))
    assert [c[0] for c in chains[0]] == [c[0] for c in chains[1]]


def test_fewer_ranks_or_nodes_can_be_chosen(notebook: Notebook) -> None:
    for options, nodes in (("--nodes 1 -n 2", ["n1", "n1"]), ("-n 2", ["n1", "n2"])):
        out = notebook.run(f"%%distributed {options} --view none\n1", timeout=60)
        assert not out.ename, out.traceback
        assert notebook.value("[r.node for r in nbtrain.last_run().state.ranks]") == nodes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nodes 3 -n 3", "the run needs 3 nodes, and job"),
        ("--nodes 2 -n 3", "3 ranks cannot be shared equally by 2 nodes"),
        ("--address auto", "are options of -e ray"),
        ("--resources CPU=1", "are options of -e ray"),
    ],
)
def test_what_cannot_be_had_is_refused(notebook: Notebook, options: str, words: str) -> None:
    before = notebook.value("len(nbtrain.runs())")
    out = notebook.run(f"%%distributed -e slurm {options}\nprint('started')", timeout=60)
    assert words in out.evalue, out.evalue
    assert notebook.value("len(nbtrain.runs())") == before


def test_outside_of_a_job_it_is_refused_with_what_to_do(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain")
    out = kernel.run("%%distributed -e slurm\n1")
    assert "needs a kernel that runs in a Slurm job" in out.evalue


def test_two_runs_at_once_have_their_own_agents(
    job: Job, notebook: Notebook, start_kernel_in: Callable[[Job], Notebook]
) -> None:
    other = start_kernel_in(job)
    start_spinning(notebook, ", num_processes=2")
    start_spinning(other, ", num_processes=2")
    for kernel in (notebook, other):
        kernel.run("run.stop(); run.wait()")
        assert kernel.value("run.state.status") == "interrupted"


def test_a_detached_run_continues_without_its_kernel_and_is_shown_in_another(
    job: Job, start_kernel_in: Callable[[Job], Notebook]
) -> None:
    first = start_kernel_in(job)
    first.run(SPIN.replace("100_000", "150"))
    first.run("run = nbtrain.launch(spin, num_processes=2, detach=True)", timeout=60)
    wait_until(lambda: first.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    first.process.kill()
    second = start_kernel_in(job)
    second.run(
        "from nbtrain.lifecycle import catalog\nrun = catalog.find_run().wait()", timeout=100
    )
    assert second.value("run.state.status") == "succeeded"
    logged = "[g.dropna(subset=['x']).step.tolist() for _, g in run.history.groupby('rank')]"
    assert second.value(logged) == [list(range(150))] * 2


def test_nothing_is_left_when_the_kernel_is_killed(
    cluster: SlurmCluster, start_kernel_in: Callable[[Job], Notebook]
) -> None:
    with closing(cluster.job("--overcommit", "--oversubscribe", time="5")) as own:
        kernel = start_kernel_in(own)
        start_spinning(kernel)
        pids = kernel.value("[r.pid for r in run.state.ranks]")
        processes = [psutil.Process(pid) for pid in pids]
        processes += [agent_of(pid) for pid in pids]
        kernel.process.kill()
        wait_until(lambda: all(map(is_gone, processes)))
        wait_until(lambda: "interactive" in cluster.run("squeue", "-h", "-o", "%j"))
        wait_until(lambda: not _steps(cluster, own))


def _steps(cluster: SlurmCluster, job: Job) -> list[str]:
    listed = cluster.run("squeue", "--steps", f"--jobs={job.id}", "--noheader", "--format=%j")
    return [name for name in listed.split() if name == "nbtrain"]


def test_a_module_beside_the_notebook_is_there_and_one_that_a_node_lacks_is_named(
    notebook: Notebook,
) -> None:
    notebook.run(
        "open('beside_it.py', 'w').write('def answer():\\n    return 42\\n')\nimport beside_it\n"
        "open('data.txt', 'w').write('data')"
    )
    cell = "%%distributed --view none\nbeside_it.answer(), open('data.txt').read()"
    out = notebook.run(cell, timeout=60)
    assert not out.ename, out.traceback
    assert [tuple(each) for each in notebook.value("nbtrain.last_run().results")] == [
        (42, "data")
    ] * 4
    notebook.run(
        "open('beside_it.py', 'w').write('def answer():\\n    return 43000\\n')\n"
        "import importlib; importlib.reload(beside_it)"
    )
    notebook.run(cell, timeout=60)
    assert notebook.value("nbtrain.last_run().results")[0][0] == 43000
