"""Serves torch's store, through which the ranks connect, from a process on a loopback port.

The port is bound before the ranks start and stays bound, so that no other process can take it. It
listens on the loopback interface only, but every process of this host can connect, and torch's
store authenticates no client. So it is not served in the kernel. There, a client that sent half a
message blocked the launch and the interrupt for 30 s, and a value of 1.5 GB took the kernel's
memory. The store's own process is killed when the run ends, its memory is limited, and libuv reads
from many clients at once (in the kernel, libuv would leak two descriptors).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
from datetime import timedelta
from functools import partial
from typing import Any

from ..errors import LaunchError
from ..system.files import OUT_OF_DESCRIPTORS
from ..system.processes import process_identity
from ..tracking.launch_log import LOGGER
from ..transport.limits import CONNECT_TIMEOUT_S
from . import limits
from .process import kernel_detach
from .process.fork_server import ForkServer
from .process.forking import fork_process, ready_to_fork

_RAISE_FILE_LIMIT = "Raise the limit of open files (ulimit -n), or close some."
_RAISE_PROCESS_LIMIT = "Raise the limit of processes (ulimit -u), or free memory."


def bind(port: int | None, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket, on the loopback interface by default.

    Port None or 0 means a free one. Raises `LaunchError` if the port is in use or not allowed, or
    if no socket can be opened.
    """
    try:
        listener = socket.create_server((host, port or 0), backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if not port:
            raise LaunchError(
                f"no socket could be opened ({reason}). {_RAISE_FILE_LIMIT}"
            ) from error
        raise LaunchError(
            f"port {port} cannot be used on this host ({reason}). "
            "Leave use_port out: nbtrain then takes a free one."
        ) from error
    LOGGER.info("listening on %s:%d", *listener.getsockname()[:2])
    return listener


class StoreProcess:
    """A process that serves the store on a listening socket, which it owns, until `close`.

    The process is forked from this one, or from a `server` that has imported torch. Without
    `forks`, and on other systems than Linux, this process serves the store. Raises `LaunchError` if
    that fails, or the server's error. Ranks may connect at once, because the socket listens
    already.
    """

    def __init__(
        self, listener: socket.socket, server: ForkServer | None = None, *, forks: bool = True
    ) -> None:
        self.pid: int | None = None
        self._served: Any = None
        self._trouble = -1
        # On other systems, forked processes must not call system libraries.
        if not forks or sys.platform != "linux":
            self._served = serve(listener)
            return
        writer = -1
        try:
            with listener, ready_to_fork():
                self._trouble, writer = os.pipe()
                if server is None:
                    self.pid = fork_process(
                        partial(_run_forked_store, listener, os.getpid(), writer)
                    )
                else:
                    order = {"parent": os.getpid(), "is_store": True}
                    with server.fork([order], [listener.fileno(), writer]) as (self.pid,):
                        pass
            LOGGER.info("process %d serves the store", self.pid)
        except OSError as error:
            self.close()
            limit = _RAISE_FILE_LIMIT if error.errno in OUT_OF_DESCRIPTORS else _RAISE_PROCESS_LIMIT
            reason = f"no process could be forked to serve the ranks' store ({error.strerror})"
            raise LaunchError(f"{reason}. {limit}") from error
        except BaseException:  # an interrupt: the caller never gets it, so close it here
            self.close()
            raise
        finally:
            if writer >= 0:
                os.close(writer)

    def trouble(self) -> str:
        """Return why the process has ended, or "" while it serves. Never blocks.

        The reason is read from a pipe, so only the first call after the end returns it; later ones
        return that the process was killed. Always "" if this process serves the store.
        """
        if self.pid is None or not self._has_ended():
            return ""
        with open(os.dup(self._trouble), "rb") as file:
            reason = file.read().decode("utf-8", "replace").rstrip(".") or "it was killed"
        return f"the store in which the ranks meet has ended: {reason}"

    def _has_ended(self) -> bool:
        """Whether the store's process has ended, also where it was reaped elsewhere."""
        assert self.pid is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped elsewhere, or SIGCHLD is ignored
            return process_identity(self.pid) is None

    def close(self) -> None:
        """End the process, which frees the port. May be repeated."""
        self._served = None
        descriptor, self._trouble = self._trouble, -1
        if descriptor >= 0:
            os.close(descriptor)
        pid, self.pid = self.pid, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _run_forked_store(listener: socket.socket, parent: int, trouble: int) -> int:
    kernel_detach.detach_except(listener.fileno(), parent)
    return run_store(listener, trouble)


def run_store(listener: socket.socket, trouble: int) -> int:
    """Limit this process's memory, and serve the store until it is killed; return 1 on failure.

    The error, also one of torch, is then written to the descriptor `trouble`, 500 bytes of it.
    """
    try:
        _limit_memory()
        store = serve(listener)
        while store is not None:
            signal.pause()
    except Exception as error:  # torch may raise anything
        os.write(trouble, str(error).encode()[:500])
    return 1


def _limit_memory() -> None:
    """Limit this process's address space, because a stranger's message may claim any size."""
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]  # of each thread of the store
    most = (
        size + limits.MAX_STORE_GROWTH_BYTES + (0 if stack == resource.RLIM_INFINITY else 4 * stack)
    )
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(listener: socket.socket) -> Any:
    """Serve the store in this process until the returned object is deleted.

    The store owns `listener` then. Raises `LaunchError`, for example without file descriptors.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    # torch connects to its own store. Without IPv6 it cannot connect to "::", although it can
    # listen.
    host = {"::": "localhost", "0.0.0.0": "127.0.0.1"}.get(host, host)
    store = partial(
        TCPStore,
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        try:
            return store(use_libuv=True)
        except RuntimeError as error:
            if "listen fd" not in str(error):  # torch 2.7: libuv only opens sockets of its own
                raise
            return store(use_libuv=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        limit = _RAISE_PROCESS_LIMIT if os.strerror(errno.EAGAIN) in reason else _RAISE_FILE_LIMIT
        raise LaunchError(f"the ranks' store could not be served: {reason}. {limit}") from error
