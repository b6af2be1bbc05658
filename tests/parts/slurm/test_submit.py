"""Cells that are sent to a real Slurm as jobs (``--submit``), from a kernel outside of any job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from nbtrain.errors import PlanError
from nbtrain.parts.slurm.slurm_commands import QueuedJob
from nbtrain.parts.slurm.submit import submission
from nbtrain.parts.slurm.submit.queue import describe_place
from nbtrain.planning.option_parser import parse_options, split_line
from tests.support.cluster_trainings import DDP, RESUMES, SPIN
from tests.support.kernel import Notebook
from tests.support.slurm import PREEMPTS, SlurmCluster
from tests.support.waiting import is_gone, wait_until

on_slurm = pytest.mark.slurm


LONG = DDP.replace("steps=20, pause=0.0", "steps=9999, pause=0.02").replace(
    "range(steps)", "nbtrain.progress(range(steps))"
)
"""Trains for minutes, unless it is finished by hand."""


@pytest.fixture
def start_kernel(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[[], Notebook]]:
    """Starts kernels outside of any job; they have one home, and end with the test."""
    kernels: list[Notebook] = []

    def start() -> Notebook:
        variables = {**cluster.env, "NBTRAIN_HOME": str(tmp_path / "home")}
        kernels.append(Notebook(tmp_path / "home", tmp_path, environment=variables))
        kernels[-1].run("%load_ext nbtrain\nimport os, time, torch, nbtrain")
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(start_kernel: Callable[[], Notebook]) -> Notebook:
    """A kernel outside of any job."""
    return start_kernel()


def submit(kernel: Notebook, options: str, cell: str) -> None:
    """Submit a cell; `run` is its run then."""
    out = kernel.run(f"%%distributed --submit '{options}' --view none\n{cell}", timeout=60)
    assert not out.ename, out.traceback
    kernel.run("run = nbtrain.last_run()")


def submit_spinning(kernel: Notebook, options: str) -> list[psutil.Process]:
    """Submit ranks that step until they are stopped; return their processes once they step."""
    submit(kernel, options, SPIN)
    wait_until(lambda: kernel.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    return [psutil.Process(pid) for pid in kernel.value("[r.pid for r in run.state.ranks]")]


def job_of(kernel: Notebook) -> str:
    """Return the number of the run's job."""
    return str(kernel.value("__import__('json').load(open(run.folder / 'scheduled-job'))['job']"))


def job_state(cluster: SlurmCluster, job: str) -> str:
    """Return the state of a job in Slurm's words."""
    return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")


@on_slurm
def test_a_submitted_cell_trains_as_here_and_the_weights_come_home(
    cluster: SlurmCluster, kernel: Notebook
) -> None:
    kernel.run("torch.manual_seed(0); model = torch.nn.Linear(4, 1); before = id(model)")
    submit(kernel, "-N 1 -n 2", DDP)
    job = job_of(kernel)
    kernel.run("run.wait(); there = run.results", timeout=60)
    assert kernel.value("run.state.status") == "succeeded", kernel.value("run.state.message")
    assert kernel.value("run.state.engine, run.state.world_size") == ("fork", 2)
    assert kernel.value("there[0] == there[1] == [p.tolist() for p in model.parameters()]")
    assert kernel.value("id(model) == before")
    assert "trained on node 0 of 1" in kernel.value("run.logs(1)")
    wait_until(lambda: job_state(cluster, job) == "COMPLETED")
    assert not kernel.value("(run.folder / 'payload').exists()")
    kernel.run("torch.manual_seed(0); model = torch.nn.Linear(4, 1)")
    kernel.run(f"{DDP}\nhere = nbtrain.launch(train, model, num_processes=2).results", timeout=60)
    assert kernel.value("here == there")


@on_slurm
def test_a_job_of_two_nodes_trains_on_both(kernel: Notebook) -> None:
    kernel.run("model = torch.nn.Linear(4, 1)")
    submit(kernel, "--nodes=2 --ntasks-per-node=2", DDP)
    kernel.run("run.wait()", timeout=90)
    assert kernel.value("run.state.status") == "succeeded", kernel.value("run.state.message")
    assert kernel.value("run.state.engine") == "slurm"
    assert kernel.value("[r.node for r in run.state.ranks]") == ["n1", "n1", "n2", "n2"]
    assert kernel.value("run.value == [p.tolist() for p in model.parameters()]")


