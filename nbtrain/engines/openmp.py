"""OpenMP and fork: a forked child must not inherit a GNU thread pool.

A process that ran one multi-threaded operation owns a pool of threads. A forked child has the
pool's bookkeeping but not its threads, and waits for them for ever in its first multi-threaded
operation. `omp_pause_resource_all(omp_pause_hard)` of OpenMP 5 gives the caller's pool back right
before the fork; the next operation in either process makes a new one. LLVM's and Intel's runtimes
register their own fork handlers and need nothing.
"""

from __future__ import annotations

import ctypes

_PAUSE_HARD = 2


def release_thread_pools() -> None:
    """Give back the calling thread's pool in every GNU OpenMP that this process has loaded."""
    for path in loaded_libraries("libgomp"):
        try:
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)
        except (OSError, AttributeError):  # unmapped meanwhile; older than OpenMP 5 (GCC 9)
            continue


def loaded_libraries(name: str) -> list[str]:
    """Return the paths of loaded files whose name contains `name`; none on other than Linux."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line[line.index("/") :].rstrip("\n") for line in maps if name in line}
    except (OSError, ValueError):
        return []
    return sorted(path for path in paths if name in path.rpartition("/")[2])
