"""The Slurm of the tests is a real one: steps share an allocation, end with it, and leave nothing.

What is pinned here is what the tests of launches rely on, not Slurm.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.slurm import Job, SlurmCluster
from tests.support.waiting import is_gone, wait_until

pytestmark = pytest.mark.slurm

STEP = ("srun", "--nodes=2", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def job(cluster: SlurmCluster) -> Iterator[Job]:
    with closing(cluster.job()) as job:
        yield job
    wait_until(lambda: cluster.run("squeue", "--noheader") == "")


@contextmanager
def running(job: Job, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a step of the job, and wait until each node has a task that has printed a line."""
    step = subprocess.Popen(
        command,
        env=job.env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert step.stdout is not None
        for _ in range(int(job.variables["SLURM_JOB_NUM_NODES"])):
            assert step.stdout.readline() == "begun\n"
        yield step
    finally:
        step.terminate()
        step.communicate()


WAITS = ("sh", "-c", "echo begun; exec sleep 600")


def test_two_nodes_are_idle_and_the_default_partition_is_debug(cluster: SlurmCluster) -> None:
    assert cluster.node_states() == {"n1": "idle", "n2": "idle"}
    partitions = cluster.run("sinfo", "--noheader", "--format=%P %a %D").splitlines()
    assert sorted(partitions) == ["busy up 2", "debug* up 2"]


def test_a_step_runs_a_task_on_each_node(cluster: SlurmCluster, job: Job) -> None:
    assert job.variables["SLURM_JOB_NODELIST"] == "n[1-2]"
    assert job.variables["SLURM_TASKS_PER_NODE"] == "1(x2)"
    shown = 'echo "$SLURM_PROCID $SLURMD_NODENAME $SLURM_JOB_ID"'
    by_variables = subprocess.run(
        [*STEP, "sh", "-c", shown],
        env=job.env,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert sorted(by_variables.stdout.splitlines()) == [f"0 n1 {job.id}", f"1 n2 {job.id}"]
    by_id = cluster.run(*STEP, f"--jobid={job.id}", "sh", "-c", shown)
    assert sorted(by_id.splitlines()) == [f"0 n1 {job.id}", f"1 n2 {job.id}"]


def test_a_command_runs_inside_an_allocation(cluster: SlurmCluster) -> None:
    words = cluster.allocation("--ntasks=3", nodes=2)
    ran = cluster.run(*words, "sh", "-c", "echo $SLURM_NTASKS $SLURM_JOB_NUM_NODES; srun hostname")
    first, *hosts = ran.splitlines()
    assert first == "3 2"
    assert hosts == [os.uname().nodename] * 3


def test_a_second_step_waits_for_the_cpus_unless_it_overlaps(
    cluster: SlurmCluster, job: Job
) -> None:
    with running(job, *STEP, "--exact", *WAITS):
        overlapping = [*STEP, "--overlap", "echo", "done"]
        done = subprocess.run(overlapping, env=job.env, capture_output=True, timeout=60)
        assert done.stdout == b"done\n" * 2
        # Without a limit srun waits, and is silent about it for the first minute.
        alone = [*STEP, "--immediate=1", "echo", "done"]
        refused = subprocess.run(alone, env=job.env, capture_output=True, timeout=60, text=True)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "Requested nodes are busy" in refused.stderr


def test_scancel_ends_the_tasks_on_both_nodes(cluster: SlurmCluster, job: Job) -> None:
    with running(job, *STEP, *WAITS) as step:
        tasks = [
            child for node in cluster.nodes for s in cluster.stepds(node) for child in s.children()
        ]
        assert len(tasks) == 2
        cluster.run("scancel", str(job.id))
        assert step.wait(timeout=60)
        wait_until(lambda: all(map(is_gone, tasks)))


def test_a_job_waits_in_the_queue_until_another_ends(cluster: SlurmCluster) -> None:
    with closing(cluster.job("--exclusive", "--partition=busy")):
        second = cluster.run("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap=:")
        wanted = ("squeue", "--noheader", f"--jobs={second}", "--format=%T %r")
        wait_until(lambda: cluster.run(*wanted) == "PENDING Resources")
    wait_until(lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", second))


@pytest.mark.slow
def test_a_job_ends_at_its_time_limit(cluster: SlurmCluster) -> None:
    with closing(cluster.job(time="1")) as job, running(job, *STEP, *WAITS) as step:
        begun = time.monotonic()
        assert step.wait(timeout=150)
        assert 45 < time.monotonic() - begun < 100
        shown = ("scontrol", "show", "job", str(job.id))  # it is completing for a while
        wait_until(lambda: "JobState=TIMEOUT" in cluster.run(*shown))


def test_a_node_that_is_killed_is_down_and_comes_back() -> None:
    prompt = SlurmCluster(node_timeout_s=3, message_timeout_s=3)
    with prompt as cluster, closing(cluster.job(nodes=1)) as job:
        with running(job, "srun", *WAITS):
            (stepd,) = cluster.stepds("n1")
            (task,) = stepd.children()
            cluster.kill_node("n1")
            assert is_gone(stepd)
            assert is_gone(task)
            wait_until(lambda: cluster.node_states() == {"n1": "down*", "n2": "idle"}, 60)
        cluster.start_node("n1")
        wait_until(lambda: cluster.node_states()["n1"] == "idle", 60)


def _listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp4") if c.status == "LISTEN"}


def test_nothing_is_left_of_a_cluster_that_a_failure_ends(cluster: SlurmCluster) -> None:
    before = cluster.node_states()
    left: list[psutil.Process] = []
    ports: set[int] = set()
    folder = Path()

    def fail_with_a_running_step() -> None:
        nonlocal folder
        with SlurmCluster(nodes=3) as other:
            folder = other.folder
            job = other.job("--no-kill", nodes=3)
            step = subprocess.Popen(
                ["srun", "setsid", "sh", "-c", "sleep 600 & echo begun; wait"],
                env=job.env,
                stdout=subprocess.PIPE,
            )
            with step:
                assert step.stdout is not None
                assert [step.stdout.readline() for _ in range(3)] == [b"begun\n"] * 3
                left.extend(other.processes())
                configuration = (folder / "slurm.conf").read_text()
                ports.update(p for p in _listening_ports() if f"Port={p}\n" in configuration)
                step.stdout.close()
                other.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_a_running_step()
    assert len(left) > 3 * 4
    assert all(map(is_gone, left))
    assert len(ports) == 4
    assert not ports & _listening_ports()
    assert not folder.exists()
    assert cluster.node_states() == before