@on_slurm
def test_the_place_in_the_queue_is_shown_and_the_result_is_in_another_kernel(
    cluster: SlurmCluster, start_kernel: Callable[[], Notebook]
) -> None:
    with closing(cluster.job("--exclusive", nodes=2)) as other:
        first = start_kernel()
        first.run("model = torch.nn.Linear(4, 1)")
        names = []
        for place in ("1st", "2nd"):
            submit(first, "-N 1 -n 2", DDP)
            names.append(first.value("run.folder.name"))
            shown = first.value("run.state.message")
            assert f"{place} in the queue of debug" in shown
            assert f"job {job_of(first)}" in shown
        shown = first.run("run").displays[-1]
        for board in (shown["text/html"], shown["text/plain"]):
            assert "waiting" in board
            assert "2nd in the queue" in board
            assert "rank" not in board
        out = first.run("run.finish()")
        assert "waits in a queue" in out.evalue
        first.close()
        second = start_kernel()
        second.run("model = torch.nn.Linear(4, 1)")
        second.run(f"run = nbtrain.Run.open({names[0]!r})")
        assert "in the queue" in second.value("run.state.message")
        assert "waiting" in second.run("%nbtrain runs").board
        other.close()
        for name in names:
            second.run(f"run = nbtrain.Run.open({name!r}).wait()", timeout=60)
            assert second.value("run.state.status") == "succeeded"
            second.run("run.load(model)")
            assert second.value("run.value == [p.tolist() for p in model.parameters()]")


@on_slurm
def test_stop_cancels_a_job_that_waits(cluster: SlurmCluster, kernel: Notebook) -> None:
    submit(kernel, "--hold", SPIN)
    assert "JobHeldUser" in kernel.value("run.state.message")
    kernel.run("run.stop()", timeout=60)
    assert kernel.value("run.state.status") == "interrupted"
    assert kernel.value("type(run.exception).__name__") == "KeyboardInterrupt"
    assert job_state(cluster, job_of(kernel)) == "CANCELLED"
    assert not kernel.value("(run.folder / 'payload').exists()")
    assert kernel.value("nbtrain.Run.open(run.folder).state.status") == "interrupted"


@on_slurm
def test_stop_ends_a_run_as_an_interrupt_does_and_its_job(
    cluster: SlurmCluster, kernel: Notebook
) -> None:
    ranks = submit_spinning(kernel, "-N 1 -n 2")
    kernel.run("run.stop()", timeout=60)
    assert kernel.value("run.state.status") == "interrupted"
    assert "by run.stop()" in kernel.value("run.state.message")
    assert all(map(is_gone, ranks))
    wait_until(lambda: job_state(cluster, job_of(kernel)) == "COMPLETED")


@on_slurm
@pytest.mark.parametrize("options", ["-N 1 -n 2", "-N 2"])
def test_a_job_that_is_cancelled_is_no_failure_of_the_ranks(
    cluster: SlurmCluster, kernel: Notebook, options: str
) -> None:
    ranks = submit_spinning(kernel, options)
    job = job_of(kernel)
    cluster.run("scancel", job)
    kernel.run("run.wait()", timeout=60)
    assert kernel.value("run.state.status") == "interrupted"
    assert f"Slurm ended the job {job}" in kernel.value("run.state.message")
    wait_until(lambda: all(map(is_gone, ranks)))


@on_slurm
def test_a_job_that_is_preempted_is_no_failure_of_the_ranks(kernel: Notebook) -> None:
    with SlurmCluster(more=PREEMPTS) as cluster:
        kernel.run(f"os.environ.update({cluster.variables!r})")
        submit_spinning(kernel, "-p low -N 1 -n 2 --exclusive")
        job = job_of(kernel)
        with closing(cluster.job("--partition=high", "--exclusive")):
            kernel.run("run.wait()", timeout=60)
        assert kernel.value("run.state.status") == "interrupted"
        assert f"Slurm ended the job {job}" in kernel.value("run.state.message")


@on_slurm
def test_a_job_that_is_cancelled_in_the_queue_is_named(
    cluster: SlurmCluster, kernel: Notebook
) -> None:
    submit(kernel, "--hold", SPIN)
    job = job_of(kernel)
    cluster.run("scancel", job)
    kernel.run("run.wait()", timeout=60)
    assert kernel.value("run.state.status") == "lost"
    assert f"the Slurm job {job} was cancelled (scancel)" in kernel.value("run.state.message")


