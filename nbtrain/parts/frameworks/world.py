"""Publishes the addresses of the ranks for TensorFlow, JAX and Keras.

Each rank reserves ports and publishes them in the store of torch's ranks.
A reserved port stays bound, not listening, until the process ends: the server that a library starts
there may bind it too (both set SO_REUSEADDR), and no other process gets it before. Nothing is
reserved until a library needs it.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...part_api import (
    POLL_INTERVAL_S,
    LaunchError,
    Placement,
    is_loopback,
    own_address,
    rank_context,
)


@dataclass(frozen=True)
class World:
    """The ranks of all nodes, as one of them sees them."""

    rank: int
    local_rank: int
    size: int
    store_host: str
    store_port: int
    attempt: int


@dataclass(frozen=True)
class Addresses:
    """``host:port`` for each rank (`workers`), and for JAX's service in rank 0 (`coordinator`)."""

    workers: tuple[str, ...]
    coordinator: str


_addresses: dict[World, Addresses] = {}
"""The addresses that this rank has published and read, by its world."""


def current_world() -> World:
    """Return the world of this rank, also before its task has begun: values are loaded earlier.

    A live rank's is that of its process.
    """
    context = rank_context.current()
    if context is not None:
        job = context.process_job
        place = job.world or Placement(0, 1, 0, job.world_size, "127.0.0.1", job.port)
        local = context.rank - place.begin
        host, port = place.master_addr, place.master_port
        return World(place.first + local, local, place.size, host, port, job.attempt)
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    rank, local, size, port, restarts = (int(os.environ[name]) for name in numbers)
    return World(rank, local, size, os.environ["MASTER_ADDR"], port, restarts + 1)


def addresses(timeout_s: float | None = None) -> Addresses:
    """Reserve and publish this rank's addresses, and return those of all ranks.

    Raises `LaunchError` if another rank has not published its addresses within `timeout_s`, by
    default within the 300 seconds that torch waits for a key of its store.
    """
    world = current_world()
    if world in _addresses:
        return _addresses[world]
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    given: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    of_run: Any = TCPStore(world.store_host, world.store_port, wait_for_workers=False, **given)
    timeout_s = of_run.timeout.total_seconds()
    store = PrefixStore(f"nbtrain/frameworks/{world.attempt}", of_run)
    own = [f"{_own_host(world)}:{reserved.getsockname()[1]}" for reserved in _reserve()]
    store.set(str(world.rank), " ".join(own))
    ranks = [str(rank) for rank in range(world.size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(ranks):  # not `get`: no signal ends torch's own wait
        if time.monotonic() > deadline:
            missing = ", ".join(rank for rank in ranks if not store.check([rank]))
            raise LaunchError(
                f"rank {missing} did not join the others within {timeout_s:.0f} s. Every rank has "
                "to create the strategy, or to call `initialize`"
            )
        time.sleep(POLL_INTERVAL_S / 10)
    published = [store.get(rank).decode().split() for rank in ranks]
    workers = tuple(worker for worker, _ in published)
    return _addresses.setdefault(world, Addresses(workers, published[0][1]))


def _own_host(world: World) -> str:
    return "127.0.0.1" if is_loopback(world.store_host) else str(own_address(world.store_host))


@functools.cache
def _reserve() -> list[socket.socket]:
    """Bind two ports, for this rank as a worker and as the coordinator; return their sockets.

    Later calls return the same sockets, which stay bound until the process ends.
    """
    reserved = [socket.socket(), socket.socket()]
    for each in reserved:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("", 0))
    return reserved
