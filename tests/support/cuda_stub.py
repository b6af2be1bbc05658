"""A driver that claims two GPUs, and a kernel in which it was initialised."""

from __future__ import annotations

from pathlib import Path

from tests.support.kernel import Notebook

STUB = """
static int initialized = 0, devices = 2;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *n) { if (!initialized) return 3; *n = devices; return 0; }
"""


def dirty(kernel: Notebook, stub: Path, *setup: str) -> Notebook:
    kernel.run("import ctypes, nbtrain.system.gpus\nnbtrain.system.gpus.gpu_count = lambda *_: 2")
    kernel.run(f"driver = ctypes.CDLL({str(stub)!r})")
    for cell in setup:
        kernel.run(cell)
    return kernel