@on_slurm
def test_a_node_that_is_lost_ends_the_run_with_its_reason(kernel: Notebook) -> None:
    with SlurmCluster(nodes=1, node_timeout_s=3, message_timeout_s=3) as cluster:
        kernel.run(f"os.environ.update({cluster.variables!r})")
        submit_spinning(kernel, "-N 1 -n 2")
        cluster.kill_node("n1")
        kernel.run("run.wait()", timeout=90)
        assert kernel.value("run.state.status") == "lost"
        assert "ended because a node failed" in kernel.value("run.state.message")


@on_slurm
def test_a_job_is_looked_for_and_cancelled_in_its_own_cluster_only(
    start_kernel: Callable[[], Notebook],
) -> None:
    """Clusters of a centre may share a home directory; both have a job with that number."""
    here, there = start_kernel(), start_kernel()
    with SlurmCluster(nodes=1) as cluster, SlurmCluster(nodes=1, name="other") as other:
        here.run(f"os.environ.update({cluster.variables!r})")
        there.run(f"os.environ.update({other.variables!r})")
        submit(there, "--hold", SPIN)
        job, name = job_of(there), there.value("run.folder.name")
        assert cluster.run("sbatch", "--parsable", "--hold", "--wrap=true") == job
        here.run(f"run = nbtrain.Run.open({name!r})")
        assert here.value("run.state.status, run.state.is_queued") == ("starting", True)
        assert "is in the queue of the cluster other" in here.run("run.stop()").evalue
        assert job_state(cluster, job) == job_state(other, job) == "PENDING"
        there.run("run.stop()", timeout=60)
        assert job_state(other, job) == "CANCELLED"
        assert job_state(cluster, job) == "PENDING"


@on_slurm
def test_a_controller_that_is_away_delays_nothing_and_ends_no_run(
    start_kernel: Callable[[], Notebook],
) -> None:
    kernel = start_kernel()
    with SlurmCluster(nodes=1) as cluster:
        kernel.run(f"os.environ.update({cluster.variables!r})")
        submit(kernel, "--hold", SPIN)
        kernel.run("waiting = run")
        submit_spinning(kernel, "-n 1")
        cluster.kill_controller()
        step = kernel.value("run.state.ranks[0].step")
        wait_until(lambda: kernel.value("run.state.ranks[0].step") > step + 100)
        assert kernel.value("waiting.state.is_queued, waiting.state.is_over") == (True, False)
        listed = kernel.run("%nbtrain runs").board
        assert "waiting" in listed
        assert "running" in listed
        assert "lost" not in listed
        kernel.run("run.stop()", timeout=60)  # it runs, so that Slurm is not needed
        assert kernel.value("run.state.status") == "interrupted"
        assert "scancel" in kernel.run("waiting.stop()", timeout=60).evalue
        later = start_kernel()
        later.run(f"os.environ.update({cluster.variables!r})")
        listed = later.run("%nbtrain runs").board
        assert "waiting" in listed
        assert "lost" not in listed
        cluster.start_controller()
        wait_until(lambda: "idle" in cluster.node_states().values(), 60)
        kernel.run("waiting.stop()", timeout=60)
        assert kernel.value("waiting.state.status") == "interrupted"


@on_slurm
def test_a_submission_that_is_interrupted_leaves_no_job(
    cluster: SlurmCluster, kernel: Notebook, tmp_path: Path
) -> None:
    """With a site's own sbatch, which does more than to submit."""
    (own := tmp_path / "bin").mkdir()
    real, sent = cluster.run("sh", "-c", "command -v sbatch"), tmp_path / "sent"
    (own / "sbatch").write_text(f'#!/bin/sh\n{real} "$@"\ntouch {sent}\nexec sleep 60\n')
    (own / "sbatch").chmod(0o755)
    kernel.run(f"os.environ['PATH'] = {str(own)!r} + ':' + os.environ['PATH']")

    process = kernel.value("os.getpid()")

    def interrupt() -> None:
        wait_until(sent.exists, 60)
        os.kill(process, signal.SIGINT)

    with ThreadPoolExecutor() as pool:
        pool.submit(interrupt)
        out = kernel.run(f"%%distributed --submit '--hold'\n{SPIN}", timeout=60)
    assert out.ename == "KeyboardInterrupt"
    assert cluster.run("squeue", "--noheader", "--format=%j") == ""
    (own / "sbatch").write_text(f'#!/bin/sh\necho "Balance: 12 h"\nexec {real} "$@"\n')
    submit(kernel, "-n 1", "1")
    kernel.run("run.wait()", timeout=60)
    assert kernel.value("run.state.status") == "succeeded"


