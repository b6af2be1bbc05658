"""What notebooks/guides/security.md says of a run, held against a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

import nbtrain
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are listed on Linux")

PAGE = Path(__file__).parents[2] / "notebooks" / "guides" / "security.md"


def _listening(pid: int) -> set[str]:
    connections = psutil.Process(pid).net_connections("inet")
    return {c.laddr[0] for c in connections if c.status == psutil.CONN_LISTEN}


def test_only_the_store_and_the_ranks_listen_and_only_on_this_host() -> None:
    def train() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        while not nbtrain.should_stop():
            dist.barrier()

    before = _listening(os.getpid())
    run = nbtrain.launch(train, num_processes=2, view="none", background=True)
    try:
        wait_until(lambda: all(rank.pid for rank in run.state.ranks), timeout=60)
        ranks = [rank.pid for rank in run.state.ranks if rank.pid]
        wait_until(lambda: all(map(_listening, ranks)), timeout=60)
        family = psutil.Process().children(recursive=True)
        listening = {p.pid: _listening(p.pid) for p in family}
        others = {pid for pid, places in listening.items() if places} - {*ranks}
        assert {place for places in listening.values() for place in places} == {"127.0.0.1"}
        assert len(others) == 1  # the store
        assert _listening(os.getpid()) == before
        sockets = [path for path in run.folder.iterdir() if path.is_socket()]
        assert all(path.name.endswith(".recorder") for path in sockets)
    finally:
        run.stop()
    page = PAGE.read_text()
    for row in ("the store in which the ranks meet", "each rank in a gloo group"):
        assert f"| {row}" in page.replace(", a process of its own per run", "")
        assert "127.0.0.1" in page
