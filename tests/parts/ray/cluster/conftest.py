"""A simulated cluster of two nodes, and a kernel on it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Notebook
from tests.support.paths import ROOT

from .simulated import Simulated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where Ray is not installed: it is an extra."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.ray)
        item.add_marker(pytest.mark.timeout(240))
        if importlib.util.find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="needs Ray (pip install -e '.[test,ray]')"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Simulated]:
    """A cluster of two nodes with two CPUs each, for the tests of a module."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        package = str(ROOT)
        environment = {**os.environ, "RAY_TMPDIR": folder, "TMPDIR": folder, "PYTHONPATH": package}
        found = Simulated(2, environment)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def notebook(cluster: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel whose runs go to the cluster by default: ``RAY_ADDRESS`` is set."""
    folder = tmp_path_factory.mktemp("kernel")
    with on(cluster.address, Notebook(folder / "home", folder)) as one:
        yield one


@contextlib.contextmanager
def on(address: str, notebook: Notebook) -> Iterator[Notebook]:
    """Have a kernel's runs go to a cluster by default; end it."""
    try:
        notebook.run(f"import os; os.environ['RAY_ADDRESS'] = {address!r}")
        notebook.run("%load_ext nbtrain\nimport time, signal, torch, nbtrain")
        yield notebook
    finally:
        notebook.close()
