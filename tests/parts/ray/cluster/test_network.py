"""Two hosts with a real network between them, and no disk in common: it is cut, and one is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster_trainings import RESUMES
from tests.support.kernel import Notebook
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

from .conftest import on
from .runs import check_the_quickstart
from .two_hosts import Hosts, cannot

CUT = 10.0
"""Seconds that the link is down."""

COUNT = """
def count(until=300):
    for step in range(until):
        print("line", step)
        nbtrain.log(step=step, x=float(step))
        time.sleep(0.05)
"""
BOTH_BEGAN = "all((r.step or 0) > 20 for r in run.state.ranks)"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where one host has what the other does not see, with a name short enough for sockets."""
    reason = cannot()
    if reason:
        pytest.skip(reason)
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="nbnet-"))
    (path / "home").mkdir()
    (path / "ray").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts that are a Ray cluster, and share nothing of `folder`."""
    found = Hosts([folder])
    try:
        package = str(ROOT)
        ray = str(folder / "ray")
        found.start_ray({**os.environ, "RAY_TMPDIR": ray, "TMPDIR": ray, "PYTHONPATH": package})
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def notebook(hosts: Hosts, folder: Path) -> Iterator[Notebook]:
    """A kernel on the near host."""
    kernel = Notebook(folder / "home", folder, prefix=hosts.near.prefix)
    with on(hosts.address, kernel) as one:
        yield one


def test_the_quickstart_trains_on_two_hosts_to_the_bits_of_fresh_processes_here(
    notebook: Notebook,
) -> None:
    check_the_quickstart(notebook)


def test_nothing_is_lost_or_doubled_while_the_link_is_cut(notebook: Notebook, hosts: Hosts) -> None:
    notebook.run(COUNT)
    notebook.run(_launched("count", "view='none'"))
    wait_until(lambda: notebook.value(BOTH_BEGAN), 60)
    hosts.cut()
    time.sleep(CUT)  # nothing to wait for: this is how long it takes
    hosts.restore()
    assert "far has not answered since" in notebook.value("' '.join(run.state.notes)")
    notebook.run("run.wait()", timeout=120)
    assert notebook.value("run.state.status") == "succeeded"
    assert "far answers again" in notebook.value("' '.join(run.state.notes)")
    lines = [f"line {step}" for step in range(300)]
    assert notebook.value("[run.logs(r).splitlines() for r in (0, 1)]") == [lines, lines]
    seen = "[g.dropna(subset='x').step.tolist() for _, g in run.history.groupby('rank')]"
    assert notebook.value(seen) == [list(range(300))] * 2


def test_without_a_common_disk_a_checkpoint_is_refused(notebook: Notebook, hosts: Hosts) -> None:
    notebook.run(RESUMES)
    out = notebook.run("nbtrain.launch(train, engine='ray', nodes=2, num_processes=2)", timeout=120)
    assert out.ename == "NbtrainError", out.traceback
    assert "not all nodes see it. Set NBTRAIN_HOME to a folder on a disk" in out.evalue


def test_a_host_that_is_lost_is_named(notebook: Notebook, hosts: Hosts) -> None:
    notebook.run(_launched("count", "until=10_000"))
    wait_until(lambda: notebook.value(BOTH_BEGAN), 60)
    began = time.monotonic()
    hosts.far.kill()
    wait_until(lambda: notebook.value("run.state.status != 'running'"))
    took = time.monotonic() - began
    notebook.run("run.wait()", timeout=60)
    print(f"told after {took:.1f} s: Ray itself needs 15 s")
    assert "its node far (10.77.0.2) was lost" in notebook.value("str(run.failure)")


def _launched(function: str, *options: str) -> str:
    told = ", ".join(["engine='ray', nodes=2, num_processes=2, background=True", *options])
    return f"run = nbtrain.launch({function}, {told})"
