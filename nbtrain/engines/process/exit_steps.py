"""Ends the process of a rank like an interpreter at its exit, but does not free its memory."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from ...tracking.limits import RELEASE_TIMEOUT_S
from ...worker.thread_joining import join_threads


def run_exit_steps(inherited_tracker: int | None = None) -> None:
    """Do what an interpreter does at its exit, but return, and free no memory.

    Waits for threads, runs exit functions, ends helper processes and flushes files. Errors are
    printed, not raised. `inherited_tracker` is the pid of the launcher's resource tracker, which
    must not be stopped.
    """
    steps: tuple[Callable[[], object], ...] = (
        join_threads,
        atexit._run_exitfuncs,
        _leave_multiprocessing,
        lambda: _stop_resource_tracker(inherited_tracker),
        _flush_files,
    )
    for step in steps:
        try:
            step()
        except BaseException:  # the later steps must run after any error
            with contextlib.suppress(Exception):  # a full disk
                traceback.print_exc()


def run_to_end(body: Callable[[], int]) -> NoReturn:
    """Run `body`, and end the process at once with the exit code that it returns.

    An exception (an error in nbtrain) is printed, and the code is `os.EX_SOFTWARE`. No exit
    functions run, and no files are flushed: `body` calls `run_exit_steps` for that.
    """
    code = os.EX_SOFTWARE
    try:
        code = body()
    except BaseException:  # there is no caller to return to
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _leave_multiprocessing() -> None:
    """End the rank's helper processes, as `multiprocessing` does at exit."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]


def _flush_files() -> None:
    """Flush the rank's open files. Those of the kernel are frozen, so `gc` does not list them."""
    sys.stdout.flush()
    sys.stderr.flush()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # Not isinstance, which calls `__class__` of a proxy, and that may raise.
    for file in [o for o in gc.get_objects() if issubclass(type(o), kinds)]:
        with contextlib.suppress(Exception):  # closed, detached, or a raw stream of the user
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe may block
                file.flush()


def _stop_resource_tracker(inherited: int | None) -> None:
    """Close this rank's end of the pipe of multiprocessing's tracker; wait until that has ended.

    The tracker frees shared memory when all ends are closed. If a child keeps one open, this waits
    for `RELEASE_TIMEOUT_S`. Does nothing without a tracker, or if its pid is `inherited`.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    pid, pipe = getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)
    if pid is None or pipe is None or pid == inherited:
        return
    with contextlib.suppress(OSError):
        os.close(pipe)
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
