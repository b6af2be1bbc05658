"""Lists the threads that a forked child lacks, because a fork copies only the calling thread.

If a rank waits for one of them, the report of its hang names it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

_LIBRARIES = ("IPython", "ipykernel", "nbtrain", "tornado", "tqdm", "zmq", "_pydevd_bundle")
"""Libraries of the kernel, progress bars and debuggers: ranks do not need their threads."""


def is_kernel_thread(thread: threading.Thread) -> bool:
    """Whether a thread is the main thread, or belongs to the kernel's libraries."""
    # Private: without it, the thread counts as the user's.
    target = getattr(thread, "_target", None)
    own = target if type(thread) is threading.Thread else type(thread)
    package = str(getattr(own, "__module__", "")).partition(".")[0]
    return package in _LIBRARIES or thread is threading.main_thread()


def find_lost_threads() -> dict[str, tuple[str, ...]]:
    """Return the names of threads, and the libraries with threads, that a forked rank lacks."""
    return {"threads": _threads(), "libraries": _libraries()}


def _threads() -> tuple[str, ...]:
    return tuple(thread.name for thread in notebook_threads())


def notebook_threads() -> list[threading.Thread]:
    """Return the Python threads of the user's code that a forked rank lacks.

    Left out are the calling thread, the kernel's own, and those that are restarted in a rank or
    wait for work in a pool.
    """
    here = threading.current_thread()
    frames = sys._current_frames()
    # This function's own frame would hold itself by `frames`, and the user's values by its callers,
    # until Python collects cycles.
    frames.pop(threading.get_ident(), None)
    return [
        thread
        for thread in threading.enumerate()
        if not (thread is here or is_kernel_thread(thread))
        and not _is_renewed(thread, frames.get(thread.ident or 0))
    ]


def _is_renewed(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread feeds a `multiprocessing.Queue`, or waits for a `ThreadPoolExecutor`'s work.

    Python restarts the first kind after a fork, and nbtrain resets the pools of the second.
    """
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") == "multiprocessing.queues" or (
        frame is not None
        and frame.f_code.co_name == "_worker"
        and frame.f_globals.get("__name__") == ThreadPoolExecutor.__module__
    )


def _libraries() -> tuple[str, ...]:
    """Return the packages with native threads, found by the threads' names (``polars-0``)."""
    known = {thread.native_id for thread in threading.enumerate()}
    names = set[str]()
    for task in Path("/proc/self/task").glob("*"):  # on Linux
        with contextlib.suppress(OSError):  # it has just ended
            if int(task.name) not in known:
                names.add((task / "comm").read_text(errors="replace").strip().partition("-")[0])
    return tuple(sorted(names & sys.modules.keys()))
