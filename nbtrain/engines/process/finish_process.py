"""Ends the process of a rank as an ordinary interpreter would, but does not free its memory."""

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

from ...worker.thread_joining import join_threads
from ..base import CRASHED


def finish_process(inherited_tracker: int | None = None) -> None:
    """Do what an ordinary interpreter does at its end, but free no memory.

    `inherited_tracker` is the process of a resource tracker that belongs to the launcher.
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
        except BaseException:  # of any kind: the steps after it must run all the same
            with contextlib.suppress(Exception):  # a full disk
                traceback.print_exc()


def run_to_end(body: Callable[[], int]) -> NoReturn:
    """End the process with the exit code that `body` returns; nothing may return behind it."""
    code = CRASHED
    try:
        code = body()
    except BaseException:  # there is nothing left to return to
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _leave_multiprocessing() -> None:
    """End the rank's own helper processes, as `multiprocessing` does at exit."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]


def _flush_files() -> None:
    """Flush the rank's own open files; the kernel's are frozen, and so not listed."""
    sys.stdout.flush()
    sys.stderr.flush()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # type(o), not isinstance: that asks the object, and a proxy may answer with an exception.
    for file in [o for o in gc.get_objects() if issubclass(type(o), kinds)]:
        with contextlib.suppress(Exception):  # closed, detached, over a user's own raw stream
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # the reader of a pipe may not read
                file.flush()


def _stop_resource_tracker(inherited: int | None, patience: float = 1.0) -> None:
    """Let multiprocessing's tracker free shared memory, if this rank started one of its own.

    It does so once its pipe is closed everywhere, but a child that holds the pipe gets no time.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    pid, pipe = getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)
    if pid is None or pipe is None or pid == inherited:
        return
    with contextlib.suppress(OSError):
        os.close(pipe)
        deadline = time.monotonic() + patience
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
