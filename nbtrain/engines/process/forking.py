"""Forks this process so that the copy works, and never returns into the kernel's own code."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ...system.files import FilePosition, file_positions, separate
from . import thread_pools
from .finish_process import run_to_end

_KEPT_POOLS: set[str] = set()
"""Libraries of OpenMP in this process whose pools cannot be freed."""


@contextlib.contextmanager
def ready_to_fork() -> Iterator[None]:
    """Bring the process into a state that a child may be copied from, and back."""
    sys.stdout.flush()
    sys.stderr.flush()
    release_openmp_pools()
    # tokenizers announces at every fork that it gives up its own threads; say so beforehand.
    quiet = "tokenizers" in sys.modules and "TOKENIZERS_PARALLELISM" not in os.environ
    if quiet:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if quiet:
            del os.environ["TOKENIZERS_PARALLELISM"]


def release_openmp_pools() -> list[str]:
    """Free the calling thread's pool in every GNU OpenMP that this process has loaded; list those.

    A process that ran one multi-threaded operation owns a pool of threads. A forked child has the
    pool's bookkeeping but not its threads, and waits for them for ever in its first multi-threaded
    operation. OpenMP 5 can free the pool; the next operation in either process makes a new one.
    LLVM's and Intel's runtimes register their own fork handlers and need nothing.

    The library that torch 2.4 to 2.6 brings cannot do it: `fork_process` minds those.
    """
    libraries: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:  # on Linux
        libraries = {line[line.index("/") :].rstrip("\n") for line in maps if "libgomp" in line}
    for path in libraries:
        with contextlib.suppress(OSError):  # unmapped
            try:
                ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard
            except AttributeError:  # older than OpenMP 5 (GCC 9)
                _KEPT_POOLS.add(path)
    return sorted(libraries)


def fork_process(child: Callable[[], int]) -> int:
    """Fork; return the child's pid, and in the child never return.

    A pool belongs to a thread. Where it cannot be freed, a thread without one forks: that is all
    the child has of this process's threads. It stays until the child ends, because a child that
    dies with its parent dies with the thread that forked it.
    """
    if not _KEPT_POOLS:
        return _fork(child)
    forked: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    settings = _torch_settings()

    def fork_and_wait() -> None:
        try:
            pid = _fork(partial(_be_main_thread, settings, child))
        except BaseException as error:  # whatever it is, it is raised where the caller waits
            forked.put(error)
            return
        forked.put(pid)
        with contextlib.suppress(ChildProcessError):  # reaped
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(fork_and_wait,), name="nbtrain-fork", daemon=True).start()
    answer = forked.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _fork(child: Callable[[], int]) -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads, jax too; leave_kernel is the answer to both.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        positions, pools = file_positions(), thread_pools.used_pools()
        pid = os.fork()
    # Nothing may ever return into the kernel's own code.
    return pid or run_to_end(partial(_on_its_own, positions, pools, child))


def _on_its_own(
    positions: list[FilePosition], pools: list[ThreadPoolExecutor], child: Callable[[], int]
) -> int:
    separate(positions)
    thread_pools.renew(pools)
    return child()


def _torch_settings() -> tuple[bool, Any] | None:
    """Return what torch keeps for each thread: whether gradients are recorded, and the device."""
    torch = sys.modules.get("torch")
    return (torch.is_grad_enabled(), torch.get_default_device()) if torch is not None else None


def _be_main_thread(settings: tuple[bool, Any] | None, child: Callable[[], int]) -> int:
    """Run the child in what is its only thread, which becomes like its parent's main thread."""
    thread = threading.current_thread()
    thread.name = "MainThread"
    thread._daemonic = False  # type: ignore[attr-defined]  # threads that it starts inherit it
    if settings is not None:
        import torch

        records, device = settings
        torch.set_grad_enabled(records)
        if device != torch.get_default_device():  # a default that is set slows every call down
            torch.set_default_device(device)
    return child()
