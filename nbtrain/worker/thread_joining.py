"""Waits for the threads that outlive the training function, before the rank leaves its group.

An ordinary interpreter joins threads and executors first, and frees the process group after them.
A rank that left the group first took it from a thread that still saved a checkpoint, as
`torch.distributed.checkpoint.async_save` does: the run succeeded, and there was no checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Collection

from ..system.lost_threads import notebook_threads
from . import limits


def join_new_threads(before: Collection[threading.Thread]) -> None:
    """Wait for the threads that a function has started in the kernel, while the process is busy.

    Daemons and idle threads of pools are not waited for. Gives up once the process was idle for
    `limits.KERNEL_THREAD_IDLE_LIMIT_S`, and after `limits.THREAD_IDLE_LIMIT_S` in all.
    """
    begun = busy = time.monotonic()
    spent = time.process_time()
    while time.monotonic() < min(
        busy + limits.KERNEL_THREAD_IDLE_LIMIT_S, begun + limits.THREAD_IDLE_LIMIT_S
    ):
        new = [t for t in notebook_threads() if not (t.daemon or t in before)]
        if not new:
            return
        new[0].join(0.1)
        if time.process_time() - spent > limits.BUSY_CPU_SHARE * 0.1:
            busy, spent = time.monotonic(), time.process_time()


def join_threads() -> None:
    """End idle pools, and wait for threads that are no daemons while the process is busy.

    Prints which threads it waits for. Gives up once the process was idle for
    `limits.THREAD_IDLE_LIMIT_S`; the threads that are left end with the process. An interpreter
    would wait without an end. Needs the main thread. Only the first call waits.
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
    """Raises `_ThreadsAreIdle`, as a handler, once the process has been idle for too long."""

    def __init__(self) -> None:
        self._checked = self._busy = time.monotonic()
        self._spent = time.process_time()
        self._has_reported = False

    def __call__(self, *_signal: object) -> None:
        if not self._has_reported and (threads := _still_running()):
            self._has_reported = True
            print(f"nbtrain: the function has returned; waiting for {threads}", flush=True)
        now, spent = time.monotonic(), time.process_time()
        if spent - self._spent > limits.BUSY_CPU_SHARE * (now - self._checked):
            self._busy = now
        self._checked, self._spent = now, spent
        if now > self._busy + limits.THREAD_IDLE_LIMIT_S:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"nbtrain: no longer waiting for {_still_running()}", flush=True)
            raise _ThreadsAreIdle


def _still_running() -> str:
    others = set(threading.enumerate()) - {threading.main_thread()}
    names = ", ".join(thread.name for thread in others if not thread.daemon)
    return f"thread {names} (if it need not end, make it a daemon thread)" if names else ""
