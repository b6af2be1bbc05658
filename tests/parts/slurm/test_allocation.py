"""Slurm's variables and texts, read."""

from __future__ import annotations

import pytest

from nbtrain.parts.slurm.allocation import Allocation, default_engine, read_allocation
from nbtrain.parts.slurm.slurm_commands import read_duration

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
