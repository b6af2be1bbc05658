"""Forks this process so that the copy works, and never returns into the kernel's own code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

from .finish_process import run_to_end


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
    """
    libraries: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:  # on Linux
        libraries = {line[line.index("/") :].rstrip("\n") for line in maps if "libgomp" in line}
    for path in libraries:
        with contextlib.suppress(OSError, AttributeError):  # unmapped; older than OpenMP 5 (GCC 9)
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard
    return sorted(libraries)


def fork_process(child: Callable[[], int]) -> int:
    """Fork; return the child's pid, and in the child never return."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads, jax too; leave_kernel is the answer to both.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        pid = os.fork()
    return pid or run_to_end(child)  # nothing may ever return into the kernel's own code
