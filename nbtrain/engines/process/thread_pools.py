"""Replaces pools of threads in a forked child, which has none of its parent's threads.

A `ThreadPoolExecutor` that was used counts its threads, so in the child it starts none, and what is
submitted waits for ever. Some outlive their use: a notebook's own, and the one in which
torch.compile has kernels for the CPU built (`AsyncCompile.pool`, cached for the process; torch 2.13
makes only its pool of processes anew after a fork).
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
"""What a pool has of its threads: private, seen in Python 3.10 to 3.13."""


def used_pools() -> list[ThreadPoolExecutor]:
    """Return the pools that have threads; to be asked before a fork, as a child forgets them.

    A thread has a weak reference to its pool among its arguments (private, too). A pool that is
    not found, or is of another make, is left as it is.
    """
    pools: dict[int, ThreadPoolExecutor] = {}
    for thread in threading.enumerate():
        arguments = vars(thread).get("_args")  # a class of the user's may call anything so
        for argument in arguments if type(arguments) is tuple else ():
            pool: Any = argument() if type(argument) is weakref.ref else None
            if issubclass(type(pool), ThreadPoolExecutor) and _is_usual(pool):
                pools[id(pool)] = pool
    return list(pools.values())


def _is_usual(pool: Any) -> bool:
    own = vars(pool)
    return _PARTS.keys() <= own.keys() and type(own["_work_queue"]) is queue.SimpleQueue


def renew(pools: Iterable[ThreadPoolExecutor]) -> None:
    """Have pools begin again, without threads, in a child.

    What waits in them is their parent's: a child that did it, too, would do it twice.
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
hands the tasks to these processes, so in a child its next call waited for ever."""

_kept: list[Any] = []
"""Pools of the parent's processes: freed in a child, they would end them."""
