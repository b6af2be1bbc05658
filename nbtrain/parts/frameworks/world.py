"""Where the ranks meet for TensorFlow, JAX and Keras: one address a rank, known to all of them.

Each rank reserves ports of its own and publishes them in the store that the ranks of torch meet in.
A reserved port stays bound, not listening, until the process ends: the server that a library starts
there may bind it too (both set SO_REUSEADDR), and no other process gets it meanwhile. Nothing is
reserved before a library asks.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from ...errors import LaunchError
from ...system.network import is_loopback, own_address
from ...transport.job import Job

JOIN_TIMEOUT_S = 300.0
"""As JAX waits for its processes."""

POLL_INTERVAL_S = 0.01


@dataclass(frozen=True)
class World:
    """The ranks of all nodes, as one of them sees them."""

    rank: int
    local_rank: int
    size: int
    store_host: str
    store_port: int
    attempt: str

    @staticmethod
    def of_environment() -> World:
        """Return the world that the variables of this rank describe: those that torchrun sets."""
        env = os.environ
        return World(
            int(env["RANK"]),
            int(env["LOCAL_RANK"]),
            int(env["WORLD_SIZE"]),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            env["TORCHELASTIC_RESTART_COUNT"],
        )

    @staticmethod
    def of_job(job: Job) -> World:
        """Return the same, with the store's own port: code for `mp.spawn` sets another one."""
        seen, place = World.of_environment(), job.world
        host, port = (place.master_addr, place.master_port) if place else ("127.0.0.1", job.port)
        return World(seen.rank, seen.local_rank, seen.size, host, port, seen.attempt)

    @property
    def is_on_this_host(self) -> bool:
        """Whether all ranks are on one host."""
        return is_loopback(self.store_host)


@dataclass(frozen=True)
class Addresses:
    """``host:port`` for each rank (`workers`), and for JAX's service in rank 0 (`coordinator`)."""

    workers: tuple[str, ...]
    coordinator: str


_current: World | None = None
_reserved: list[socket.socket] = []


def set_world(job: Job) -> World:
    """Remember where the ranks of a job meet, and return it."""
    global _current
    if _current is None:  # a live rank's world is that of its first task
        _current = World.of_job(job)
    return _current


def current_world() -> World:
    """Return the world of this rank, also before its task has begun: values are loaded earlier."""
    return _current or World.of_environment()


@functools.cache
def addresses(timeout_s: float = JOIN_TIMEOUT_S) -> Addresses:
    """Reserve and publish this rank's addresses, and return those of all ranks.

    Raises `LaunchError` if another rank has published none within `timeout_s` seconds.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    world = current_world()
    host, port, patience = world.store_host, world.store_port, timedelta(seconds=timeout_s)
    of_run = TCPStore(host, port, None, False, patience, wait_for_workers=False)
    store = PrefixStore(f"nbtrain/frameworks/{world.attempt}", of_run)
    store.set(str(world.rank), " ".join(_reserve(world)))
    ranks = [str(rank) for rank in range(world.size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(ranks):  # not `get`: no signal ends torch's own wait
        if time.monotonic() > deadline:
            missing = ", ".join(rank for rank in ranks if not store.check([rank]))
            raise LaunchError(
                f"rank {missing} did not join the others within {timeout_s:.0f} s. Every rank has "
                "to create the strategy, or to call `initialize`"
            )
        time.sleep(POLL_INTERVAL_S)
    published = [store.get(rank).decode().split() for rank in ranks]
    return Addresses(tuple(worker for worker, _ in published), published[0][1])


@functools.cache
def _reserve(world: World) -> list[str]:
    """Return the addresses of this rank: as a worker, and as the coordinator."""
    host = "127.0.0.1" if world.is_on_this_host else own_address(world.store_host)
    for _ in range(2):
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        _reserved.append(reserved)
    return [f"{host}:{reserved.getsockname()[1]}" for reserved in _reserved]
