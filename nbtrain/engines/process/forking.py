"""Forks this process so that the child never returns into the kernel's own code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ...system.files import FilePosition, file_positions, unshare_file_offsets
from . import thread_pools
from .finish_process import run_to_end


@contextlib.contextmanager
def ready_to_fork() -> Iterator[None]:
    """Prepare the process for forks, and restore it afterwards."""
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
    """Free the calling thread's pool in every GNU OpenMP that is loaded, and list the libraries.

    A process that ran a multi-threaded operation has a pool of threads. A forked child has the
    pool's bookkeeping but not its threads, and its first multi-threaded operation would wait for
    them forever. OpenMP 5 can free the pool, and the next operation makes a new one. The runtimes
    of LLVM and Intel handle forks themselves.
    """
    libraries: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:  # on Linux
        libraries = {line[line.index("/") :].rstrip("\n") for line in maps if "libgomp" in line}
    for path in libraries:
        with contextlib.suppress(OSError, AttributeError):  # unmapped, or older than GCC 9
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard
    return sorted(libraries)


def fork_process(child: Callable[[], int]) -> int:
    """Fork, and return the child's pid. The child runs `child`, ends with its exit code."""
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
    unshare_file_offsets(positions)
    thread_pools.reset_pools(pools)
    return child()
