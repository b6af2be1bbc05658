"""The meeting point of the ranks: a store that the launcher keeps, on a loopback port of its own.

The port is bound before the ranks are forked and never let go, so nobody can take it in between;
it listens on the loopback interface only. The store itself is made after the fork: a forked child
must not inherit its thread's bookkeeping.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from ..errors import LaunchError

_PATIENCE = timedelta(seconds=5)
"""For the launcher's own connection to its store, to which it says nothing more."""

_LIMIT = "Raise the limit of open files (ulimit -n), or close some."


def bind(port: int | None, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket, on the loopback interface unless told otherwise.

    Raises `LaunchError` for a port that is taken.
    """
    try:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"no socket could be opened ({error.strerror}). {_LIMIT}") from error
    try:
        if port is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or 0))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} cannot be used on this host ({error.strerror}). "
            "Leave use_port out: nbtrain then takes a free one."
        ) from None
    return listener


def serve(listener: socket.socket) -> Any:
    """Serve the store on `listener`, which it takes over, until the returned object is dropped.

    Raises `LaunchError` where it cannot: it takes a few descriptors.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            # libuv would leave a pair of descriptors in the kernel for good.
            use_libuv=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise LaunchError(f"the ranks' store could not be served: {why} {_LIMIT}") from error
