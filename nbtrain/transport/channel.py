"""Sends messages between the notebook and a rank: a line of JSON, and a file in memory.

On one host, messages go through a socket in a private folder, whose permissions keep others out,
and data as an open file: a tensor of a gigabyte is mapped where it arrives. Between hosts, messages
go through TCP, and data in the stream. A sender is not trusted until its first message is accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ..system.files import open_memory_descriptor
from ..tracking.limits import HOST_LOST_AFTER_S
from .limits import CHUNK_BYTES, CONNECT_TIMEOUT_S

Address = str | tuple[str, int]
"""The address of a `Listener`: a path, or a host and a port."""

_HEAD = struct.Struct("!IQ")  # bytes of the message, and of the data that follow in the stream

# Together 90 s, as `HOST_LOST_AFTER_S`.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
_UNSENT_TIMEOUT = {"TCP_USER_TIMEOUT": HOST_LOST_AFTER_S * 1000}
"""Only the notebook limits how long what it sends may wait: a kernel that is suspended, or busy in
C, reads nothing for as long, and a rank must not take it for lost."""


class Channel:
    """One end of a connection. Sending is safe from several threads, receiving from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._is_known = False
        self._deadline: float | None = None
        """When the first message must be complete."""
        self.passes_files = connection.family == getattr(socket, "AF_UNIX", None)
        """Whether both ends are on this host."""

    def fileno(self) -> int:
        """Return the descriptor to poll. It is readable if a message waits, or at the end."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], data: int | None = None) -> None:
        """Send a message, and a file's descriptor with it, or its content to another host.

        Blocks until all is sent. `data` stays open: the caller closes it. Raises `OSError` if the
        other end is closed.
        """
        text, sent = json.dumps(message).encode(), 0
        size = 0 if data is None or self.passes_files else os.fstat(data).st_size
        whole = _HEAD.pack(len(text), size) + text
        with self._sending:
            if self.passes_files and data is not None:
                sent = socket.send_fds(self._connection, [whole], [data])
            self._connection.sendall(whole[sent:])
            offset = 0
            while data is not None and offset < size:
                offset += os.sendfile(self._connection.fileno(), data, offset, size - offset)

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Wait for the next message; return it and the descriptor that came with it, if any.

        The caller closes the descriptor. From another host, it is of a memory file with the content
        that was sent. Raises `EOFError` if the other end is closed, the connection fails, or a
        message is not JSON, or if the first one is too large or takes longer than
        `CONNECT_TIMEOUT_S`.
        """
        self._deadline = None if self._is_known else time.monotonic() + CONNECT_TIMEOUT_S
        head, descriptors = self._receive(_HEAD.size, with_data=self.passes_files)
        size, data_size = _HEAD.unpack(head)
        if not self._is_known and (data_size or size > CHUNK_BYTES):
            raise EOFError(f"a message of {size + data_size} bytes")
        try:
            message = json.loads(self._receive(size)[0])
        except ValueError as error:
            raise EOFError(f"a message that is not JSON ({error})") from error
        if data_size:
            with memory_file() as file:
                while data_size:
                    part, _ = self._receive(min(data_size, CHUNK_BYTES))
                    data_size -= file.write(part)
                file.flush()
                descriptors = [os.dup(file.fileno())]
        return message, descriptors[0] if descriptors else None

    def _receive(self, size: int, *, with_data: bool = False) -> tuple[bytes, list[int]]:
        """Wait for exactly `size` bytes; return them, and the descriptors that came with the first.

        The list is empty without `with_data`. Raises `EOFError` at the end of the connection, after
        an error of the socket, or once the first message's deadline has passed.
        """
        parts, descriptors = bytearray(), list[int]()
        while len(parts) < size:
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise EOFError("the first message takes too long")
            try:
                if with_data and not parts:
                    part, new, _, _ = socket.recv_fds(self._connection, size, 1)
                    descriptors += new
                else:
                    part = self._connection.recv(size - len(parts))
            except OSError as error:
                raise EOFError(str(error)) from error
            if not part:
                raise EOFError("the other end is closed")
            parts += part
        return bytes(parts), descriptors

    def trust(self) -> None:
        """Trust the other end: `receive` no longer limits the time or the first message."""
        self._is_known = True
        self._connection.settimeout(None)

    def close(self) -> None:
        """Close this end. May be repeated."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Listener:
    """Waits for connections: in a private folder, or at an address of this host."""

    def __init__(self, place: Path | str, name: str = "ranks") -> None:
        self.address: Address
        if isinstance(place, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self.address = str(place / name)
            self._socket.bind(self.address)
            self._socket.listen(1024)
        else:
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            self._socket = socket.create_server((place, 0), family=family, backlog=1024)
            self.address = place, self._socket.getsockname()[1]

    def accept(self, timeout: float) -> Channel | None:
        """Wait up to `timeout` (above 0) seconds for a connection; return its channel if one came.

        The channel is not trusted yet: see `Channel.trust`. Raises `OSError` if this is closed.
        """
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(CONNECT_TIMEOUT_S)
        if connection.family != socket.AF_UNIX:
            _set_tcp_options(connection, {**_KEEPALIVE, **_UNSENT_TIMEOUT})
        return Channel(connection)

    def close(self) -> None:
        """Stop listening, and delete the socket's file. May be repeated."""
        self._socket.close()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)


def _set_tcp_options(connection: socket.socket, options: Mapping[str, int]) -> None:
    """Set TCP options; also send small messages without delay, and probe the other host if idle.

    Options that this system does not have are skipped.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: Address, *, is_trusted: bool = True) -> Channel:
    """Connect to a `Listener`; return a channel, which trusts it unless told otherwise.

    For another host, waits up to `CONNECT_TIMEOUT_S`. Raises `OSError` if it cannot connect.
    """
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
    else:
        connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
        _set_tcp_options(connection, _KEEPALIVE)
    channel = Channel(connection)
    if is_trusted:
        channel.trust()
    return channel


def memory_file() -> IO[bytes]:
    """Open a new, empty file without a name, for reading and writing.

    It is in memory if the system supports that, else on disk.
    """
    descriptor = open_memory_descriptor()
    return tempfile.TemporaryFile() if descriptor is None else open(descriptor, "w+b")


def fill_memory_file(write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """Return a new memory file that `write` has filled. The caller closes it.

    Its position is at the end. If `write` raises, the file is closed, and the exception raised.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(memory_file())
        write(file)
        file.flush()
        stack.pop_all()  # from here on, the caller closes it
    return file
