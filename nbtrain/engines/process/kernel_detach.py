"""Turns a forked child of the notebook's kernel into a rank.

The child is a copy of the kernel: it has the kernel's sockets, streams, widgets, event loop and
exit handlers, and it gets Jupyter's signals. Each step below removes one of these. Most of the
names of IPython and ipykernel that are used are private. They were seen in ipykernel 6.17 to 7.4
and IPython 7.34 to 9.18, and a missing name is tolerated.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import errno
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

from ...system import accelerator_guard, accelerator_hooks
from ...system.instrumentation import replace
from ...system.processes import Prctl, prctl

_keep: list[object] = []
"""Objects of the kernel whose finalizers must not run here: zmq sockets, old streams."""

_IGNORED_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
"""Errors of a file system, which must not reach the code that prints."""

_NO_INPUT = (
    "a rank cannot read what you type. Ask in a separate cell and pass the answer to the "
    "function. breakpoint() and pdb.post_mortem() open a debugger in the notebook"
)


def become_rank(log: Path, parent: int) -> int | None:
    """Detach this forked process from the kernel (`leave_kernel`); it exits with the kernel.

    Returns the pid of the kernel's resource tracker, which this process must not stop; None without
    one.
    """
    exit_with_parent(parent)
    tracker = leave_kernel(log)
    accelerator_guard.remove_nvml_check()
    accelerator_hooks.close()
    return tracker


def leave_kernel(log: Path) -> int | None:
    """Detach this forked process from the kernel, and write its output to `log` from now on.

    It leads a session of its own, ignores SIGINT, and drops the kernel's exit functions and
    connections. Returns the pid of the kernel's resource tracker, which this process must not stop;
    None without one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setsid()
    _redirect_streams(log)
    _close_sockets()
    atexit._clear()
    tracker = _forget_children()
    _silence_ipython()
    asyncio._set_running_loop(None)  # the loop runs in the parent
    with contextlib.suppress(Exception):  # a policy of the user may raise
        asyncio.set_event_loop(None)
    return tracker


def exit_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent, or the thread that forked it, exits.

    Ends the process at once, with code 1, if its parent is not the process `parent`.
    """
    if sys.platform == "linux":
        prctl(Prctl.SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before the call
        os._exit(1)


def _redirect_streams(log: Path) -> None:
    """Redirect output to the rank's log, and input to /dev/null: descriptors, Python, logging."""
    null = os.open(os.devnull, os.O_RDWR)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    old = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, sys.stdin)
    for stream in old[:2]:  # ipykernel's copy: its reader would wait for this process
        copy = getattr(stream, "_original_stdstream_copy", None)
        if type(copy) is int:
            os.dup2(file, copy, inheritable=False)
    os.close(null)
    os.close(file)
    _keep.extend(old)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[misc]
    _redirect_stream(old[0], sys.stdout)
    _redirect_stream(old[1], sys.stderr)
    sys.displayhook = sys.__displayhook__
    sys.excepthook = sys.__excepthook__
    for ref in logging._handlerList:  # type: ignore[attr-defined]  # of all handlers
        handler = ref()
        if isinstance(handler, logging.StreamHandler) and handler.stream in old[:4]:
            handler.stream = sys.stderr if handler.stream in (old[1], old[3]) else sys.stdout
    # A crash in native code writes the Python stack to the log.
    faulthandler.enable(file=2)


def _redirect_stream(old: Any, new: io.TextIOWrapper) -> None:
    """Make a stream that other code refers to (``out = sys.stdout``, a logger) write to the log."""
    with contextlib.suppress(AttributeError):  # a plain file: its descriptor is redirected
        old.write, old.writelines, old.flush = new.write, new.writelines, new.flush


class _Log(io.FileIO):
    """A rank's log. Text that does not fit on a full disk is lost, so that `print` never raises."""

    def write(self, data: Any, /) -> int:
        """Write to the rank's log, and ignore the errors of a full disk."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _IGNORED_ERRORS:  # for example of a pipe that the user opened
                raise
            return memoryview(data).nbytes


def text_stream(descriptor: int) -> io.TextIOWrapper:
    """Return a line-buffered stream that never closes its descriptor."""
    log = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(log, "utf-8", "backslashreplace", line_buffering=True)


def detach_except(descriptor: int, parent: int) -> None:
    """Detach a forked process that runs none of the notebook's code from the kernel.

    It keeps only `descriptor` of the kernel's sockets, prints nothing, and exits with the kernel.
    """
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setsid()
    _keep.extend((sys.stdout, sys.stderr))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    _close_sockets(descriptor)


def _close_sockets(kept: int = -1) -> None:
    """Close the sockets, pollers and wake-ups of the parent, except the descriptor `kept`.

    Closes the user's network connections, too. The descriptors are redirected to /dev/null and not
    freed: code that still writes to one must not write into a file that the user opened later.
    Unnamed socket pairs stay open, because `multiprocessing.Pipe` uses them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            descriptor = int(entry)
            if descriptor not in (0, 1, 2, kept) and _is_socket_or_event_queue(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_socket_or_event_queue(descriptor: int) -> bool:
    """Whether a descriptor is an event queue or a socket, except an unnamed Unix socket.

    The user's sockets count, too: they look the same as the kernel's. False without /proc.
    """
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
    """Delete multiprocessing's records of the parent's children, as its own children do.

    Returns the pid of the parent's resource tracker, if it has one; that record is kept.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker: int | None = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import process, util

        process._children = set()  # type: ignore[attr-defined]
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
    return tracker


def _silence_ipython() -> None:
    """Print displays as text, send no messages to the front end, refuse input, keep no history.

    Does nothing outside IPython.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    replace(shell.display_pub, "publish", _print_text)
    replace(shell.display_pub, "clear_output", lambda *_args, **_kwargs: None)
    history = getattr(shell, "history_manager", None)
    if history is not None:
        _keep.append(getattr(history, "save_thread", None))
        history.enabled = False
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        # Every message of the kernel, including those of comms and widgets, goes through its
        # session.
        replace(kernel.session, "send", lambda *_args, **_kwargs: None)
        _refuse_input(kernel)


def _refuse_input(kernel: Any) -> None:
    """Make input(), getpass() and debuggers raise an error instead of waiting forever.

    ipykernel replaces them in each cell by its own `raw_input` and `getpass`.
    """
    from IPython.core.error import StdinNotImplementedError

    def refuse(*_args: Any, **_kwargs: Any) -> str:
        raise StdinNotImplementedError(_NO_INPUT)

    replace(kernel, "_allow_stdin", False)  # for other ways to read input
    for owner, name in ((kernel, "raw_input"), (builtins, "input")):
        replace(owner, name, refuse)
    for owner in (kernel, getpass):
        replace(owner, "getpass", refuse)


def _print_text(data: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Print the text form of a display, because a log can show only text."""
    text = data.get("text/plain") if isinstance(data, dict) else None
    if text:
        print(text)
