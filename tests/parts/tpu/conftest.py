"""Kernels on a host that has, as far as nbtrain and torch_xla can tell, a TPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.support.kernel import Notebook
from tests.support.paths import ROOT

SETUP = f"""
import sys; sys.path.append({str(ROOT)!r})
from tests.support import tpu_plugin as plugin
import os, signal, time, torch, nbtrain
"""


def with_tpu(kernel: Notebook, chips: int, arguments: str = "") -> Notebook:
    """Return a kernel that has nbtrain loaded and a TPU of so many chips."""
    for cell in (SETUP, f"plugin.pretend({chips}{arguments})", "%load_ext nbtrain"):
        out = kernel.run(cell)
        assert not out.ename, out.traceback
    return kernel


@pytest.fixture(scope="session")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel with four chips, in which nothing may initialise XLA."""
    folder = tmp_path_factory.mktemp("kernel")
    with closing(Notebook(folder / "home", folder)) as kernel:
        yield with_tpu(kernel, 4)


@pytest.fixture
def start_tpu_kernel(start_kernel: Callable[..., Notebook]) -> Callable[..., Notebook]:
    """Start kernels of the test's own, by the number of chips."""
    return lambda chips, arguments="": with_tpu(start_kernel(), chips, arguments)
