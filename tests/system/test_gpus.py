"""What the host offers, and the rules of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbtrain.system import gpus, host
from tests.support.waiting import wait_until

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("1,-1,2", [1]),
        ("GPU-cc,0", [2, 0]),
        ("MIG-1,MIG-2", [0]),
    ],
)
def test_visible_devices_follow_cudas_rule(setting: str | None, indices: list[int]) -> None:
    assert gpus.visible(UUIDS, setting) == indices


def test_counting_gpus_works_without_a_driver_and_leaves_cuda_alone() -> None:
    import torch

    assert gpus.gpu_count() == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({}, None),
    ],
)
def test_the_cgroups_quota_is_read(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert host._cgroup_quota(tmp_path) == quota


def test_ranks_share_the_cpus_this_process_may_use() -> None:
    usable = host.usable_cpus()
    assert 1 <= usable <= (os.cpu_count() or 1)
    assert host.threads_per_rank(1) == usable
    assert host.threads_per_rank(1000) == 1


class Nvml:
    """An NVML with four GPUs: a sound one, a lost one, one that tells little, one in MIG mode."""

    class NVMLError(Exception): ...

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlSystemGetDriverVersion": lambda: "550.54",
            "nvmlDeviceGetCount": lambda: 4,
            "nvmlDeviceGetHandleByIndex": lambda i: self.fail() if i == 1 else i,
            "nvmlDeviceGetUUID": lambda i: f"GPU-{i}",
            "nvmlDeviceGetName": lambda i: "Tesla",
            "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(total=16 << 30, used=3 << 30),
            "nvmlDeviceGetComputeRunningProcesses": self.running,
            "nvmlDeviceGetGraphicsRunningProcesses": self.running,
            "nvmlDeviceGetUtilizationRates": lambda i: SimpleNamespace(gpu=42),
            "nvmlDeviceGetComputeMode": lambda i: self.fail() if i == 2 else 3,
        }
        return answers[name]

    def fail(self) -> object:
        raise self.NVMLError("Not Supported")

    def running(self, index: int) -> object:
        if index == 2:
            self.fail()
        held = None if index == 3 else 2 << 30
        return [SimpleNamespace(pid=7, usedGpuMemory=held)]


def test_a_gpu_is_described_as_far_as_nvml_tells() -> None:
    sound, lost, silent, mig = gpus.describe(Nvml())
    assert (sound.name, sound.uuid, sound.driver) == ("Tesla", "GPU-0", "550.54")
    assert (sound.total, sound.used, sound.mode) == (16384, 3072, 3)
    assert sound.holders == (gpus.Holder(7, 2048),)
    assert (lost.index, lost.uuid, lost.total) == (1, "lost-1", 0)
    assert (silent.used, silent.holders, silent.mode) == (3072, (), 0)
    assert mig.holders == (gpus.Holder(7, None),)


class Driver(Nvml):
    """One that is initialised and shut down, and answers when it may."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_answer = threading.Event()

    def __getattr__(self, name: str) -> object:
        def counted() -> object:
            self.may_answer.wait(60)
            self.calls.append(name)
            return 1

        if name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount"):
            return counted
        return super().__getattr__(name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_gpus_are_watched_in_one_session_of_nvml(driver: Driver) -> None:
    driver.may_answer.set()
    before = threading.enumerate()
    watch = gpus.GpuWatch(0.0, 0.0)
    wait_until(lambda: driver.calls.count("nvmlDeviceGetCount") >= 3)
    watch.close()
    assert threading.enumerate() == before
    assert [c for c in driver.calls if c != "nvmlDeviceGetCount"] == ["nvmlInit", "nvmlShutdown"]
    assert [gpu.uuid for gpu in watch.seen] == ["GPU-0"]


def test_a_driver_that_does_not_answer_holds_nobody(driver: Driver) -> None:
    watch = gpus.GpuWatch(0.0, 0.0)
    watch.close(timeout_s=0.05)
    assert (watch.seen, watch.is_over) == ((), False)
    driver.may_answer.set()
    watch.close()
    assert watch.is_over
    assert driver.calls == ["nvmlInit", "nvmlShutdown"]


def kfd(root: Path) -> Path:
    """A host with a CPU node, two GPUs, and one that this container may not use."""
    for node, lines in enumerate(["simd_count 0", "simd_count 256\nunique_id 171", "", None]):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(
            lines if lines is not None else "cpu_cores_count 0\nsimd_count 256\nunique_id 205\n"
        )
    return root


def test_amds_gpus_are_counted_from_the_kernels_list(tmp_path: Path) -> None:
    assert gpus.rocm_uuids(kfd(tmp_path)) == ["GPU-00000000000000ab", "GPU-00000000000000cd"]
    assert gpus.rocm_uuids(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("env", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
    ],
)
def test_rocms_variables_hide_devices_in_their_order(
    env: dict[str, str], indices: list[int]
) -> None:
    assert gpus.rocm_visible(UUIDS, env) == indices


def test_accelerators_that_are_not_driven_yet_are_recognised_inertly(tmp_path: Path) -> None:
    mac, intel = gpus.TorchBuild("2", mps=True), gpus.TorchBuild("2", xpu=True)
    assert gpus.unused_accelerator(mac, tmp_path, "Darwin arm64") == "MPS (Apple's GPU)"
    assert gpus.unused_accelerator(mac, tmp_path, "Linux x86_64") == ""
    assert gpus.unused_accelerator(intel, tmp_path) == ""
    vendor = tmp_path / "sys/class/drm/renderD128/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x8086\n")
    assert gpus.unused_accelerator(intel, tmp_path) == "XPU (Intel's GPU)"
    assert gpus.unused_accelerator(gpus.TorchBuild("2", cuda="13.0"), tmp_path) == ""
