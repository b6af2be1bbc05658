"""What ranks need of a small host's memory: one model that all share, moved by one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nbtrain.lifecycle.run import Run
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xla

MODEL = 400  # MiB
CELL = """
%%distributed
def train(model):
    import torch_xla, torch_xla.core.xla_model as xm
    def pause(name):
        open(f"{name}-{nbtrain.rank()}", "w").close()
        while not os.path.exists(name):
            time.sleep(0.01)
    pause("ready")
    model.to(torch_xla.device())
    torch_xla.sync()
    xm.wait_device_ops()
    pause("moved")
    return sum(p.device.type == "xla" for p in model.parameters())
"""


def pss(pids: list[int]) -> float:
    """The memory of processes in MiB, what they share counted once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / (1 << 20)


def measured(kernel: Notebook, home: Path, folder: Path, model: str) -> dict[str, float]:
    """Run the cell; return what its ranks take before, at most during and after the move."""
    found: dict[str, float] = {}

    def there(name: str) -> bool:
        return len(list(folder.glob(f"{name}-*"))) == 4

    def told_pids() -> list[int]:
        runs = sorted((home / "runs").glob("*/run.json"))
        return [rank.pid for rank in Run.open(runs[-1].parent).state.ranks if rank.pid]

    def watch() -> None:
        wait_until(lambda: there("ready"), 60)
        # A rank is ready before the run's folder says so: the launcher writes it down later.
        wait_until(lambda: len(told_pids()) == 4, 60)
        pids = told_pids()
        found["before"] = found["peak"] = pss(pids)
        (folder / "ready").touch()
        while not there("moved"):
            found["peak"] = max(found["peak"], pss(pids))
            time.sleep(0.005)
        found["after"] = pss(pids)
        (folder / "moved").touch()

    kernel.run(model)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        out = kernel.run(CELL.strip(), timeout=100)
    assert not out.ename, f"{out.ename}: {out.evalue}; the watch: {watching.exception()!r}"
    watching.result()
    for path in [*folder.glob("ready*"), *folder.glob("moved*")]:
        path.unlink()
    return found


@pytest.mark.timeout(240)
def test_one_model_is_shared_and_moved_by_one_rank_at_a_time(
    start_tpu_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    kernel = start_tpu_kernel(4)
    home, folder = tmp_path / "home", tmp_path / "kernel-0"
    kernel.run("linear = lambda _: torch.nn.Linear(1024, 5120)")
    kernel.run("layers = lambda n: torch.nn.Sequential(*map(linear, range(n)))")
    base = measured(kernel, home, folder, "model = layers(1)")["before"]
    told = measured(kernel, home, folder, f"model = layers({MODEL} // 20)")
    print(f"\nbase {base:.0f}, shared {told['before']:.0f}, at the peak {told['peak']:.0f}, "
          f"at the end {told['after']:.0f} MiB")  # fmt: skip
    assert told["before"] <= base + 1.15 * MODEL  # built in each rank: 4 times
    assert told["peak"] <= told["after"] + 0.6 * MODEL
    assert kernel.value("nbtrain.last_run().results") == [40] * 4
