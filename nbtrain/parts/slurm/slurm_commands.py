"""Calls Slurm's commands: ``srun``, ``scontrol``, ``sinfo``, ``squeue``, ``sbatch``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ...part_api import POLL_INTERVAL_S, LaunchError, shorten
from .allocation import is_of_slurm
from .limits import COMMAND_TIMEOUT_S, COMPLETING_TIMEOUT_S

_LOST_STATES = ("down", "failed", "powered_down", "unknown")
"""No step can start on a node in these states, or with a `*`: it does not respond. Drained nodes
keep their jobs."""

_KEPT = ("SLURM_CONF", "SLURM_SUBMIT_DIR", "SLURM_TMPDIR", "SLURM_CLUSTER_NAME")
"""Variables of Slurm that ``srun`` gets, and so the ranks. The others would be options of it: of
tasks, CPUs and memory."""

UNKNOWN_ENDING = "scancel, preemption or its time limit"
"""Why Slurm sends signals to the processes of a job, where its state does not tell."""

_ENDINGS = {"CANCELLED": "scancel", "PREEMPTED": "preemption", "TIMEOUT": "its time limit"}
"""The same by the state."""

_RUNNING = ("RUNNING", "SUSPENDED", "CONFIGURING")

_PROCESS_END = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: ", re.MULTILINE)
"""How a line begins by which ``srun`` names a process that failed, and its node."""

_ENDS = {
    "CANCELLED": "was cancelled (scancel)",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "ended because a node failed",
    "OUT_OF_MEMORY": "ended because a node ran out of memory",
    "COMPLETED": "has ended",
    "COMPLETING": "is ending",
    "FAILED": "has failed",
    "BOOT_FAIL": "ended because a node could not boot",
}
"""What became of a job, by its state in Slurm."""


class CommandError(LaunchError):
    """A command of Slurm has failed."""

    @property
    def reason(self) -> str:
        """What it printed."""
        return str(self).partition("` failed: ")[2]


def environment() -> dict[str, str]:
    """Return this process's environment for a command that Slurm starts: without its job's."""
    return {n: v for n, v in os.environ.items() if n in _KEPT or not is_of_slurm(n)}


def _without_filters() -> dict[str, str]:
    """Return this process's environment without variables that are options of Slurm's commands."""
    filters = ("SQUEUE_", "SCANCEL_", "SLURM_CLUSTERS")
    return {n: v for n, v in os.environ.items() if not n.startswith(filters)}


def call(
    *command: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Return what a command prints. Raises `LaunchError` if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=_without_filters() if env is None else env,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} does not answer: is Slurm's controller up?") from None
    except OSError as error:
        raise LaunchError(
            f"{command[0]} cannot be started ({error.strerror}): put Slurm's commands on the PATH "
            "before the kernel starts"
        ) from error
    if done.returncode:
        reason = shorten(done.stderr.strip(), 300)
        raise CommandError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout.strip()


def expand_hosts(node_list: str) -> list[str]:
    """Return the names of nodes in Slurm's notation: ``n[1-2]``."""
    return (call("scontrol", "show", "hostnames", node_list)).split()


def find_addresses(node_list: str) -> list[str]:
    """Return the address of each node, as Slurm knows it: a name or a number."""
    shown = call("scontrol", "--oneliner", "show", "node", node_list)
    return re.findall(r" NodeAddr=(\S+)", shown)


@functools.cache
def count_gpus(job: str) -> int:
    """Return how many GPUs a job has on all its nodes, also by ``--gres`` or ``--gpus``.

    0 if Slurm does not answer.
    """
    with contextlib.suppress(LaunchError):
        return read_gpus(call("scontrol", "--oneliner", "show", "job", job), job)
    return 0


def read_gpus(shown: str, job: str) -> int:
    """Return the GPUs of a job in what ``scontrol show job`` prints. Pure.

    It is a line for each task of an array: ``JobId=7 … TRES=cpu=4,node=2,gres/gpu=8 …``.
    """
    line = next((line for line in shown.splitlines() if f"JobId={job} " in line), "")
    found = re.search(r"TRES=\S*gres/gpu=(\d+)", line)
    return int(found[1]) if found else 0


