"""How a forked child stops being the notebook's kernel and becomes a rank.

The child is a copy of the kernel: it holds the kernel's sockets, streams, widgets, event loop and
exit handlers, and Jupyter's signals reach it. Each step below takes one of them away. Everything
of IPython and ipykernel that is touched is private or half so; the versions seen are ipykernel
6.17 to 7.4 and IPython 7.34 to 9.18, and every access tolerates its absence.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import getpass
import io
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from .. import gate, guard
from .streams import text_stream

_PR_SET_PDEATHSIG = 1
_keep: list[object] = []
"""Objects of the kernel whose finalizers must not run here: zmq sockets, old streams."""

_NO_INPUT = (
    "nobody can answer a rank: ask in a cell of its own, and hand the answer to the function; "
    "a debugger works with --engine inline"
)


def become_rank(log: Path, parent: int) -> int | None:
    """Detach this forked process from the kernel; its output goes to `log` from now on.

    Returns the process of the kernel's resource tracker, which is not this rank's to stop.
    """
    _become_a_process_of_its_own(log)
    die_with(parent)
    guard.restore_checks()
    gate.close()
    return _forget_kernel()


def become_keeper(log: Path) -> None:
    """Detach this forked process from the kernel, to watch a run that goes on behind the cell."""
    _become_a_process_of_its_own(log)
    _forget_kernel()


def _become_a_process_of_its_own(log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setsid()
    _redirect_streams(log)


def _forget_kernel() -> int | None:
    _close_sockets()
    atexit._clear()
    tracker = _forget_children()
    _silence_ipython()
    _forget_event_loop()
    return tracker


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent, or the thread that forked it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def _redirect_streams(log: Path) -> None:
    """Point descriptors 0, 1 and 2, Python's streams and logging's at the rank's own file."""
    null = os.open(os.devnull, os.O_RDWR)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    old = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, sys.stdin)
    for stream in old[:2]:  # ipykernel's copy of its own: who reads that would wait for our end
        copy = getattr(stream, "_original_stdstream_copy", None)
        if type(copy) is int:
            os.dup2(file, copy, inheritable=False)
    os.close(null)
    os.close(file)
    _keep.extend(old)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[misc]
    _lead(old[0], sys.stdout)
    _lead(old[1], sys.stderr)
    sys.displayhook = sys.__displayhook__
    sys.excepthook = sys.__excepthook__
    for handler in _stream_handlers():
        if handler.stream in old[:4]:
            handler.stream = sys.stderr if handler.stream in (old[1], old[3]) else sys.stdout
    # A crash in native code leaves the Python stack of the moment in the log.
    faulthandler.enable(file=2)


def _lead(old: Any, new: io.TextIOWrapper) -> None:
    """Make a stream that somebody kept (a logger's sink, ``out = sys.stdout``) write to the log."""
    with contextlib.suppress(AttributeError):  # a plain file: its descriptor leads there already
        old.write, old.writelines, old.flush = new.write, new.writelines, new.flush


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in loggers for h in getattr(logger, "handlers", ())]
    return [h for h in handlers if isinstance(h, logging.StreamHandler)]


def _close_sockets() -> None:
    """Let go of the kernel's connections, pollers and wake-ups.

    A rank that kept them would hold the kernel's ports after its death. Their numbers are pointed
    at /dev/null, not freed: code of the kernel that still writes to one must not hit a file the
    user opened later. Unnamed socket pairs stay: `multiprocessing.Pipe` is made of them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            descriptor = int(entry)
            if descriptor > 2 and _belongs_to_the_kernel(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _belongs_to_the_kernel(descriptor: int) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]"):
            return True
        if not target.startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            unnamed_pair = copy.family == socket.AF_UNIX and not copy.getsockname()
            return not unnamed_pair
    except OSError:
        return False


def _forget_children() -> int | None:
    """Drop the parent's multiprocessing bookkeeping, as `multiprocessing` does in its children."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker: int | None = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import process, util

        process._children = set()  # type: ignore[attr-defined]
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
    return tracker


def _forget_event_loop() -> None:
    """Make `asyncio.run` work: the kernel's loop is running in the parent, not here."""
    asyncio._set_running_loop(None)
    with contextlib.suppress(Exception):  # a policy of the host's own may refuse
        asyncio.set_event_loop(None)


def _silence_ipython() -> None:
    """Turn display into text and stop every message to the front end."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    shell.display_pub.publish = _print_text
    shell.display_pub.clear_output = lambda *_args, **_kwargs: None
    history = getattr(shell, "history_manager", None)
    if history is not None:
        _keep.append(getattr(history, "save_thread", None))
        history.enabled = False
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        # Every message of the kernel, comms and widgets included, leaves through its session.
        kernel.session.send = lambda *_args, **_kwargs: None
        _refuse_input(kernel)


def _refuse_input(kernel: Any) -> None:
    """Have input(), getpass() and debuggers say that nobody answers, instead of waiting for ever.

    ipykernel puts its own `raw_input` and `getpass` in their place, cell by cell.
    """
    from IPython.core.error import StdinNotImplementedError

    def refuse(*_args: Any, **_kwargs: Any) -> str:
        raise StdinNotImplementedError(_NO_INPUT)

    kernel._allow_stdin = False  # for what asks in a way of its own
    kernel.raw_input = kernel.getpass = builtins.input = getpass.getpass = refuse


def _print_text(data: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Print the text form of what is displayed; there is nobody to show more to."""
    text = data.get("text/plain") if isinstance(data, dict) else None
    if text:
        print(text)
