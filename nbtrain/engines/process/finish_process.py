"""Ends the process of a rank as an ordinary interpreter would, but does not free its memory."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from ..base import CRASHED

QUIET, LONGEST = 30.0, 600.0
"""Seconds for threads that outlive the function: to do nothing, and to last in all."""

BUSY = 0.005
"""CPU seconds per second from which on a process counts as doing something."""


def finish_process(inherited_tracker: int | None = None) -> None:
    """Do what an ordinary interpreter does at its end, but free no memory.

    `inherited_tracker` is the process of a resource tracker that belongs to the launcher.
    """
    steps: tuple[Callable[[], object], ...] = (
        _end_threads,
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


def _end_threads() -> None:
    """End idle pools, and join the threads that are no daemons as long as they do anything.

    An interpreter would wait for ever. A thread that writes a checkpoint has its time; one that
    does nothing for `QUIET` seconds, or lasts for `LONGEST`, ends with the process.
    """
    before, hook = signal.signal(signal.SIGALRM, _IdleAlarm()), sys.unraisablehook
    sys.unraisablehook = lambda _unraisable: None  # Python 3.13 prints `_ThreadsAreIdle`
    signal.setitimer(signal.ITIMER_REAL, 1, 0.2)
    try:
        with contextlib.suppress(_ThreadsAreIdle):
            threading._shutdown()  # type: ignore[attr-defined]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)


class _ThreadsAreIdle(BaseException):
    """The threads that are left do nothing."""


class _IdleAlarm:
    """Raises `_ThreadsAreIdle`, as a handler, once the process was idle, or lasted, too long."""

    def __init__(self) -> None:
        self._begun = self._checked = self._busy = time.monotonic()
        self._spent = time.process_time()
        self._has_reported = False

    def __call__(self, *_signal: object) -> None:
        if not self._has_reported and (threads := _still_running()):
            self._has_reported = True
            print(f"nbtrain: the function has returned; waiting for {threads}", flush=True)
        now, spent = time.monotonic(), time.process_time()
        if spent - self._spent > BUSY * (now - self._checked):
            self._busy = now
        self._checked, self._spent = now, spent
        if now > min(self._busy + QUIET, self._begun + LONGEST):
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"nbtrain: no longer waiting for {_still_running()}", flush=True)
            raise _ThreadsAreIdle


def _still_running() -> str:
    others = set(threading.enumerate()) - {threading.main_thread()}
    names = ", ".join(thread.name for thread in others if not thread.daemon)
    return f"thread {names} (if it need not end, make it a daemon thread)" if names else ""


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
