"""Slurm's variables and texts, read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.parts.slurm.allocation import Allocation, default_engine, is_of_task, read_allocation
from nbtrain.parts.slurm.slurm_commands import read_duration, read_gpus

OF_SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Allocation("7", "n[1-2]", 2, 1, 0)),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, Allocation("7", "n[1-2]", 2, 3, 0)),
        ({"SLURM_NTASKS_PER_NODE": "2"}, Allocation("7", "n[1-2]", 2, 2, 0)),
        ({"SLURM_GPUS_ON_NODE": "8"}, Allocation("7", "n[1-2]", 2, 1, 8)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, Allocation("7", "n[1-2]", 2, 1, 4)),
        ({"SLURM_JOB_ID": "x"}, None),
        ({"SLURM_JOB_NODELIST": ""}, None),
    ],
)
def test_an_allocation_is_read_from_the_environment(
    variables: dict[str, str], expected: Allocation | None
) -> None:
    assert read_allocation({**OF_SALLOC, **variables}) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "slurm"),
        ({"SLURM_JOB_NUM_NODES": "1"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1"}, "slurm"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, ""),
    ],
)
def test_auto_means_slurm_in_a_job_of_several_nodes(
    variables: dict[str, str], expected: str
) -> None:
    assert default_engine({**OF_SALLOC, **variables}) == expected
    assert default_engine({}) == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:00", 60),
        ("0:05", 5),
        ("1:00:01", 3601),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 4 * 60 + 5),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_a_time_of_slurm_is_read(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


def test_the_gpus_of_a_job_are_read_from_its_line() -> None:
    shown = (
        "JobId=6 JobName=a NumNodes=2 TRES=cpu=4,node=2,gres/gpu=2 X=1\n"
        "JobId=7 JobName=a NumNodes=2 TRES=cpu=4,mem=8G,node=2,gres/gpu=8,gres/gpu:a100=8\n"
        "JobId=8 JobName=a NumNodes=2 TRES=cpu=4,node=2"
    )
    assert [read_gpus(shown, job) for job in ("6", "7", "8", "9")] == [2, 8, 0, 0]


def test_ranks_lose_the_variables_of_tasks_alone() -> None:
    kept = ("JOB_ID", "JOB_NODELIST", "CPUS_PER_TASK", "CPUS_ON_NODE", "TMPDIR", "SUBMIT_DIR")
    lost = ("PROCID", "LOCALID", "NTASKS", "NTASKS_PER_NODE", "TASKS_PER_NODE", "STEP_ID", "NPROCS")
    assert not any(is_of_task(f"SLURM_{name}") for name in kept)
    assert all(is_of_task(f"SLURM_{name}") for name in lost)


_LAUNCH = """
import sys
started, looked_for = [], []
sys.addaudithook(lambda event, args: started.append(args[0]) if event == "subprocess.Popen" else 0)
import shutil, nbtrain
which = shutil.which
shutil.which = lambda name, *args: looked_for.append(name) or which(name, *args)
run = nbtrain.launch(lambda: 1, num_processes=2, view="none")
assert nbtrain.Run.open(run.folder).value == 1
nbtrain.runs()
of_slurm = sorted(name for name in sys.modules if name.startswith("nbtrain.parts.slurm."))
print([each for each in started if each != sys.executable], looked_for, of_slurm)
"""


def test_a_host_without_slurm_is_not_searched_for_it(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCH],
        env={**env, "NBTRAIN_HOME": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=60,
    )
    own = [f"nbtrain.parts.slurm.{name}" for name in ("allocation", "launch_side")]
    assert done.stdout.strip() == f"[] [] {own}", done.stderr