def _read_job(job: str, field: str) -> str:
    """Return a field of squeue's for a job; "" if Slurm no longer knows it.

    The tasks of an array are listed together; %A is the number of each as a job.
    """
    listed = call("squeue", "--noheader", f"--jobs={job}", "--states=all", f"--format=%A {field}")
    pairs = (line.partition(" ") for line in listed.splitlines())
    return next((value.strip() for number, _, value in pairs if number == job), "")


def read_remaining_time(job: str) -> float | None:
    """Return the seconds until a job's limit, if it has one and runs.

    Raises `LaunchError` if Slurm does not answer.
    """
    return read_duration(_read_job(job, "%L"))


def read_duration(text: str) -> float | None:
    """Return the seconds of Slurm's ``days-hours:minutes:seconds``, unless it is a word. Pure."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, rest = text.rpartition("-")
    seconds = 0
    for part in rest.split(":"):
        seconds = 60 * seconds + int(part)
    return 86400.0 * int(days or 0) + seconds


def _job_state(job: str) -> str:
    """Return the state of a job: ``RUNNING``; "" if Slurm no longer knows it."""
    with contextlib.suppress(LaunchError):
        return _read_job(job, "%T")
    return ""


@dataclass(frozen=True)
class QueuedJob:
    """What squeue prints about a job, in Slurm's words."""

    number: str
    state: str
    partition: str
    start: str
    """When it began or is expected to: ``2026-11-30T14:05:00``; ``N/A`` if that is unknown."""
    nodes: str
    reason: str
    """Why it waits: ``Priority``, ``Resources``. "None" for no reason."""
    place: int | None
    """The place among the jobs that wait for its partition, from 1; None for one that runs.

    Slurm may start a job further behind first, if that delays no other.
    """


def list_own_jobs() -> dict[str, QueuedJob]:
    """Return the jobs of this user by name and by number, also those that ended lately.

    Slurm remembers them for minutes. Raises `LaunchError` if it does not answer.
    """
    own = ("--all", "--noheader", f"--user={os.getuid()}", "--states=all")
    listed = call("squeue", *own, "--format=%j|%A|%T|%P|%S|%N|%r").splitlines()
    waiting: list[str] = []
    if any("|PENDING|" in line for line in listed):
        queue = ("--all", "--noheader", "--states=PENDING", "--sort=-p,i", "--format=%A|%P")
        waiting = call("squeue", *queue).splitlines()
    return read_jobs(listed, waiting)


def read_jobs(listed: Sequence[str], waiting: Sequence[str]) -> dict[str, QueuedJob]:
    """Return jobs by name and by number from the lines of squeue. Pure.

    `listed` has lines ``name|number|state|partitions|start|nodes|reason``, `waiting` has lines
    ``number|partitions`` in the order of the queue.
    """
    places = find_places(waiting)
    jobs = {}
    for line in listed:
        if line.count("|") >= 6:  # a reason may have more of them
            name, number, state, partition, start, nodes, reason = line.split("|", 6)
            place = places.get(number)
            job = QueuedJob(number, state, partition, start, nodes, reason, place)
            jobs[name] = jobs[number] = job
    return jobs


def find_places(waiting: Sequence[str]) -> dict[str, int]:
    """Return the place of each job among those that wait for its partition. Pure.

    Of a job that waits for several partitions, it is the best place.
    """
    counts: Counter[str] = Counter()
    places = {}
    for line in waiting:
        number, _, partitions = line.partition("|")
        counts.update(names := partitions.split(","))
        places[number] = min(counts[name] for name in names)
    return places


def is_forgotten(job: str) -> bool:
    """Whether Slurm has no job with a number, or one of another user.

    Raises `LaunchError` if it does not answer.
    """
    try:
        return _read_job(job, "%U") != str(os.getuid())
    except CommandError as error:
        if "Invalid job id" in error.reason:
            return True
        raise


