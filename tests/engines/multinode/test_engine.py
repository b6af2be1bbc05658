"""`notebook_launcher` on several nodes: real kernels, each a node, that train as one world."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

import nbtrain
from nbtrain.engines.multinode import agent as node_agent
from nbtrain.errors import LaunchError, PlanError
from nbtrain.lifecycle import restarts
from nbtrain.planning import world as nodes
from nbtrain.planning.plan import Call, Plan
from nbtrain.system import network
from nbtrain.tracking import events as ev
from nbtrain.tracking.diagnosis.verdict import describe_endings, explain
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RankState, RunState
from nbtrain.worker.job import Job
from nbtrain.worker.rank_environment import rank_environment
from tests.support.kernel import Notebook, Outputs
from tests.support.strangers import HALF_A_MESSAGE, Strangers
from tests.support.waiting import wait_until

SETUP = """
%load_ext nbtrain
import os, signal, threading, time, accelerate, torch, nbtrain
from nbtrain import notebook_launcher
model = torch.nn.Linear(2, 1)

def train(model, fails_until=0):
    from accelerate import Accelerator
    accelerator = Accelerator()
    ours, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(nbtrain.rank())
    for step in range(3):
        accelerator.backward((ours(torch.randn(4, 2)) - 1).pow(2).mean())
        optimizer.step()
        if nbtrain.rank() == 3 and nbtrain.attempt() <= fails_until:
            raise ValueError("boom")
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


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _of_node(cell: str, node: int, port: int) -> str:
    return cell.replace("NODE", str(node)).replace("PORT", str(port))


class Pair:
    """Two kernels that run the same cell at the same time, each as a node."""

    def __init__(self, kernels: list[Notebook]) -> None:
        self.kernels = kernels
        self._pool = ThreadPoolExecutor(1)

    def both(self, cell: str, **options: Any) -> list[Outputs]:
        """Run a cell in each; ``NODE`` and ``PORT`` stand for what they say."""
        port = _free_port()

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
    assert "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 2" in outs[0].board
    assert "node 1 of 2: ranks 2 to 3 of 4" in outs[1].board


STAGES = """
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh

layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(4)))

def pipelined(layers, stages):
    from torch.distributed.pipelining import PipelineStage
    group = init_device_mesh("cpu", (4 // stages, stages), mesh_dim_names=("dp", "pp"))["pp"]
    place, size = group.get_local_rank(), len(layers) // stages
    part = layers[size * place : size * (place + 1)]
    stage = PipelineStage(part, place, stages, torch.device("cpu"), group=group.get_group())
    for parameter in part.parameters():
        torch.nn.init.constant_(parameter, place + 1)

def of_layers():
    return [layer.weight[0, 0].item() for layer in layers]

def saved():
    return sorted(path.name for path in Path(run.folder, "weights").iterdir())
"""


def test_stages_come_home_on_each_node_and_across_nodes_they_are_told_and_kept(pair: Pair) -> None:
    pair.both(STAGES)
    launch = f"run = notebook_launcher(pipelined, (layers, HOWMANY), {LAUNCH})"
    outs = pair.both(launch.replace("HOWMANY", "2"))
    assert [out.ename for out in outs] == ["", ""], outs[0].traceback + outs[1].traceback
    assert pair.values("of_layers()") == [[1.0, 1.0, 2.0, 2.0]] * 2
    outs = pair.both(launch.replace("HOWMANY", "4"))
    assert [out.ename for out in outs] == ["", ""], outs[0].traceback + outs[1].traceback
    assert all("its stages are on several nodes; save them in the" in out.board for out in outs)
    assert pair.values("of_layers()") == [[1.0, 1.0, 2.0, 2.0]] * 2
    parts = [[f"layers.stage-{rank}" for rank in ranks] for ranks in ((0, 1), (2, 3))]
    assert pair.values("saved()") == parts