@on_slurm
def test_a_run_whose_job_was_not_recorded_is_found_by_its_name(
    cluster: SlurmCluster, kernel: Notebook
) -> None:
    """As if the kernel had been killed just after sbatch."""
    submit(kernel, "--hold", SPIN)
    job = job_of(kernel)
    kernel.run("(run.folder / 'scheduled-job').write_text('{}')")
    kernel.run("run.stop()", timeout=60)
    assert kernel.value("run.state.status") == "interrupted"
    assert job_state(cluster, job) == "CANCELLED"


@on_slurm
def test_a_job_that_slurm_has_forgotten_is_explained_by_what_it_printed(
    start_kernel: Callable[[], Notebook],
) -> None:
    with SlurmCluster(nodes=1, min_job_age_s=2) as cluster:
        first, second = start_kernel(), start_kernel()
        for kernel in (first, second):
            kernel.run(f"os.environ.update({cluster.variables!r})")
        first.run("import sys; sys.executable = '/nowhere/python'")
        submit(first, "--hold", "1")
        job, name = job_of(first), first.value("run.folder.name")
        first.close()
        cluster.run("scontrol", "release", job)
        wait_until(lambda: not cluster.run("squeue", "--noheader", "--states=all"), 60)
        second.run(f"run = nbtrain.Run.open({name!r})")
        assert second.value("run.state.status") == "lost"
        message = second.value("run.state.message")
        assert f"Slurm no longer knows the job {job}" in message
        assert "/nowhere/python: not found" in message


@on_slurm
@pytest.mark.parametrize("lacks", ["do the nodes see", "/nowhere/python: not found"])
def test_a_node_without_the_folder_or_python_is_explained(
    kernel: Notebook, tmp_path: Path, lacks: str
) -> None:
    kernel.run("import sys")
    (tmp_path / "home").mkdir(exist_ok=True)
    hidden = {"n1": tmp_path / "home"}
    if "python" in lacks:
        hidden = {}
        kernel.run("sys.executable = '/nowhere/python'")
    with SlurmCluster(nodes=1, hidden=hidden) as cluster:
        kernel.run(f"os.environ.update({cluster.variables!r})")
        submit(kernel, "-n 1", "1")
        kernel.run("run.wait()", timeout=60)
        assert kernel.value("run.state.status") == "lost"
        assert lacks in kernel.value("run.state.message")
        assert not kernel.value("(run.folder / 'payload').exists()")
    assert lacks in kernel.value("nbtrain.Run.open(run.folder).state.message")


@on_slurm
def test_the_error_of_a_rank_is_raised_with_its_line(kernel: Notebook) -> None:
    submit(kernel, "-n 2", "x = 1\nraise ValueError(f'it was {x}')")
    kernel.run("run.wait()", timeout=60)
    out = kernel.run("raise run.exception")
    assert (out.ename, out.evalue.splitlines()[0]) == ("ValueError", "it was 1")
    assert "raise ValueError(f'it was {x}')" in out.traceback


@on_slurm
def test_a_module_that_the_job_lacks_is_named(
    cluster: SlurmCluster, kernel: Notebook, tmp_path: Path
) -> None:
    (tmp_path / "helpers.py").write_text("def value():\n    return 7\n")
    kernel.run("import helpers")
    submit(kernel, "--hold", "helpers.value()")
    (tmp_path / "helpers.py").unlink()
    cluster.run("scontrol", "release", job_of(kernel))
    kernel.run("run.wait()", timeout=60)
    assert kernel.value("run.state.status") == "failed"
    assert "No module named 'helpers'" in kernel.value("run.state.message")


@on_slurm
def test_a_run_that_was_submitted_is_finished_by_hand(kernel: Notebook) -> None:
    kernel.run("model = torch.nn.Linear(4, 1)")
    submit(kernel, "-N 1 -n 2", LONG)
    wait_until(lambda: kernel.value("all((r.step or 0) > 5 for r in run.state.ranks)"), 60)
    kernel.run("run.finish(); run.wait()", timeout=60)
    assert kernel.value("run.state.status") == "succeeded"
    assert kernel.value("run.value == [p.tolist() for p in model.parameters()]")


