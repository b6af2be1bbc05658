"""How a job or a node of a real Slurm ends under a running cell, and what the notebook shows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from nbtrain.parts.slurm.limits import AGENT_START_TIMEOUT_S
from nbtrain.parts.slurm.slurm_commands import read_duration
from tests.support.cluster_trainings import RESUMES
from tests.support.kernel import Notebook
from tests.support.slurm import PREEMPTS, Job, SlurmCluster
from tests.support.waiting import is_gone, wait_until

pytestmark = pytest.mark.slurm

Start = Callable[[Job], Notebook]


def start_training(kernel: Notebook, options: str = "") -> list[psutil.Process]:
    """Train on both nodes in the background; return the ranks' processes once they step."""
    kernel.run(RESUMES)
    call = f"run = nbtrain.launch(train, 100_000, background=True, view='none'{options})"
    out = kernel.run(call, timeout=120)
    assert not out.ename, out.traceback
    wait_until(lambda: kernel.value("all((r.step or 0) > 20 for r in run.state.ranks)"), 60)
    return [psutil.Process(pid) for pid in kernel.value("[r.pid for r in run.state.ranks]")]


def failure(kernel: Notebook) -> str:
    """Return how the run failed, once it is over."""
    wait_until(lambda: kernel.value("run.state.is_over"), 60)
    assert kernel.value("run.state.status") == "failed"
    return str(kernel.value("str(run.failure)"))


def test_a_job_that_is_cancelled_is_named_and_the_kernel_continues(
    cluster: SlurmCluster, start_kernel_in: Start, tmp_path: Path
) -> None:
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        ranks = start_training(kernel)
        cluster.run("scancel", str(job.id))
        assert f"the Slurm job {job.id} was cancelled (scancel)" in failure(kernel)
        wait_until(lambda: all(map(is_gone, ranks)))
        wait_until(lambda: not list(tmp_path.glob("nbtrain-*")))  # temporary files of nodes
        out = kernel.run("%%distributed\n1", timeout=60)
        assert f"the job {job.id}" in out.evalue


def test_an_allocation_that_is_given_back_is_named(
    cluster: SlurmCluster, start_kernel_in: Start
) -> None:
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        ranks = start_training(kernel)
        job.close()
        assert f"the Slurm job {job.id} " in failure(kernel)
        wait_until(lambda: all(map(is_gone, ranks)))


def test_a_step_that_is_cancelled_is_named(cluster: SlurmCluster, start_kernel_in: Start) -> None:
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        start_training(kernel)
        cluster.run("scancel", "--signal=TERM", str(job.id))
        assert "Slurm ended nbtrain's process on n" in failure(kernel)


def test_a_job_that_is_preempted_is_named(start_kernel_in: Start) -> None:
    with (
        SlurmCluster(more=PREEMPTS) as cluster,
        closing(cluster.job("--partition=low", "--exclusive")) as job,
    ):
        kernel = start_kernel_in(job)
        ranks = start_training(kernel)
        with closing(cluster.job("--partition=high", "--exclusive")):
            assert f"the Slurm job {job.id} was preempted by another job" in failure(kernel)
        wait_until(lambda: all(map(is_gone, ranks)))


def test_a_lost_node_is_named_and_the_run_continues_from_its_checkpoint_on_the_other(
    start_kernel_in: Start,
) -> None:
    with (
        SlurmCluster(node_timeout_s=3, message_timeout_s=3) as cluster,
        closing(cluster.job("--no-kill", time="10")) as job,
    ):
        kernel = start_kernel_in(job)
        start_training(kernel, ", nodes=(1, 2), max_restarts=1")
        cluster.kill_node("n2")
        wait_until(lambda: kernel.value("run.state.attempt") == 2, 60)
        assert "n2" in kernel.value("run.state.message")
        wait_until(lambda: kernel.value("(run.state.ranks[0].step or 0) > 20"), 60)
        assert kernel.value("[r.node for r in run.state.ranks if not r.is_over]") == ["n1"]
        kernel.run("run.stop(); run.wait()")


def test_a_run_continues_on_a_spare_node_of_the_job(start_kernel_in: Start) -> None:
    with (
        SlurmCluster(nodes=3, node_timeout_s=3, message_timeout_s=3) as cluster,
        closing(cluster.job("--no-kill", nodes=3, time="10")) as job,
    ):
        kernel = start_kernel_in(job)
        start_training(kernel, ", nodes=2, num_processes=2, max_restarts=1")
        cluster.kill_node("n2")
        wait_until(lambda: kernel.value("run.state.attempt") == 2, 60)
        wait_until(lambda: kernel.value("(run.state.ranks[1].step or 0) > 20"), 60)
        assert kernel.value("[r.node for r in run.state.ranks]") == ["n1", "n3"]
        kernel.run("run.stop(); run.wait()")


