"""How the process of a rank ends: what an ordinary interpreter does, short of freeing memory."""

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
from functools import partial

QUIET, LONGEST = 30.0, 600.0
"""Seconds that threads which outlive the function may do nothing, and last in all."""

BUSY = 0.005
"""Seconds of CPU time a second from which on a process does something."""


def finish_process(inherited_tracker: int | None = None) -> None:
    """Do what an ordinary interpreter does at its end, short of freeing memory.

    `inherited_tracker` is a resource tracker's process that is the launcher's, not this rank's.
    """
    steps: tuple[Callable[[], object], ...] = (
        _end_threads,
        atexit._run_exitfuncs,
        _leave_multiprocessing,
        partial(_stop_resource_tracker, inherited_tracker),
        _flush_files,
    )
    for step in steps:
        try:
            step()
        except BaseException:  # each is owed its turn, whatever the one before met
            with contextlib.suppress(Exception):  # a full disk
                traceback.print_exc()


def _end_threads() -> None:
    """End idle pools and join the threads that are no daemons, as long as they do anything.

    An interpreter would wait for ever. One that writes a checkpoint has its time; one that only
    waits, for `QUIET` seconds, or lasts for `LONGEST`, ends with the process.
    """
    before, hook = signal.signal(signal.SIGALRM, _Patience()), sys.unraisablehook
    sys.unraisablehook = lambda _what: None  # Python 3.13 tells that, instead of raising
    signal.setitimer(signal.ITIMER_REAL, 1, 0.2)
    try:
        with contextlib.suppress(_Enough):
            threading._shutdown()  # type: ignore[attr-defined]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)


class _Enough(BaseException):
    """The threads that are left do nothing."""


class _Patience:
    """A handler that raises `_Enough` once the process has been idle, or lasted, for too long."""

    def __init__(self) -> None:
        self._begun = self._looked = self._busy = time.monotonic()
        self._spent = time.process_time()
        self._told = False

    def __call__(self, *_signal: object) -> None:
        if not self._told and (threads := _still_running()):
            self._told = True
            print(f"nbtrain: the function has returned; waiting for {threads}", flush=True)
        now, spent = time.monotonic(), time.process_time()
        if spent - self._spent > BUSY * (now - self._looked):
            self._busy = now
        self._looked, self._spent = now, spent
        if now > min(self._busy + QUIET, self._begun + LONGEST):
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"nbtrain: waits no longer for {_still_running()}", flush=True)
            raise _Enough


def _still_running() -> str:
    threads = [
        t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
    ]
    if not threads:  # the last has just ended
        return ""
    return f"thread {', '.join(t.name for t in threads)} (make it a daemon if it need not end)"


def _leave_multiprocessing() -> None:
    """End the rank's own helper processes, as `multiprocessing` does at exit."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]


def _flush_files() -> None:
    """Write out what the rank's own open files hold; the kernel's are frozen, and not listed."""
    sys.stdout.flush()
    sys.stderr.flush()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # type(o), not isinstance: that asks the object, and a proxy may answer with an exception.
    for file in [o for o in gc.get_objects() if issubclass(type(o), kinds)]:
        with contextlib.suppress(Exception):  # closed, detached, over a user's own raw stream
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe's reader may be deaf
                file.flush()


def _stop_resource_tracker(inherited: int | None, patience: float = 1.0) -> None:
    """Let multiprocessing's tracker give back shared memory, if this rank started one of its own.

    It does so when its pipe is closed everywhere; a child that holds it is not waited for.
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