def test_a_rank_that_fails_ends_all_nodes_which_start_again_together(pair: Pair) -> None:
    cell = f"run = notebook_launcher(train, (model, FAILS), {LAUNCH}, max_restarts=RESTARTS)"
    outs = pair.both(cell.replace("FAILS", "1").replace("RESTARTS", "1"))
    assert [out.ename for out in outs] == ["", ""], outs[0].traceback + outs[1].traceback
    assert pair.values("run.state.attempt") == [2, 2]
    assert pair.values("[r[:2] for r in run.results]") == [[(0, 4), (1, 4)], [(2, 4), (3, 4)]]

    outs = pair.both(cell.replace("FAILS", "9").replace("RESTARTS", "0"))
    assert [out.ename for out in outs] == ["NodeFailed", "ValueError"]
    assert outs[0].evalue.startswith("node 1 of 2 (")
    assert outs[0].evalue.endswith("): rank 3: ValueError: boom")
    assert "rank 3: ValueError: boom" in outs[0].board
    assert pair.values("nbtrain.last_run().failure.kind") == ["node", "exception"]


def test_an_interrupt_of_one_node_is_one_of_all(pair: Pair) -> None:
    outs = pair.both(f"notebook_launcher(forever, (), {LAUNCH})", interrupt_on="0 to 1 of 4")
    assert [out.ename for out in outs] == ["KeyboardInterrupt"] * 2
    assert "on node 0 of 2 (" in outs[1].evalue
    assert pair.values("[a == b for a, b in zip(before, kernel())]") == [[True] * 4] * 2


def test_a_node_that_waits_says_so_and_hears_an_interrupt(pair: Pair) -> None:
    alone = Pair(pair.kernels[:1])
    out = alone.both(f"notebook_launcher(train, (model,), {LAUNCH})", interrupt_on="waiting for 1")
    assert out[0].ename == "KeyboardInterrupt"
    assert alone.values("[a == b for a, b in zip(before, kernel())]") == [[True] * 4]


def test_an_interrupt_is_heard_by_a_node_whose_port_strangers_hold(pair: Pair) -> None:
    port, strangers = _free_port(), list[Strangers]()

    def come(outputs: Outputs) -> None:
        if "waiting for 1" in str(outputs) and not strangers:
            strangers.append(Strangers(port, HALF_A_MESSAGE))
            wait_until(lambda: len(strangers[0].connections) > 3)
            pair.kernels[0].manager.interrupt_kernel()

    cell = _of_node(f"notebook_launcher(train, (model,), {LAUNCH})", 0, port)
    try:
        assert pair.kernels[0].run(cell, during=come, timeout=25).ename == "KeyboardInterrupt"
        assert strangers
    finally:
        for every in strangers:
            every.close()


@pytest.mark.slow
def test_a_node_that_is_gone_is_named(pair: Pair) -> None:
    port, cell = _free_port(), f"notebook_launcher(forever, (), {LAUNCH})"
    left, lost = pair.kernels
    lost.client.execute(_of_node(cell, 1, port))

    def kill(out: Outputs) -> None:
        if "connected" in str((out.models, out.updates)) and lost.process.is_running():
            lost.process.kill()

    out = left.run(_of_node(cell, 0, port), during=kill)
    assert out.ename == "NodeFailed"
    assert out.evalue.startswith("node 1 of 2 (")
    assert out.evalue.endswith(") is gone: its kernel or its host ended")