def test_a_run_continues_without_the_daemon_of_a_node_until_slurm_ends_its_step(
    start_kernel_in: Start,
) -> None:
    """The step lives on. Slurm takes a node that was down from the job, and ends its step later."""
    with (
        SlurmCluster(node_timeout_s=3, message_timeout_s=3) as cluster,
        closing(cluster.job("--no-kill", time="10")) as job,
    ):
        kernel = start_kernel_in(job)
        start_training(kernel)
        cluster.kill_slurmd("n2")
        wait_until(lambda: cluster.node_states()["n2"] == "down*", 60)
        step = kernel.value("run.state.ranks[1].step")
        wait_until(lambda: kernel.value("run.state.ranks[1].step") > step + 50, 60)
        out = kernel.run("%%distributed\n1", timeout=60)
        assert f"job {job.id} has 1 of 2 nodes left" in out.evalue
        cluster.start_node("n2")
        assert "its node n2 was lost" in failure(kernel)
        wait_until(lambda: cluster.node_states()["n2"] == "idle", 60)
        out = kernel.run("%%distributed\n1", timeout=60)
        assert f"job {job.id} has 1 of 2 nodes left" in out.evalue
        out = kernel.run("%%distributed --nodes 1 --view none\nos.environ['RANK']", timeout=60)
        assert not out.ename, out.traceback
        assert kernel.value("[r.node for r in nbtrain.last_run().state.ranks]") == ["n1"]


def listening_ports(processes: Collection[psutil.Process]) -> set[int]:
    """Return the TCP ports at which some processes listen."""
    pids = {process.pid for process in processes}
    found = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    return {c.laddr.port for c in found if c.pid in pids}


ENDS: dict[str, Callable[[SlurmCluster, Job, Notebook], object]] = {
    "the kernel is closed": lambda cluster, job, kernel: kernel.close(),
    "the kernel is killed": lambda cluster, job, kernel: kernel.process.kill(),
    "the step is cancelled": lambda cluster, job, kernel: cluster.run("scancel", f"{job.id}.0"),
    "the job ends": lambda cluster, job, kernel: job.close(),
}


@pytest.mark.parametrize("what", ENDS)
def test_no_process_and_no_port_is_left_when(
    what: str, cluster: SlurmCluster, start_kernel_in: Start
) -> None:
    """The driver alone stays with its kernel, for the next launch."""
    with closing(cluster.job()) as job:
        before = set(cluster.processes())
        kernel = start_kernel_in(job)
        start_training(kernel)
        started = set(cluster.processes()) - before
        of_kernel = {p for p in started if p.pid == kernel.process.pid}
        ports = listening_ports(started - of_kernel)
        assert len(ports) > 1  # the driver's, and the ranks'
        ENDS[what](cluster, job, kernel)
        if "kernel" not in what:
            failure(kernel)
            wait_until(lambda: len(set(cluster.processes()) - before - of_kernel) <= 1)
            drivers = [" ".join(p.cmdline()) for p in set(cluster.processes()) - before - of_kernel]
            assert all("nbtrain.parts.slurm.driver" in driver for driver in drivers)
            kernel.close()
        wait_until(lambda: not set(cluster.processes()) - before)
        assert not ports & listening_ports(list(psutil.process_iter()))


