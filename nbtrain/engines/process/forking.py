"""Forks this process so that the child never returns into the kernel's own code."""

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

from ...system.files import FilePosition, file_positions, unshare_file_offsets
from ...transport import process_state
from . import thread_pools
from .exit_steps import run_to_end

_permanent_pools: set[str] = set()
"""OpenMP libraries in this process that cannot free their pools."""


@contextlib.contextmanager
def ready_to_fork() -> Iterator[None]:
    """Flush the streams, free OpenMP's thread pools, and block SIGINT while the body forks.

    A forked child inherits the blocked SIGINT and must unblock it. The signal mask and
    ``TOKENIZERS_PARALLELISM``, which is set in the body, are restored afterwards.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    release_openmp_pools()
    # Otherwise tokenizers prints at each fork that it disables its own threads.
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
    """Free the calling thread's pool in every loaded GNU OpenMP; return the paths of all of them.

    The paths include libraries that cannot free it (older than OpenMP 5, as in wheels of
    scikit-learn 1.7 and earlier); these are noted in `_permanent_pools`, see `fork_process`. Empty
    without ``/proc``. Never raises.

    A process that ran a multi-threaded operation has a pool of threads. A forked child has the
    pool's bookkeeping but not its threads, and its first multi-threaded operation would wait for
    them forever. The next operation makes a new pool. The runtimes of LLVM and Intel handle forks
    themselves.
    """
    libraries: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:  # on Linux
        libraries = {line[line.index("/") :].rstrip("\n") for line in maps if "libgomp" in line}
    for path in libraries:
        with contextlib.suppress(OSError):  # unmapped
            try:
                ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard
            except AttributeError:  # older than OpenMP 5, as GCC 8 has it
                _permanent_pools.add(path)
    return sorted(libraries)


def fork_process(child: Callable[[], int]) -> int:
    """Fork, and return the child's pid. The child calls `child` and ends with its exit code.

    A pool of OpenMP belongs to a thread. If one cannot be freed, a new thread forks: the child has
    no other thread of this process, and so no pool. The thread waits until the child ends, because
    the kernel of Linux ends a child that dies with its parent when the forking thread ends.
    """
    if not _permanent_pools:
        return _fork(child)
    forked: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    settings = _torch_settings()

    def fork_and_wait() -> None:
        try:
            pid = _fork(partial(_run_as_main_thread, settings, child))
        except BaseException as error:  # of any kind: it is raised in the calling thread
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
    """Fork; return the child's pid. The child calls `child` and exits with its exit code."""
    with warnings.catch_warnings():
        # Python 3.12 and JAX warn about forks with threads; `leave_kernel` takes care of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        positions, pools = file_positions(), thread_pools.used_pools()
        pid = os.fork()
    return pid or run_to_end(partial(_run_child, positions, pools, child))


def _run_child(
    positions: list[FilePosition], pools: list[ThreadPoolExecutor], child: Callable[[], int]
) -> int:
    """Give the new process file positions and thread pools of its own, then run `child`."""
    unshare_file_offsets(positions)
    thread_pools.reset_pools(pools)
    return child()


def _torch_settings() -> tuple[bool, Any] | None:
    """Return torch's settings of this thread: whether gradients are recorded, and the device."""
    torch = sys.modules.get("torch")
    return (torch.is_grad_enabled(), process_state.default_device()) if torch is not None else None


def _run_as_main_thread(settings: tuple[bool, Any] | None, child: Callable[[], int]) -> int:
    """Run the child in its only thread, with the name and settings of its parent's main thread."""
    thread = threading.current_thread()
    thread.name = "MainThread"
    thread._daemonic = False  # type: ignore[attr-defined]  # threads that it starts inherit it
    if settings is not None:
        import torch

        records, device = settings
        torch.set_grad_enabled(records)
        if device != process_state.default_device():  # a set default slows down every call
            torch.set_default_device(device)
    return child()
