"""Whether CUDA was touched: the driver's own word, from a stub that counts what it is asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain import guard, loaded

STUB = """
static int initialized = 0, devices = 2;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *n) { if (!initialized) return 3; *n = devices; return 0; }
"""

ASK = """
import ctypes, sys, nbtrain
from nbtrain import devices, guard
devices.gpu_count = lambda: 2
driver = ctypes.CDLL(sys.argv[1])
print(guard.cuda_is_initialized(), guard.cuda_is_initialized())
driver.cuInit(0)
print(guard.cuda_is_initialized())
try:
    nbtrain.launch(lambda: 1, num_processes=2, view='none')
except nbtrain.NbtrainError as error:
    print(type(error).__name__, error)
print(nbtrain.launch(lambda: 1, engine='inline', view='none').value)
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=STUB,
        text=True,
        check=True,
    )
    return library


def test_asking_is_clean_and_a_dirty_kernel_is_refused(stub: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", ASK, str(stub)], capture_output=True, text=True, timeout=60
    )
    lines = out.stdout.splitlines()
    assert lines[:2] == ["False False", "True"], out.stderr
    assert lines[2].startswith("PreflightError CUDA is already initialised in this process")
    assert lines[3] == "1"


def test_without_a_driver_nothing_was_touched() -> None:
    assert loaded.libraries("libcuda.so") or not guard.cuda_is_initialized()
