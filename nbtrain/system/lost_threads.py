"""Names the threads that a forked child lacks: a fork copies only the calling thread.

Nothing is wrong with that until a rank waits for one: then the report of its hang can say so.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

_LIBRARIES = ("IPython", "ipykernel", "nbtrain", "tornado", "tqdm", "zmq", "_pydevd_bundle")
"""Whose threads do nothing for the notebook: those of a kernel, a progress bar and a debugger."""


def is_the_kernels(thread: threading.Thread) -> bool:
    """Whether a thread is the main one, or of a library that does nothing for the notebook."""
    target = getattr(thread, "_target", None)  # private: where it is not there, it is the user's
    own = target if type(thread) is threading.Thread else type(thread)
    package = str(getattr(own, "__module__", "")).partition(".")[0]
    return package in _LIBRARIES or thread is threading.main_thread()


def lost_in_a_fork() -> dict[str, tuple[str, ...]]:
    """Return the threads, and the libraries with threads, that a forked rank has none of."""
    return {"threads": _threads(), "libraries": _libraries()}


def _threads() -> tuple[str, ...]:
    return tuple(thread.name for thread in notebook_threads())


def notebook_threads() -> list[threading.Thread]:
    """Return the notebook's threads, but for those that a rank starts anew when it needs them."""
    frames = sys._current_frames()
    here = threading.current_thread()
    return [
        thread
        for thread in threading.enumerate()
        if not (thread is here or is_the_kernels(thread))
        and not _is_renewed(thread, frames.get(thread.ident or 0))
    ]


def _is_renewed(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread feeds a `multiprocessing.Queue`, or waits for a `ThreadPoolExecutor`'s work.

    Python starts the first anew after a fork. The second waits in C.
    """
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") == "multiprocessing.queues" or (
        frame is not None
        and frame.f_code.co_name == "_worker"
        and frame.f_globals.get("__name__") == ThreadPoolExecutor.__module__
    )


def _libraries() -> tuple[str, ...]:
    """Return the packages with native threads here that are named after them: ``polars-0``."""
    known = {thread.native_id for thread in threading.enumerate()}
    names = set[str]()
    for task in Path("/proc/self/task").glob("*"):  # on Linux
        with contextlib.suppress(OSError):  # it has just ended
            if int(task.name) not in known:
                names.add((task / "comm").read_text(errors="replace").strip().partition("-")[0])
    return tuple(sorted(names & sys.modules.keys()))
