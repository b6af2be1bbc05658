"""A Ray cluster to whose ports others connect while it trains, and a program that is its member."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_trainings import DDP
from tests.support.kernel import Notebook
from tests.support.paths import ROOT
from tests.support.strangers import KINDS, Crowd, listening
from tests.support.waiting import wait_until

from .simulated import Simulated

LAUNCH = "run = nbtrain.launch(train, model, 40, 0.05, engine='ray', nodes=2, num_processes=2{})"


def _family(process: psutil.Process) -> list[int]:
    with_children = [process, *process.children(recursive=True)]
    return [one.pid for one in with_children]


class Visits:
    """Strangers who visit each port of a cluster, and of what a kernel launches, as it opens."""

    def __init__(self, cluster: Simulated, notebook: Notebook) -> None:
        self.crowd = Crowd()
        self._roots = [psutil.Process(cluster.pid), notebook.process]
        self._own = listening([notebook.process.pid])  # Jupyter's ports are not nbtrain's
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._visit)
        self.crowd.visit(self._places())
        self._thread.start()

    def _places(self) -> list[tuple[str, int]]:
        pids = [pid for root in self._roots for pid in _family(root)]
        return sorted(listening(pids) - self._own)

    def _visit(self) -> None:
        while not self._over.wait(0.05):
            self.crowd.visit(self._places())

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.crowd.close()


@pytest.fixture
def visits(cluster: Simulated, notebook: Notebook) -> Iterator[Visits]:
    visiting = Visits(cluster, notebook)
    try:
        yield visiting
    finally:
        visiting.close()


MEMBER = """
import json, os, sys
sys.modules.setdefault("rfc3987_syntax", None)
import ray
ray.init(address=sys.argv[1], namespace="nbtrain", log_to_driver=False, logging_level="error")
from ray._private import state
alive = [a for a in state.actors().values() if a["State"] == "ALIVE"]
groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps({
    "named": ray.util.list_named_actors(all_namespaces=True),
    "actors": [[a["Name"], a["ActorClassName"]] for a in alive],
    "groups": len(groups),
    "reserved": {
        name: amount - ray.available_resources().get(name, 0)
        for name, amount in ray.cluster_resources().items()
        if name in ("CPU", "memory") and amount > ray.available_resources().get(name, 0)
    },
    "uid": ray.get(ray.remote(os.getuid).remote()) if len(sys.argv) > 2 else None,
}))
"""


def _check_nothing_is_left(cluster: Simulated) -> None:
    """But a process on each node for the kernel's next run, which reserves nothing."""
    wait_until(lambda: _member(cluster)["groups"] == 0, 60)
    member = _member(cluster)
    assert member["actors"] == [["", "NodeActor"]] * 2
    assert member["reserved"] == {}
    wait_until(lambda: not list(cluster.folder.glob("nbtrain-*")))


def _member(cluster: Simulated, *args: str) -> dict[str, object]:
    """Return what another program sees that joins the cluster, in nbtrain's own namespace."""
    command = [sys.executable, "-c", MEMBER, cluster.address, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert not done.returncode, done.stderr
    seen: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_strangers_at_every_port_change_nothing_of_a_run(
    cluster: Simulated, notebook: Notebook, visits: Visits
) -> None:
    notebook.run(DDP)
    reference = "torch.manual_seed(0); model = torch.nn.Linear(4, 1)"
    notebook.run(f"{reference}\n{LAUNCH.format(', background=True')}", timeout=120)
    wait_until(lambda: notebook.value("all((r.step or 0) > 3 for r in run.state.ranks)"), 120)
    before = len(visits.crowd.counts)
    member = _member(cluster)
    out = notebook.run("run.wait()", timeout=120)
    assert not out.ename, out.traceback
    attacked = notebook.value("[run.results, [p.tolist() for p in model.parameters()]]")
    assert attacked[0][0] == attacked[0][1] == attacked[1]
    visited = dict(visits.crowd.counts)
    visits.close()
    print(f"{len(visited)} ports, {sum(visited.values())} connections; {before} before the end")
    assert sum(visited.values()) > 4 * len(KINDS)
    assert member["named"] == []
    assert ["", "NodeActor"] in member["actors"], member
    notebook.run(f"{reference}\n{LAUNCH.format('')}", timeout=120)
    quiet = notebook.value("[run.results, [p.tolist() for p in model.parameters()]]")
    assert quiet == attacked
    _check_nothing_is_left(cluster)


def test_an_interrupt_is_heard_while_strangers_hold_every_port(
    cluster: Simulated, notebook: Notebook, visits: Visits
) -> None:
    notebook.run(DDP)
    cell = (
        "run = None\n"
        "model = torch.nn.Linear(4, 1)\n"
        "try:\n"
        "    nbtrain.launch(train, model, 100_000, 0.05, engine='ray', nodes=2, num_processes=2)\n"
        "finally:\n"
        "    run = nbtrain.last_run()"
    )
    out = notebook.run(cell, interrupt_on="loss", timeout=120)
    assert out.ename == "KeyboardInterrupt", out.traceback
    assert notebook.value("run.state.status") == "interrupted"
    visits.close()
    _check_nothing_is_left(cluster)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Simulated]:
    """A cluster that asks for a token."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        places = {"RAY_TMPDIR": folder, "TMPDIR": folder, "HOME": folder, "PYTHONPATH": str(ROOT)}
        cluster = Simulated(1, {**os.environ, **places, **TOKEN})
        try:
            yield cluster
        finally:
            cluster.close()


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "6e" * 32}

TRY = """
import nbtrain

def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()

try:
    print(nbtrain.launch(train, engine="ray", num_processes=2, view="none").results)
except nbtrain.NbtrainError as error:
    print(error)
"""


@pytest.mark.parametrize("has_token", [True, False], ids=["with", "without"])
def test_a_cluster_that_asks_for_a_token_trains_for_those_who_have_it(
    has_token: bool, guarded: Simulated, tmp_path: Path
) -> None:
    places = {"HOME": str(tmp_path), "NBTRAIN_HOME": str(tmp_path)}
    places |= {"RAY_ADDRESS": guarded.address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY],
        env={**os.environ, **places, **(TOKEN if has_token else {"RAY_AUTH_MODE": "disabled"})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if has_token:
        assert "[2.0, 2.0]" in done.stdout, done.stdout + done.stderr
    else:
        assert f"{guarded.address} (RAY_ADDRESS) cannot be joined" in done.stdout
        assert "If the cluster asks for a token, this kernel needs it, too" in done.stdout