_PEER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
told = torch.ones(1)
dist.all_reduce(told)
print("peer", dist.get_rank(), "of", dist.get_world_size(), told.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_torchrun_started_is_in_the_same_world(node: int, tmp_path: Path) -> None:
    def train() -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        told = torch.ones(1)
        dist.all_reduce(told)
        return dist.get_rank(), told.item()

    script, port = tmp_path / "peer.py", _free_port()
    script.write_text(_PEER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank"]
    command += [str(1 - node), "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    with subprocess.Popen(
        [*command, "--master_port", str(port), str(script)], stdout=subprocess.PIPE, text=True
    ) as peer:
        try:
            run = nbtrain.notebook_launcher(
                train, (), 1, num_nodes=2, node_rank=node, use_port=port, rdzv_conf={"timeout": 60}
            )
            assert run.results == [(node, 2.0)]
            said, _ = peer.communicate(timeout=60)
        finally:
            peer.terminate()
    assert said == f"peer {1 - node} of 2 2.0\n"
    assert peer.returncode == 0


@pytest.mark.parametrize(("node", "words"), [(0, "1/2 clients joined"), (1, "timed out")])
def test_nodes_that_do_not_come_are_waited_for_so_long(node: int, words: str) -> None:
    with pytest.raises(LaunchError, match=f"node {node} of 2 could not connect .*{words}"):
        nbtrain.notebook_launcher(
            lambda: 1,
            num_nodes=2,
            node_rank=node,
            use_port=_free_port(),
            rdzv_conf={"timeout": 1},
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 2, "node_rank": 2}, "node_rank 2 is none of 2 nodes"),
        ({"node_rank": 1}, "node_rank 1 is none of 1 node"),
        ({"num_nodes": 2.5}, "whole number"),
        ({"num_nodes": 0}, "is none of 0"),
        ({"num_nodes": 2, "use_port": "http"}, "cannot meet at '127.0.0.1:http'"),
        ({"num_nodes": 2, "rdzv_endpoint": "head"}, "cannot meet at 'head'"),
        ({"num_nodes": 2, "rdzv_id": ""}, "rdzv_id"),
        ({"num_nodes": 2, "rdzv_conf": "timeout=3"}, "rdzv_conf"),
        ({"num_nodes": 2, "monitor_interval": 0}, "monitor_interval"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        nbtrain.notebook_launcher(lambda: 1, **options)


def test_ranks_get_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    world = nodes.Placement(1, 3, 4, 8, "10.0.0.1", 29500, "job", "eth7")
    plan = Plan(Call(print), "train")
    job = Job(plan, RunFolder(tmp_path), 2, "cpu", 1, world=world)
    told = rank_environment(job, 1, {})
    expected = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "=eth7",
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    assert expected.items() <= told.items()
    mine = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert "NCCL_SOCKET_IFNAME" not in rank_environment(job, 1, mine)
    assert (
        rank_environment(job, 1, {"NCCL_SOCKET_IFNAME": "eth2"}).get("NCCL_SOCKET_IFNAME") is None
    )
    local = replace(job, world=replace(world, master_addr="127.0.0.1"))
    assert "NCCL_SOCKET_IFNAME" not in rank_environment(local, 1, {})
    strange = replace(job, world=replace(world, has_strangers=True, interface=""))
    assert (
        not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_DIST_INIT_BARRIER"}
        & rank_environment(strange, 1, {}).keys()
    )


def test_an_address_has_an_interface() -> None:
    assert network.own_address("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") in ("lo", "lo0")
    assert network.own_address("no.such.host.invalid") is None
    assert network.interface_of(None) == ""
    assert network.is_own("localhost", "127.0.0.1")
    assert not network.is_own("localhost", "10.0.0.1")
    assert not network.is_own("no.such.host.invalid", "127.0.0.1")


def test_a_store_that_froze_is_given_up_and_its_node_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agent, "LOST", 0.2)
    thaws = threading.Event()
    here, there = Pipe()
    world = nodes.Placement(1, 2, 2, 4, "127.0.0.1", 1)
    agent = node_agent.NodeAgent(there, world, HashStore(), 1e5)
    monkeypatch.setattr(agent, "_store", SimpleNamespace(set=lambda *_: thaws.wait()))
    staying = threading.Thread(target=agent.stay)
    staying.start()
    try:
        assert here.poll(30)
        news = here.recv()
        assert news.final
        assert news.text.startswith("node 0 of 2 has sent no sign of life")
    finally:
        thaws.set()
        here.send(("over", ""))
        staying.join(30)
    assert isinstance(here.recv(), node_agent.AllParted)


def test_signs_of_life_do_not_wait_for_the_next_look() -> None:
    here, there = Pipe()
    store = HashStore()
    agent = node_agent.NodeAgent(there, nodes.Placement(1, 2, 2, 4, "127.0.0.1", 1), store, 1e5)
    staying = threading.Thread(target=agent.stay)
    staying.start()
    try:
        beats = PrefixStore("nbtrain", store)
        first = beats.get("1")
        deadline = time.monotonic() + 30
        while beats.get("1") == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert beats.get("1") != first
    finally:
        here.send(("over", ""))
        staying.join(30)


@pytest.mark.parametrize("data", [b"no JSON", b"[1]", b"{}", b"[" * 100_000, b'{"status": 1}'])
def test_what_a_stranger_writes_into_the_store_ends_no_node(data: bytes) -> None:
    here, there = Pipe()
    store = HashStore()
    world = nodes.Placement(1, 2, 2, 4, "127.0.0.1", 1)
    agent = node_agent.NodeAgent(there, world, store, 0.01)
    staying = threading.Thread(target=agent.stay)
    PrefixStore("nbtrain", store).set("0", data)
    staying.start()
    try:
        time.sleep(0.2)
        assert staying.is_alive()
        report = {"status": "failed", "why": "\x1b[31mred\x07", "host": "\x1b]0;x\x07b", "beat": 1}
        PrefixStore("nbtrain", store).set("0", json.dumps(report))
        assert here.poll(10)
        news = here.recv()
        assert isinstance(news, node_agent.PeerReport)
        assert news.text == "node 0 of 2 (b): red"
    finally:
        here.send(("over", ""))
        staying.join(30)


def test_an_agent_that_cannot_be_forked_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process left")

    monkeypatch.setattr(os, "fork", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LaunchError, match="no process left") as raised:
        nbtrain.notebook_launcher(print, num_processes=1, num_nodes=2, use_port=29517)
    assert os.listdir("/proc/self/fd") == before
    assert raised.value is not None  # and with it the frames that it passed


def test_the_timeout_is_that_of_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def handler(parameters: RendezvousParameters) -> None:
        asked.append(parameters)
        raise ConnectionError

    monkeypatch.setattr(registry, "get_rendezvous_handler", handler)
    for conf in ({"timeout": 7}, {"timeout": 7, "join_timeout": 8}):
        with pytest.raises(ConnectionError):
            node_agent.join(nodes.Rendezvous(2, 1, "127.0.0.1:1", "c10d", conf), 1)
    assert [p.get_as_int("join_timeout") for p in asked] == [7, 8]


Told = Callable[..., RunState]


@pytest.fixture
def told() -> Told:
    def state(error: str | None, *, final: bool = False) -> RunState:
        status = "running" if error is None else "failed"
        ranks = (RankState(0, status=status, error=error),)
        began = RunState("train", "fork", ranks, 0.0, attempts=2)
        return fold(began, [ev.PeerNodeFailed(1.0, -1, "node 1 of 2 (b): rank 3: boom", final)])

    return state


_ECHO = "RuntimeError: Connection closed by peer [10.0.0.2]:1"


def test_the_node_that_failed_decides_whether_all_start_again(told: Told) -> None:
    for error in (None, _ECHO):
        assert restarts.is_worth_a_restart(told(error))
        assert not restarts.is_worth_a_restart(told(error, final=True))
        assert restarts.describe_failure(told(error)) == "node 1 of 2 (b): rank 3: boom"
    assert not restarts.is_worth_a_restart(told("NameError: x"))  # its own, before the first step
    assert restarts.describe_failure(told("ValueError: mine")).startswith("rank 0: ValueError")
    assert fold(told(None), [ev.Attempt(2.0, -1, 2, "again")]).peer_failure is None


def test_a_failure_elsewhere_is_told_where_ranks_only_lost_their_peers(told: Told) -> None:
    verdict = explain(told(None), [])
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.headline) == (
        "node",
        -1,
        "node 1 of 2 (b): rank 3: boom",
    )
    assert describe_endings("failed", told(_ECHO)) == "node 1 of 2 (b): rank 3: boom"
    assert describe_endings("succeeded", told(_ECHO)) == ""