def test_a_launch_fails_with_the_reason_if_nbtrain_cannot_start_on_one_of_the_nodes(
    cluster: SlurmCluster, start_kernel_in: Start, tmp_path: Path
) -> None:
    """``srun`` stays for the other node, so its end alone would be awaited for a minute."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('SLURMD_NODENAME') == 'n2':\n"
        "    sys.modules['nbtrain'] = None  # as if it were not installed\n"
    )
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        kernel.run(f"os.environ['PYTHONPATH'] = {path!r}")
        out = kernel.run("%%distributed\n1", timeout=AGENT_START_TIMEOUT_S / 2)
        # On a busy machine, the process on n1 has not connected yet, either.
        assert re.search("on (n1, )?n2 has connected", out.evalue)
        assert "ModuleNotFoundError: No module named 'nbtrain" in out.evalue
        assert "srun: error: n2: task 1: Exited with exit code 1" in out.evalue
        kernel.run(f"os.environ['PYTHONPATH'] = {os.environ.get('PYTHONPATH', '')!r}")
        out = kernel.run("%%distributed --view none\nos.environ['RANK']", timeout=60)
        assert not out.ename, out.traceback


def test_a_step_of_others_that_ends_or_waits_is_no_matter(
    cluster: SlurmCluster, start_kernel_in: Start
) -> None:
    """A kernel is often in a step itself, which has all CPUs and the memory of the job."""
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        kernel.run(
            "import subprocess\n"
            "step = subprocess.Popen(['srun', '-N2', '-n2', '--mem=0', 'sleep', '600'])"
        )
        wait_until(lambda: "sleep" in cluster.run("squeue", "--steps", "-h", "-o", "%j"))
        out = kernel.run("%%distributed --view none\nos.environ['RANK']", timeout=60)
        assert not out.ename, out.traceback
        kernel.run("step.terminate(); step.wait()")
        out = kernel.run("%%distributed --view none\nos.environ['RANK']", timeout=60)
        assert not out.ename, out.traceback


STEERED = """
def train(model):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_before_the_time_limit_a_checkpoint_is_saved_and_the_run_ends(
    nodes: int, cluster: SlurmCluster, start_kernel_in: Start
) -> None:
    with closing(cluster.job(nodes=nodes, time="1")) as job:
        kernel = start_kernel_in(job)
        kernel.run(STEERED)
        kernel.run("model = torch.nn.Linear(4, 1)")
        options = "num_processes=2, background=True, view='none'"
        kernel.run(f"run = nbtrain.launch(train, model, {options})")
        wait_until(lambda: kernel.value("run.state.is_over"), 80)
        assert kernel.value("run.state.status") == "interrupted"
        assert f"the Slurm job {job.id} reaches its time limit" in kernel.value("run.state.message")
        assert kernel.value("run.state.deadline.whose") == f"the Slurm job {job.id}"
        assert kernel.value("[p.name for p in run.folder.glob('checkpoints/kept/step-*')]")
        assert cluster.run("squeue", "-h", "-j", str(job.id), "-o", "%T") == "RUNNING"


def test_a_limit_that_is_extended_at_the_last_moment_does_not_end_the_run(
    cluster: SlurmCluster, start_kernel_in: Start, tmp_path: Path
) -> None:
    """The ranks evaluate, so that there is no checkpoint yet, and the run was not stopped."""
    evaluating = tmp_path / "evaluating"
    with closing(cluster.job(nodes=1, time="1")) as job:

        def left_s() -> float:
            return read_duration(cluster.run("squeue", "-h", "-j", str(job.id), "-o", "%L")) or 0.0

        kernel = start_kernel_in(job)
        pause = f"while os.path.exists({str(evaluating)!r}): time.sleep(0.05)"
        kernel.run(STEERED.replace("time.sleep(0.02)", f"time.sleep(0.02)\n        {pause}"))
        kernel.run("model = torch.nn.Linear(4, 1)")
        options = "num_processes=2, background=True, view='none'"
        kernel.run(f"run = nbtrain.launch(train, model, {options})")
        shown = "run.state.deadline.ends - time.time() if run.state.deadline else 1e6"
        wait_until(lambda: abs(kernel.value(shown) - left_s()) < 5)
        evaluating.touch()
        wait_until(lambda: left_s() < 15, 60)  # a checkpoint was requested
        cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")
        wait_until(lambda: abs(kernel.value(shown) - left_s()) < 5)
        evaluating.unlink()  # now it is saved
        saved = "[p.name for p in run.folder.glob('checkpoints/kept/step-*')]"
        wait_until(lambda: kernel.value(saved))
        wait_until(lambda: left_s() < 55, 60)  # after the first limit
        assert not kernel.value("run.state.is_over")
        wait_until(lambda: kernel.value("run.state.is_over"), 60)
        assert kernel.value("run.state.status") == "interrupted"
        assert f"the Slurm job {job.id} reaches its time limit" in kernel.value("run.state.message")
        assert len(kernel.value(saved)) == 2


def test_a_signal_that_the_user_has_slurm_send_ends_no_rank(
    cluster: SlurmCluster, start_kernel_in: Start
) -> None:
    """`salloc --signal=USR1@60` sends it to every process of every step."""
    with closing(cluster.job()) as job:
        kernel = start_kernel_in(job)
        start_training(kernel)
        for name in ("USR1", "USR2"):
            cluster.run("scancel", f"--signal={name}", str(job.id))
        step = kernel.value("run.state.ranks[1].step")
        wait_until(lambda: kernel.value("run.state.ranks[1].step") > step + 50, 60)
        kernel.run("run.stop(); run.wait()")
