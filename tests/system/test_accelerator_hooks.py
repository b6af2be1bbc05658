"""Who asks torch for CUDA: told, and refused where the user wishes it. CUDA is a stand-in here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

STAND_IN = """
import ctypes, nbtrain.system.gpus, nbtrain.system.accelerator_hooks, torch
nbtrain.system.gpus.gpu_count = lambda *_: 2
nbtrain.system.accelerator_hooks._GPU_FILES = ("/dev/null",)
driver = ctypes.CDLL({stub!r})
torch._C._cuda_init = lambda: driver.cuInit(0)
def prepare():
    torch._C._cuda_init()
"""


def prepared(kernel: Notebook, stub: Path) -> Notebook:
    must_run(kernel, STAND_IN.format(stub=str(stub)) + "%load_ext nbtrain")
    return kernel


def test_the_way_to_torchs_initialisation_is_told(
    start_kernel: Callable[..., Notebook],
    stub: Path,
) -> None:
    kernel = prepared(start_kernel(warm=False), stub)
    kernel.run("x = 1\nprepare()")
    told = kernel.run("%nbtrain guard").stdout
    assert ", line 2: `prepare()`" in told
    assert "a cell, line 2: prepare()" in told
    assert "a cell, line 7, in prepare: torch._C._cuda_init()" in told
    assert "ipykernel" not in told
    refused = kernel.run("%distributed -n 2 1").traceback
    assert "Called from a cell, line 7, in prepare: torch._C._cuda_init()" in refused
    assert "CUDA: initialised" in kernel.run("%nbtrain guard block").stdout


@pytest.mark.slow
def test_block_raises_before_and_leaves_the_kernel_clean(
    start_kernel: Callable[..., Notebook],
    stub: Path,
) -> None:
    kernel = prepared(start_kernel(warm=False), stub)
    kernel.run("%nbtrain guard block")
    out = kernel.run("y = 1\nprepare()")
    assert out.ename == "AcceleratorBlockedError"
    assert "----> 2 prepare()" in out.traceback
    assert "inside the training function" in out.evalue
    assert "can be forked" in kernel.run("%nbtrain guard").stdout

    for cell in (
        "from accelerate import Accelerator\nAccelerator(cpu=True)",
        "from accelerate import PartialState\nPartialState(cpu=True)",
        "from transformers import TrainingArguments\nTrainingArguments('out', use_cpu=True).device",
    ):
        assert kernel.run(cell).ename == "AcceleratorBlockedError", cell
    inside = "%%distributed -n 2 --env ACCELERATE_USE_CPU=true\nAccelerator().num_processes"
    must_run(kernel, inside)
    assert kernel.value("nbtrain.last_run().value") == 2

    kernel.run("%nbtrain guard warn")
    assert kernel.run("Accelerator(cpu=True).state._reset_state(True)").ename == ""
    assert "initialised CUDA" in kernel.run("prepare()").stdout


def test_unloading_puts_everything_back(
    start_kernel: Callable[..., Notebook],
    stub: Path,
) -> None:
    kernel = start_kernel()
    kernel.run("import sys\nbefore = [type(f).__name__ for f in sys.meta_path]")
    kernel.run("%load_ext nbtrain\n%unload_ext nbtrain")
    assert kernel.value("before == [type(f).__name__ for f in sys.meta_path]")
    kernel.run("import accelerate.state, torch")
    look = "(accelerate.state.PartialState.__init__, vars(torch.Tensor).get('pin_memory'))"
    kernel.run(f"before = {look}")
    kernel.run("%load_ext nbtrain\n%nbtrain guard block")
    assert kernel.value(f"before == {look}") is False
    kernel.run("%unload_ext nbtrain")
    assert kernel.value(f"before == {look}")


def test_a_module_that_comes_later_is_watched_too(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\n%nbtrain guard block\nimport sys")
    assert kernel.value("'accelerate.state' in sys.modules") is False
    out = kernel.run("from accelerate import Accelerator\nAccelerator(cpu=True)")
    assert out.ename == "AcceleratorBlockedError"
    assert "----> 2 Accelerator(cpu=True)" in out.traceback
