"""Serves torch's store, where the ranks meet, from a separate process on a loopback port.

The port is bound before the ranks are started and never let go, so nobody can take it in between;
it listens on the loopback interface only. Still every process of this host can connect to it, and
torch's store asks nobody who they are. So it is not served in the kernel: there, a connection that
sent half a message and fell silent held the launch and the interrupt (30 s), and a value of 1.5 GB
was the kernel's memory. In its own process it is killed when the run ends, its memory is limited,
and libuv reads from many at once (in the kernel, that would leave a pair of descriptors for good).
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
from .process import kernel_detach
from .process.fork_server import ForkServer
from .process.forking import fork_process, ready_to_fork

_PATIENCE = timedelta(seconds=5)
"""For the store's own connection to itself, which nobody uses."""

_MEMORY = 1 << 30
"""Bytes of addresses that the store may have more than the process that it was forked from."""

_LIMIT = "Raise the limit of open files (ulimit -n), or close some."
_LIMIT_OF_PROCESSES = "Raise the limit of processes (ulimit -u), or free memory."


def bind(port: int | None, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket, on the loopback interface by default.

    Raises `LaunchError` for a port that is taken.
    """
    try:
        listener = socket.create_server((host, port or 0), backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if not port:
            raise LaunchError(f"no socket could be opened ({reason}). {_LIMIT}") from error
        raise LaunchError(
            f"port {port} cannot be used on this host ({reason}). "
            "Leave use_port out: nbtrain then takes a free one."
        ) from error
    LOGGER.info("listening on %s:%d", *listener.getsockname()[:2])
    return listener


class StoreProcess:
    """A process that serves the store on a listening socket, which it takes over, until `close`.

    It is forked from this process, or from a `server` that has imported torch; where nothing
    `forks`, this process serves it. Raises `LaunchError` where it cannot be started, and the
    server's own error. Ranks may connect at once: the socket listens.
    """

    def __init__(
        self, listener: socket.socket, server: ForkServer | None = None, *, forks: bool = True
    ) -> None:
        self.pid: int | None = None
        self._served: Any = None
        self._trouble = -1
        # On other systems, a forked process may not call into system libraries.
        if not forks or sys.platform != "linux":
            self._served = serve(listener)
            return
        writer = -1
        try:
            with listener, ready_to_fork():
                self._trouble, writer = os.pipe()
                if server is None:
                    self.pid = fork_process(partial(_be_store, listener, os.getpid(), writer))
                else:
                    order = {"parent": os.getpid(), "is_store": True}
                    with server.fork([order], [listener.fileno(), writer]) as (self.pid,):
                        pass
            LOGGER.info("process %d serves the store", self.pid)
        except OSError as error:
            self.close()
            limit = _LIMIT if error.errno in OUT_OF_DESCRIPTORS else _LIMIT_OF_PROCESSES
            reason = f"no process could be forked to serve the ranks' store ({error.strerror})"
            raise LaunchError(f"{reason}. {limit}") from error
        except BaseException:  # an interrupt: nobody would have it to close it
            self.close()
            raise
        finally:
            if writer >= 0:
                os.close(writer)

    def trouble(self) -> str:
        """Return why the process has ended by itself; "" while it serves. It never blocks."""
        if self.pid is None or not self._has_ended():
            return ""
        with open(os.dup(self._trouble), "rb") as file:
            reason = file.read().decode("utf-8", "replace").rstrip(".") or "it was killed"
        return f"the store in which the ranks meet has ended: {reason}"

    def _has_ended(self) -> bool:
        assert self.pid is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped elsewhere: SIGCHLD is ignored
            return process_identity(self.pid) is None

    def close(self) -> None:
        """End the process, and give its port back. May be repeated."""
        self._served = None
        descriptor, self._trouble = self._trouble, -1
        if descriptor >= 0:
            os.close(descriptor)
        pid, self.pid = self.pid, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _be_store(listener: socket.socket, parent: int, trouble: int) -> int:
    kernel_detach.leave_all_but(listener.fileno(), parent)
    return be_store(listener, trouble)


def be_store(listener: socket.socket, trouble: int) -> int:
    """Serve the store until this process is killed; write why it could not to `trouble`."""
    try:
        _limit_memory()
        store = serve(listener)
        while store is not None:
            signal.pause()
    except Exception as error:  # whatever torch raises: nobody else can report it
        os.write(trouble, str(error).encode()[:500])
    return 1


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]  # of each of the store's threads
    most = size + _MEMORY + (0 if stack == resource.RLIM_INFINITY else 4 * stack)
    with contextlib.suppress(ValueError, OSError):  # less is allowed already
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(listener: socket.socket) -> Any:
    """Serve the store in this process, until the returned object is dropped.

    It takes `listener` over. Raises `LaunchError` where it cannot: it takes a few descriptors.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    # torch connects to it itself; with IPv6 switched off, not even to "::", on which it may listen.
    host = {"::": "localhost", "0.0.0.0": "127.0.0.1"}.get(host, host)
    store = partial(
        TCPStore,
        host,
        port,
        is_master=True,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        try:
            return store(use_libuv=True)
        except RuntimeError as error:
            if "listen fd" not in str(error):  # below torch 2.7, libuv opens its own socket only
                raise
            return store(use_libuv=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        limit = _LIMIT_OF_PROCESSES if os.strerror(errno.EAGAIN) in reason else _LIMIT
        raise LaunchError(f"the ranks' store could not be served: {reason}. {limit}") from error
