"""A real Slurm of two nodes, and kernels inside an allocation of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.kernel import Notebook
from tests.support.slurm import Job, SlurmCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A cluster of two nodes, for the tests of a module."""
    with SlurmCluster() as found:
        yield found


@pytest.fixture(scope="module")
def job(cluster: SlurmCluster) -> Job:
    """An allocation of both nodes, of two tasks each."""
    return cluster.job("--ntasks-per-node=2", time="60")


@pytest.fixture(scope="module")
def notebook(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel in that allocation."""
    folder = tmp_path_factory.mktemp("kernel")
    with closing(kernel_in(job, folder)) as kernel:
        yield kernel


@pytest.fixture
def start_kernel_in(tmp_path: Path) -> Iterator[Callable[[Job], Notebook]]:
    """Starts kernels in an allocation; they have one home, and end with the test."""
    kernels: list[Notebook] = []

    def start(job: Job) -> Notebook:
        kernels.append(kernel_in(job, tmp_path))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


def kernel_in(job: Job, folder: Path) -> Notebook:
    """Return a new kernel inside an allocation, with nbtrain loaded."""
    variables = {**job.env, "NBTRAIN_HOME": str(folder / "home")}
    notebook = Notebook(folder / "home", folder, environment=variables)
    notebook.run("%load_ext nbtrain\nimport os, time, torch, nbtrain")
    return notebook
