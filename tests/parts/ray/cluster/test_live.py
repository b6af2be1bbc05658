"""Ranks that stay between cells on a Ray cluster of two nodes: the contract of every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parts.live import contract
from tests.support.kernel import Notebook

from .runs import number_of
from .simulated import Simulated


@pytest.fixture
def live(notebook: Notebook) -> Notebook:
    """Two live ranks, each on its own node."""
    if not notebook.value("'model' in globals()"):
        notebook.run(contract.SETUP)
    contract.begin(notebook, "-e ray --nodes 2")
    assert len(set(notebook.value("list(ranks.nodes.values())"))) == 2
    return notebook


@pytest.mark.parametrize("check", contract.WITHOUT_THE_RECORDER, ids=lambda check: check.__name__)
def test_live_ranks(live: Notebook, check: Callable[[Notebook], None]) -> None:
    check(live)


def test_a_rank_that_does_not_hear_an_interrupt_is_named_with_its_line(
    live: Notebook, tmp_path: Path
) -> None:
    door = tmp_path / "open"
    cell = (
        "%%distributed\nimport contextlib, os, time\n"
        f"while not os.path.exists({str(door)!r}):\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n        time.sleep(0.1)"
    )
    unheard = "did not react to the interrupt so far"
    out = live.run(
        cell,
        interrupt_on="running",
        during=lambda out: door.touch() if unheard in str(out) else None,
        timeout=200,
    )
    assert out.ename == "KeyboardInterrupt"
    assert unheard in out.board
    assert "line 5: time.sleep(0.1)" in out.board
    assert live.run("%distributed 1 + 1").stdout == "[ranks 0–1] 2\n"


def test_what_does_not_work_on_a_cluster_is_refused(live: Notebook) -> None:
    out = live.run("%%distributed\nwith nbtrain.checkpoint(1) as path: pass")
    assert "live ranks on a cluster keep no checkpoints" in out.evalue
    assert "these ranks are on a cluster" in live.run("%nbtrain debug").evalue
    assert "cannot ask you here" in live.run("%%distributed\nbreakpoint()").evalue


def test_a_node_that_is_lost_leaves_the_others_their_variables(
    live: Notebook, cluster: Simulated
) -> None:
    live.run("%%distributed\nkept = rank + 3.0")
    cluster.tell(f"kill {number_of(cluster, live.value('ranks.nodes[1]'))}")
    out = live.run("%%distributed\ndist.barrier()", timeout=200)
    assert out.ename == "RankDied", out
    assert "rank 1" in out.evalue
    live.run("%nbtrain pull kept")
    assert live.value("kept") == 3.0
    live.run("%nbtrain stop")
    assert "there are no live ranks" in live.run("%nbtrain status").evalue


def test_nothing_is_left_on_the_nodes(notebook: Notebook, cluster: Simulated) -> None:
    if len(cluster.tell("list")) < 3:  # one was lost
        cluster.tell("add")
    notebook.run("%nbtrain stop")
    contract.begin(notebook, "-e ray --nodes 2")
    notebook.run("%%distributed\nfolder = os.environ['NBTRAIN_RUN']\nprint('in', folder)")
    folders = [Path(folder) for folder in notebook.value("ranks['folder']")]
    assert len(set(folders)) == 2
    notebook.run("%%distributed\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()")
    notebook.run("%nbtrain stop")
    assert not any(folder.parent.exists() for folder in folders)
