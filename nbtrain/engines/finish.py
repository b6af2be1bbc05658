"""How the process of a rank ends: what an ordinary interpreter does, short of freeing memory."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial


def finish_process(inherited_tracker: int | None = None) -> None:
    """Do what an ordinary interpreter does at its end, short of freeing memory.

    `inherited_tracker` is a resource tracker's process that is the launcher's, not this rank's.
    """
    steps: tuple[Callable[[], object], ...] = (
        threading._shutdown,  # type: ignore[attr-defined]  # ends idle pools, joins non-daemons
        atexit._run_exitfuncs,
        _leave_multiprocessing,
        partial(_stop_resource_tracker, inherited_tracker),
        _flush_files,
    )
    for step in steps:
        try:
            step()
        except BaseException:  # each is owed its turn, whatever the one before met
            traceback.print_exc()


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
