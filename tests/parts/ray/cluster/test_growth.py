"""Clusters that have room later, that lose nodes for good, or that are a kernel's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_trainings import RESUMES
from tests.support.kernel import Notebook, Outputs
from tests.support.waiting import wait_until

from .runs import number_of
from .simulated import Simulated


def test_a_launch_waits_for_nodes_if_it_is_told_to(cluster: Simulated, notebook: Notebook) -> None:
    added: list[str] = []

    def add(out: Outputs) -> None:
        if not added and "waiting for 3 nodes" in out.stdout:
            added.append(cluster.tell("add"))

    cell = "%%distributed -e ray --nodes 3 -n 3 --wait-for-nodes 60\nnbtrain.rank()"
    out = notebook.run(cell, during=add, timeout=120)
    assert not out.ename, out.traceback
    assert (
        "waiting for 3 nodes with 1 CPU free (for a rank each): 2 so far (60 s at most)\n"
        in out.stdout
    )
    assert notebook.value("nbtrain.last_run().results") == [0, 1, 2]
    assert notebook.value("len({r.node for r in nbtrain.last_run().state.ranks})") == 3


def test_waiting_can_be_given_up_and_ends(notebook: Notebook) -> None:
    before = notebook.value("len(nbtrain.runs())")
    cell = "%%distributed -e ray --nodes 9 -n 9 --wait-for-nodes 600\nnbtrain.rank()"
    out = notebook.run(cell, interrupt_on="waiting for 9 nodes", timeout=60)
    assert out.ename == "KeyboardInterrupt"
    out = notebook.run(cell.replace("600", "2"), timeout=60)
    assert (
        "3 of 4 nodes have 1 CPU free (for 1 rank each), but the run needs 9 such nodes"
        in out.evalue
    )
    assert notebook.value("len(nbtrain.runs())") == before
    out = notebook.run("%%distributed -e ray --nodes 3 -n 6\nnbtrain.rank()", timeout=60)
    assert not out.ename, out.traceback  # nothing is left reserved


def test_a_run_goes_on_with_fewer_nodes_if_none_takes_the_place_of_a_lost_one(
    cluster: Simulated, notebook: Notebook
) -> None:
    notebook.run(RESUMES)
    notebook.run(
        "run = nbtrain.launch(train, engine='ray', nodes=(2, 3), num_processes=3,\n"
        "                     background=True, max_restarts=1)"
    )
    wait_until(lambda: notebook.value("all((r.step or 0) > 20 for r in run.state.ranks)"), 60)
    lost = notebook.value("run.state.ranks[2].node")
    cluster.tell(f"kill {number_of(cluster, lost)}")
    wait_until(lambda: notebook.value("run.state.message").startswith("waiting for 3 nodes"), 60)
    notebook.run("run.wait()", timeout=120)
    assert notebook.value("run.state.status") == "succeeded"
    assert notebook.value("[r.status for r in run.state.ranks]") == ["done", "done", "stopped"]
    assert all(start >= 20 for start in notebook.value("run.results[:2]"))


@pytest.fixture
def alone(
    start_kernel: Callable[..., Notebook],
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Notebook:
    """A kernel without a cluster, whose Ray writes into a home and a folder of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return start_kernel(warm=False)  # whose environment others can read


@pytest.mark.timeout(600)  # it starts Ray three times
def test_ray_is_started_once_by_a_kernel_that_asks_for_it_and_ended_with_it(
    alone: Notebook, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    alone.run("%load_ext nbtrain\nimport os, time, torch, nbtrain\nmodel = torch.nn.Linear(4, 1)")
    kernel, folder = alone.process, alone.process.environ()["TMPDIR"]

    def launch(cell: str = "model(torch.ones(1, 4)).shape[0]", options: str = "") -> set[int]:
        out = alone.run(f"%%distributed -e ray --address local -n 2 {options}\n{cell}", timeout=240)
        assert not out.ename, out.traceback
        return {pid for pid, name in _others(kernel, folder) if name == "raylet"}

    (first,) = launch()
    assert alone.value("nbtrain.last_run().results") == [1, 1]
    # For the ranks, too, but for what each rank has of its own.
    alone.run("os.environ.update(ASKED='yes', RANK='0', WORLD_SIZE='1', MASTER_PORT='0')")
    assert launch("os.environ['ASKED']") == {first}
    assert alone.value("nbtrain.last_run().results") == ["yes", "yes"]
    request.addfinalizer((tmp_path / "go").touch)
    goes_on = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.1)"
    assert launch(goes_on, "--detach") == {first}
    alone.run("detached = nbtrain.last_run()\nos.environ['RAY_ASKED'] = 'yes'")  # for Ray
    (second,) = launch() - {first}
    (tmp_path / "go").touch()
    alone.run("detached.wait()", timeout=60)
    assert alone.value("detached.state.status") == "succeeded"
    wait_until(lambda: not psutil.pid_exists(first))  # it had copies of what kept its Ray
    psutil.Process(second).kill()
    assert second not in launch()  # nobody is told of what was mended
    kernel.kill()
    wait_until(lambda: not _others(kernel, folder))


def _others(kernel: psutil.Process, folder: str) -> set[tuple[int, str]]:
    """Return the processes that a kernel began, or that those left."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != kernel.pid and process.environ().get("TMPDIR") == folder:
                found.add((process.pid, process.name()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
