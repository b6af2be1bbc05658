"""A clock that is set, for the processes of a test."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "set_clock.c"


def compile_clock(folder: Path) -> tuple[Path, Path]:
    """Return a library for LD_PRELOAD, and the file that CLOCK_AHEAD names: how far to be ahead.

    Skips the test where there is no compiler.
    """
    if not shutil.which("gcc") or sys.platform != "linux":
        pytest.skip("needs gcc")
    library, ahead = folder / "set_clock.so", folder / "ahead"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    ahead.write_bytes(struct.pack("d", 0.0))
    return library, ahead