@on_slurm
def test_a_restart_in_the_job_continues_from_its_checkpoint(kernel: Notebook) -> None:
    cell = RESUMES.replace("until=200", "until=40").replace(
        "    return start", "    if not last:\n        os._exit(3)\n    return start"
    )
    out = kernel.run(
        f"%%distributed --submit '-N 1 -n 2' --max-restarts 1 --view none\n{cell}", timeout=60
    )
    assert not out.ename, out.traceback
    kernel.run("run = nbtrain.last_run().wait()", timeout=60)
    assert kernel.value("run.state.status, run.state.attempt, run.value") == ("succeeded", 2, 40)


@on_slurm
def test_what_cannot_be_sent_or_submitted_is_refused_and_leaves_nothing(
    cluster: SlurmCluster, kernel: Notebook
) -> None:
    kernel.run("lock = __import__('threading').Lock(); before = nbtrain.runs()")
    for options, cell, reason in (
        ("-N 1", "lock.acquire()", "`lock`, a _thread.lock, cannot be sent"),
        ("-p nowhere", "1", "Slurm refused the job: "),
        ("--array=1-3", "1", "--submit cannot have --array=1-3"),
        ("-N 9", "1", "Slurm refused the job: "),
        ("-N 1 mine.sh", "1", "The cell is what runs, not a script"),
    ):
        out = kernel.run(f"%%distributed --submit '{options}'\n{cell}", timeout=60)
        assert out.ename == "PlanError", out
        assert reason in out.evalue
    assert kernel.value("len(nbtrain.runs()) == len(before)")
    assert cluster.run("squeue", "--noheader") == ""
    kernel.run("os.environ['PATH'] = ''")
    assert "sbatch, which is not on the PATH" in kernel.run("%%distributed --submit ''\n1").evalue


@pytest.mark.parametrize(
    "options",
    ["-p gpu -N 2", "--nodes=2 --gpus-per-node=4", "-N2", "", "--partition gpu"],
)
def test_options_of_sbatch_are_not_those_of_the_cell(options: str) -> None:
    for line in (f"--submit '{options}' -n 3", f"-n 3 --submit='{options}'"):
        parsed = parse_options(split_line(line))
        assert (parsed.submit, parsed.num_processes, parsed.spread) == (options, 3, None)


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(PlanError, match="--submit: expected one argument"):
        parse_options(["--submit"])


@pytest.mark.parametrize(
    "options",
    ["-a 3", "-a3", "--wrap=ls", "--wra=ls", "-W", "-HW", "--requeue", "-Mx", "--arra=1", "-J x"],
)
def test_options_that_a_run_cannot_have_are_named(options: str) -> None:
    with pytest.raises(PlanError, match="--submit cannot have"):
        submission.check_options(f"-p gpu {options}")


@pytest.mark.parametrize(
    "options",
    ["--wait-all-nodes=1", "-p aQ", "-wn1", "--qos=high", "--reservation=r", "-Hs", "--verbose"],
)
def test_options_that_only_look_like_those_are_not_refused(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission.shutil, "which", lambda name: name)
    assert submission.check_options(options)


def test_options_with_an_open_quote_are_refused() -> None:
    with pytest.raises(PlanError, match="no closing quotation"):
        submission.check_options("--comment='ab")


@pytest.mark.parametrize(
    ("place", "reason", "start", "expected"),
    [
        (1, "Resources", "N/A", "1st in the queue of gpu (Resources), job 7"),
        (2, "None", "N/A", "2nd in the queue of gpu, job 7"),
        (12, "Priority", "N/A", "12th in the queue of gpu (Priority), job 7"),
        (None, "Priority", "N/A", "in the queue of gpu (Priority), job 7"),
        (
            23,
            "Priority",
            "2026-11-30T14:05:00",
            "23rd in the queue of gpu (Priority), job 7, expected to begin on 2026-11-30 at 14:05",
        ),
    ],
)
def test_the_place_in_the_queue_in_words(
    place: int | None, reason: str, start: str, expected: str
) -> None:
    assert describe_place(QueuedJob("7", "PENDING", "gpu", start, "", reason, place)) == expected
