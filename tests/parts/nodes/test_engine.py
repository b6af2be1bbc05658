"""`notebook_launcher` on several nodes: real kernels, each a node, that train as one world."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import nbtrain
from nbtrain.errors import LaunchError
from tests.support.kernel import Notebook, Outputs
from tests.support.ports import free_port

SETUP = """
%load_ext nbtrain
import os, signal, threading, time, accelerate, torch, nbtrain
from nbtrain import notebook_launcher
model = torch.nn.Linear(2, 1)

def train(model, fails=False, seconds=0):
    from accelerate import Accelerator
    accelerator = Accelerator()
    ours, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(nbtrain.rank())
    for step in range(3):
        accelerator.backward((ours(torch.randn(4, 2)) - 1).pow(2).mean())
        optimizer.step()
        if nbtrain.rank() == 3 and fails:
            raise ValueError("boom")
    time.sleep(seconds * (nbtrain.rank() == 2))
    told = [os.environ[name] for name in ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")]
    return nbtrain.rank(), nbtrain.world_size(), told, model.weight.tolist()

def forever():
    torch.distributed.init_process_group("gloo")
    while not nbtrain.should_stop():
        torch.distributed.all_reduce(torch.ones(1))
        nbtrain.log(connected=1)
        time.sleep(0.02)

def kernel():
    signals = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.lexists(link)]
    # pyzmq opens one more event descriptor, once, whenever it likes.
    return dict(os.environ), signals, len([h for h in held if "eventfd" not in h]), threads
"""


def _of_node(cell: str, node: int, port: int) -> str:
    return cell.replace("NODE", str(node)).replace("PORT", str(port))


class Pair:
    """Two kernels that run the same cell at the same time, each as a node."""

    def __init__(self, kernels: list[Notebook]) -> None:
        self.kernels = kernels
        self._pool = ThreadPoolExecutor(1)

    def both(self, cell: str, **options: Any) -> list[Outputs]:
        """Run a cell in each; ``NODE`` and ``PORT`` stand for what they say."""
        port = free_port()

        def one(node: int) -> Outputs:
            more = options if node == 0 else {}
            return self.kernels[node].run(_of_node(cell, node, port), timeout=100, **more)

        other = [self._pool.submit(one, node) for node in range(1, len(self.kernels))]
        return [one(0), *(told.result() for told in other)]

    def values(self, expression: str) -> list[Any]:
        return [kernel.value(expression) for kernel in self.kernels]

    def close(self) -> None:
        self._pool.submit(lambda: asyncio.get_event_loop().close()).result()  # the client's
        self._pool.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kernels: list[Notebook] = []
    try:
        for node in range(2):
            folder = tmp_path_factory.mktemp(f"node-{node}")
            kernels.append(Notebook(folder / "home", folder, warm=True))
        with closing(Pair(kernels)) as found:
            found.both(SETUP)
            found.both(
                f"notebook_launcher(train, (model,), {LAUNCH})"
            )  # the first opens what stays
            found.both("before = kernel()")
            yield found
    finally:
        for kernel in kernels:
            kernel.close()


LAUNCH = "num_processes=2, num_nodes=2, node_rank=NODE, use_port=PORT, rdzv_conf={'timeout': 60}"


def test_two_notebooks_train_as_one_world(pair: Pair) -> None:
    outs = pair.both(f"run = notebook_launcher(train, (model,), {LAUNCH})")
    assert [out.ename for out in outs] == ["", ""], outs[0].traceback + outs[1].traceback
    results = [one for found in pair.values("run.results") for one in found]
    assert [(rank, size, told) for rank, size, told, _ in results] == [
        (rank, 4, [str(rank % 2), str(rank // 2), "2"]) for rank in range(4)
    ]
    assert len({str(weights) for *_, weights in results}) == 1
    assert pair.values("model.weight.tolist()") == [results[0][3]] * 2
    assert pair.values("[a == b for a, b in zip(before, kernel())]") == [[True] * 4] * 2
    assert "node_rank=1, master_addr='127.0.0.1'" in outs[0].board
    assert "node 1 of 2: ranks 2 to 3 of 4" in outs[1].board


def test_a_rank_that_fails_is_named_on_its_node_and_ends_the_other(pair: Pair) -> None:
    outs = pair.both(f"run = notebook_launcher(train, (model, True), {LAUNCH})")
    assert [out.ename for out in outs] == ["RuntimeError", "ValueError"]
    assert "this is node 0 of 2, and this notebook sees this node only" in outs[0].traceback
    assert "the notebook of another node shows the reason" in outs[0].traceback
    assert pair.values("[a == b for a, b in zip(before, kernel())]") == [[True] * 4] * 2


def test_an_interrupt_of_one_node_ends_the_ranks_of_the_other(pair: Pair) -> None:
    outs = pair.both(f"notebook_launcher(forever, (), {LAUNCH})", interrupt_on="0 to 1 of 4")
    assert outs[0].ename == "KeyboardInterrupt"
    assert outs[1].ename == "RuntimeError"
    assert "this is node 1 of 2" in outs[1].traceback
    assert pair.values("[a == b for a, b in zip(before, kernel())]") == [[True] * 4] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_waits_says_so_and_hears_an_interrupt(pair: Pair, node: int) -> None:
    kernel = pair.kernels[node]
    cell = _of_node(f"notebook_launcher(train, (model,), {LAUNCH})", node, free_port())
    out = kernel.run(cell, interrupt_on="waiting for the other nodes", timeout=25)
    assert out.ename == "KeyboardInterrupt"
    assert kernel.value("[a == b for a, b in zip(before, kernel())]") == [True] * 4


@pytest.mark.slow
def test_where_a_kernel_was_killed_the_ranks_of_the_other_node_end(pair: Pair) -> None:
    port, cell = free_port(), f"notebook_launcher(forever, (), {LAUNCH})"
    left, lost = pair.kernels
    lost.client.execute(_of_node(cell, 1, port))

    def kill(out: Outputs) -> None:
        if "connected" in str((out.models, out.updates)) and lost.process.is_running():
            lost.process.kill()

    out = left.run(_of_node(cell, 0, port), during=kill)
    assert out.ename == "RuntimeError"
    assert "this is node 0 of 2, and this notebook sees this node only" in out.traceback


def _as_node(node: int, port: int, ranks: int = 1, seconds: float = 1) -> Any:
    return nbtrain.notebook_launcher(
        lambda: 1,
        num_processes=ranks,
        num_nodes=2,
        node_rank=node,
        use_port=port,
        rdzv_conf={"timeout": seconds},
    )


@pytest.mark.parametrize(
    ("node", "words"),
    [(0, "node 1 has not come"), (1, "127.0.0.1 port .* does not answer .*Connection refused")],
)
def test_a_node_that_does_not_come_is_waited_for_so_long(node: int, words: str) -> None:
    with pytest.raises(LaunchError, match=f"node {node} of 2 waited 1 s for the others: {words}"):
        _as_node(node, free_port())
