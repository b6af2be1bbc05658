"""Resets thread pools in a forked child, which has none of its parent's threads.

A used `ThreadPoolExecutor` counts its threads. So in the child it starts no new ones, and submitted
work waits forever. Such pools are those of the notebook, and the one in which torch.compile builds
CPU kernels (`AsyncCompile.pool`; torch 2.13 resets only its pool of processes after a fork).
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

_PARTS: dict[str, Callable[[], object]] = {
    "_threads": set,
    "_work_queue": queue.SimpleQueue,
    "_idle_semaphore": partial(threading.Semaphore, 0),
    "_shutdown_lock": threading.Lock,
}
"""The attributes of a pool that depend on its threads: private, seen in Python 3.10 to 3.13."""


def used_pools() -> list[ThreadPoolExecutor]:
    """Return the pools that have threads. Call it before a fork, because a child has no threads.

    A pool is found by the weak reference in the arguments of its threads, which is private, too. A
    pool with other attributes than Python's is left out.
    """
    pools: dict[int, ThreadPoolExecutor] = {}
    for thread in threading.enumerate():
        arguments = vars(thread).get("_args")  # a user's class may have another `_args`
        for argument in arguments if type(arguments) is tuple else ():
            pool: Any = argument() if type(argument) is weakref.ref else None
            if issubclass(type(pool), ThreadPoolExecutor) and _is_standard_pool(pool):
                pools[id(pool)] = pool
    return list(pools.values())


def _is_standard_pool(pool: Any) -> bool:
    own = vars(pool)
    return _PARTS.keys() <= own.keys() and type(own["_work_queue"]) is queue.SimpleQueue


def reset_pools(pools: Iterable[ThreadPoolExecutor]) -> None:
    """Make pools work in a child: without threads, and without the parent's waiting work.

    Also lets joblib start a new pool of processes, whatever `pools` are.
    """
    for pool in pools:
        for name, make in _PARTS.items():
            setattr(pool, name, make())
    for name in _LOKY:
        module: Any = sys.modules.get(name)
        executor = getattr(module, "_executor", None)
        if executor is not None:
            _kept.append(executor)
            module._executor = None


_LOKY = ("joblib.externals.loky.reusable_executor", "loky.reusable_executor")
"""Modules that keep joblib's pool of processes for the next call (joblib 1.5, loky 3.5). A thread
sends the work to these processes, so in a child the next call would wait forever."""

_kept: list[Any] = []
"""Pools of the parent's processes. If a child freed one, it would end the processes."""
