"""What the host offers, and the rules of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbtrain import devices

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("1,-1,2", [1]),
        ("0,7,1", [0]),
        ("0,0", []),
        ("GPU-cc,0", [2, 0]),
        ("GPU-a", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_follow_cudas_rule(setting: str | None, indices: list[int]) -> None:
    assert devices.visible(UUIDS, setting) == indices


def test_counting_gpus_works_without_a_driver_and_leaves_cuda_alone() -> None:
    import torch

    assert devices.gpu_count() == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_cgroups_quota_is_read(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert devices._cgroup_quota(tmp_path) == quota


def test_ranks_share_the_cpus_this_process_may_use() -> None:
    usable = devices.usable_cpus()
    assert 1 <= usable <= (os.cpu_count() or 1)
    assert devices.threads_per_rank(1) == usable
    assert devices.threads_per_rank(1000) == 1
