"""Sends messages between the notebook and a live rank: a line of JSON, and a file in memory.

On one host they go through a socket in a private folder, by whose permissions nobody else gets in,
and data as an open file: a tensor of a gigabyte is mapped where it arrives. Between hosts they go
through TCP, and data in the stream; whoever connects is nobody until its first message is accepted.
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

from ..system.files import memory_descriptor

Address = str | tuple[str, int]
"""Of a `Listener`: a path, or a host and a port."""

_HEAD = struct.Struct("!IQ")  # bytes of the message, and of the data that follow in the stream
HELLO = 5.0
"""Seconds that whoever connects has for its first message."""

CONNECTING = 20.0
"""Seconds that a rank on another host has to reach the notebook."""

_KEPT_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
_LOSS = {**_KEPT_ALIVE, "TCP_USER_TIMEOUT": 90_000}
"""After 90 s: Ray gives a node up after 60, and a link that is cut for half a minute is no loss. A
rank has no limit to what it sends: a kernel that is suspended, or busy in C, reads nothing for as
long, and is no loss either."""

_LONGEST = 16 << 20
"""Bytes of a message without its data."""

_LONGEST_HELLO = 1 << 16
"""The same of one whose sender is not known yet."""

_PART = 1 << 20
"""Bytes of data that are read at once."""


class Channel:
    """One end of a connection. Sending is safe from several threads, receiving from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._is_known = False
        self._deadline: float | None = None
        """When a message of an unknown sender has to be here, all of it."""
        self.passes_files = connection.family == getattr(socket, "AF_UNIX", None)
        """Whether both ends are on this host."""

    def fileno(self) -> int:
        """Return the descriptor to poll: readable where a message waits, or the end."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], data: int | None = None) -> None:
        """Send a message, and a descriptor with it. Raises `OSError` where nobody listens."""
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
        """Return the next message, and the descriptor that came with it, which is the caller's.

        Raises `EOFError` where the other end is closed, says what no message is, or is not known
        yet and takes longer than `HELLO` over it.
        """
        self._deadline = None if self._is_known else time.monotonic() + HELLO
        head, descriptors = self._receive(_HEAD.size, with_data=self.passes_files)
        size, data_size = _HEAD.unpack(head)
        longest = _LONGEST if self._is_known else _LONGEST_HELLO
        if size > longest or (data_size and not self._is_known):
            raise EOFError(f"a message of {size + data_size} bytes")
        message = json.loads(self._receive(size)[0])
        if data_size:
            descriptors = [self._received_file(data_size)]
        return message, descriptors[0] if descriptors else None

    def _received_file(self, size: int) -> int:
        with memory_file() as file:
            while size:
                part, _ = self._receive(min(size, _PART))
                size -= file.write(part)
            file.flush()
            return os.dup(file.fileno())

    def _receive(self, size: int, *, with_data: bool = False) -> tuple[bytes, list[int]]:
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
        """From now on, trust the other end, and have `receive` wait as long as it takes."""
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
        """Return a new connection; None if there is none within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(HELLO)
        if connection.family != socket.AF_UNIX:
            _set_up(connection, _LOSS)
        return Channel(connection)

    def close(self) -> None:
        """Stop listening, and delete the address."""
        self._socket.close()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)


def _set_up(connection: socket.socket, options: Mapping[str, int]) -> None:
    """Send what is small at once, and give up a host that does not answer any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: Address) -> Channel:
    """Connect to a `Listener`. Raises `OSError`."""
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
    else:
        connection = socket.create_connection(address, CONNECTING)
        _set_up(connection, _KEPT_ALIVE)
    channel = Channel(connection)
    channel.trust()
    return channel


def memory_file() -> IO[bytes]:
    """Return a file without a name, in memory where the system has such files."""
    descriptor = memory_descriptor()
    return tempfile.TemporaryFile() if descriptor is None else open(descriptor, "w+b")


def written(write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """Return a memory file that `write` has filled, to be closed by the caller."""
    file = memory_file()
    try:
        write(file)
        file.flush()
    except BaseException:  # an interrupt too: nobody else would close it
        file.close()
        raise
    return file