def find_cluster() -> str:
    """Return the name of this host's cluster. Raises `LaunchError` if Slurm does not answer."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", call("scontrol", "show", "config"), re.M)
    return found[1] if found else ""


def describe_end(state: str) -> str:
    """Return how a job ended, by its state in Slurm; "" if it has not. Pure."""
    return "" if state == "COMPLETING" else _ENDS.get(state, "")


def read_ending(job: str) -> str:
    """Return why Slurm is ending a job, whose processes it has sent signals; "" if it is not."""
    with contextlib.suppress(LaunchError):
        state, _, reason = _read_job(job, "%T|%r").partition("|")
        if state not in _RUNNING:
            return reason if reason != "None" else _ENDINGS.get(state, UNKNOWN_ENDING)
    return ""


def find_nodes(job: str) -> list[str]:
    """Return the names of a job's nodes; one that was down is no longer among them.

    Raises `LaunchError` if the job has ended.
    """
    state, _, node_list = _read_job(job, "%T %N").partition(" ")
    if state not in _RUNNING:
        raise LaunchError(f"the job {job} {_ENDS.get(state, 'has ended')}: get another (salloc)")
    return expand_hosts(node_list)


def find_down(names: Iterable[str]) -> set[str]:
    """Return which nodes Slurm reports as down."""
    nodes = f"--nodes={','.join(names)}"
    listed = call("sinfo", "--all", "--noheader", "--Node", nodes, "--format=%N %T")
    pairs = (line.split() for line in listed.splitlines())
    return {name for name, state in pairs if state.endswith("*") or state.startswith(_LOST_STATES)}


async def start_step(
    job: str,
    names: Sequence[str],
    command: Sequence[str],
    variables: Mapping[str, str],
    output: IO[bytes],
) -> asyncio.subprocess.Process:
    """Start a command as a step of a job, once on each of some nodes; its output goes to a file.

    The step overlaps: without that, it would wait for the one that the notebook is in. It has all
    CPUs and the memory of the job, and its ranks are bound by nbtrain. If one of its processes or
    nodes fails, the others stay. Raises `LaunchError` without ``srun``.
    """
    options = (
        f"--jobid={job}",
        "--overlap",
        "--no-kill",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        "--cpu-bind=none",
        "--mem=0",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--mpi=none",
        "--job-name=nbtrain",
    )
    try:
        return await asyncio.create_subprocess_exec(
            "srun",
            *options,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment(), **variables},
        )
    except OSError as error:
        raise LaunchError(f"srun could not be started ({error.strerror})") from error


async def wait_for_end(step: asyncio.subprocess.Process, output: IO[bytes]) -> None:
    """Wait until a step has ended, or ``srun`` prints into its output that a process of it has.

    ``srun`` itself stays for the other processes.
    """
    while step.returncode is None and not _PROCESS_END.search(_read_output(output)):
        await asyncio.sleep(POLL_INTERVAL_S)
    if step.returncode is None:  # what the process printed may come after that line
        await asyncio.sleep(5 * POLL_INTERVAL_S)


def _read_output(output: IO[bytes]) -> str:
    """Return what was printed, without moving the position, at which ``srun`` writes."""
    return os.pread(output.fileno(), 1 << 16, 0).decode("utf-8", "replace")


def describe_failure(missing: Sequence[str], output: IO[bytes]) -> str:
    """Return that agents did not come, with what ``srun`` printed."""
    text = _read_output(output)
    of_traceback = ("  ", "Traceback")
    lines = [line for line in text.splitlines() if line and not line.startswith(of_traceback)]
    lines = [line for line in lines if "cpu binding" not in line]
    reason = "; ".join(lines[-3:])[:600] or "srun printed no reason"
    nodes = ", ".join(missing)
    return f"no process of nbtrain on {nodes} has connected to the notebook's node: {reason}"


def explain_ends(job: str, names: Sequence[str]) -> dict[str, str]:
    """Return why nbtrain's processes on nodes of a job ended, where Slurm knows it.

    That is the end of the job, or the loss of a node.
    """
    state, seconds = _job_state(job), 0.0
    while state == "COMPLETING" and seconds < COMPLETING_TIMEOUT_S:  # why comes after that
        time.sleep(POLL_INTERVAL_S)
        state, seconds = _job_state(job), seconds + POLL_INTERVAL_S
    if state and state not in (*_RUNNING, "SIGNALING"):
        return dict.fromkeys(names, f"the Slurm job {job} {_ENDS.get(state, state.lower())}")
    with contextlib.suppress(LaunchError):
        lost = find_down(names) | {*names}.difference(find_nodes(job))
        return {name: f"its node {name} was lost" for name in names if name in lost}
    return {}
