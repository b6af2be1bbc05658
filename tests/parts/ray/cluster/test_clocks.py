"""A node whose clock is hours off: its ranks' times are those of the launcher's host."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clocks import compile_clock
from tests.support.kernel import Notebook
from tests.support.paths import ROOT

from .conftest import on
from .simulated import Simulated

TRAIN = """
def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    attempt = 2 if nbtrain.last_checkpoint() else 1
    for step in range(20):
        dist.all_reduce(torch.ones(1))
        nbtrain.log(step=step, loss=float(attempt))
        time.sleep(0.01)
    if attempt == 1:
        with nbtrain.checkpoint(1):
            pass
        dist.barrier()
        raise ValueError("once")
"""


PRELOADED = """
import os, sys
if "LD_PRELOAD" not in os.environ:  # Ray takes it away from its workers
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": os.environ["CLOCK"]})
"""


@pytest.fixture(params=[-7200.0, 7200.0], ids=["behind", "ahead"])
def skewed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Simulated]:
    """A cluster of two nodes, the second of which has another time of day."""
    library, ahead = compile_clock(tmp_path)
    ahead.write_bytes(struct.pack("d", request.param))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        cluster = Simulated(1, {**os.environ, "RAY_TMPDIR": folder, "TMPDIR": folder})
        try:
            variables = {"CLOCK": str(library), "CLOCK_AHEAD": str(ahead)}
            variables["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
            (tmp_path / "sitecustomize.py").write_text(PRELOADED)
            cluster.tell(f"add {json.dumps(variables)}")
            yield cluster
        finally:
            cluster.close()


def test_a_node_whose_clock_is_off_moves_no_event(
    skewed: Simulated, start_kernel: Callable[..., Notebook]
) -> None:
    with on(skewed.address, start_kernel()) as notebook:
        notebook.run(TRAIN)
        notebook.run(
            "began = time.time()\n"
            "run = nbtrain.launch(train, engine='ray', nodes=2, num_processes=2, max_restarts=1)\n"
            "took = time.time() - began",
            timeout=120,
        )
        assert notebook.value("[run.state.outcome, run.state.attempt]") == ["succeeded", 2]
        assert notebook.value("run.state.notes") == ()
        most = notebook.value("took")
        times = notebook.value("[r.ended - r.started for r in run.state.ranks]")
        assert all(0 < seconds < most for seconds in times)
        again = "nbtrain.Run.open(run.folder).state.ranks"
        for ranks in ("run.state.ranks", again):
            seen = notebook.value(f"[[r.status, r.error, r.metrics['loss']] for r in {ranks}]")
            assert seen == [["done", None, 2.0]] * 2
        losses = "[g.loss.dropna().tolist() for _, g in run.history.groupby('rank')]"
        assert notebook.value(losses) == [[1.0] * 20 + [2.0] * 20] * 2
        assert notebook.value("bool((abs(run.history.time - began) < 2 * took).all())")
