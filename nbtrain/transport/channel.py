"""Messages between the notebook and a live rank: a line of JSON, and a file in memory beside it.

They go through a socket of this host in a private folder, by whose permissions nobody else gets in.
Data goes as an open file, not through the socket: a tensor of a gigabyte is mapped where it
arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

_HEAD = struct.Struct("!I")
HELLO = 5.0
"""Seconds that whoever connects has for its first message."""

_LONGEST = 16 << 20
"""Bytes of a message without its data."""


class Channel:
    """One end of a connection. Sending is safe from several threads, receiving from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to poll: readable where a message waits, or the end."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], data: int | None = None) -> None:
        """Send a message, and a descriptor with it. Raises `OSError` where nobody listens."""
        text = json.dumps(message).encode()
        descriptors = [] if data is None else [data]
        with self._sending:
            sent = socket.send_fds(self._connection, [_HEAD.pack(len(text)) + text], descriptors)
            self._connection.sendall((_HEAD.pack(len(text)) + text)[sent:])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Return the next message, and the descriptor that came with it, which is the caller's.

        Raises `EOFError` where the other end is closed, or says what no message is.
        """
        head, descriptors = self._receive(_HEAD.size, with_data=True)
        (size,) = _HEAD.unpack(head)
        if size > _LONGEST:
            raise EOFError(f"a message of {size} bytes")
        message = json.loads(self._receive(size)[0])
        return message, descriptors[0] if descriptors else None

    def _receive(self, size: int, *, with_data: bool = False) -> tuple[bytes, list[int]]:
        parts, descriptors = b"", list[int]()
        while len(parts) < size:
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
        return parts, descriptors

    def wait_for_ever(self) -> None:
        """From now on, have `receive` wait as long as it takes."""
        self._connection.settimeout(None)

    def close(self) -> None:
        """Close this end. May be repeated."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Listener:
    """Waits for connections at an address in a private folder."""

    def __init__(self, folder: Path, name: str = "ranks") -> None:
        self.address = str(folder / name)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(1024)

    def accept(self, timeout: float) -> Channel | None:
        """Return a new connection; None if there is none within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(HELLO)
        return Channel(connection)

    def close(self) -> None:
        """Stop listening, and delete the address."""
        self._socket.close()
        Path(self.address).unlink(missing_ok=True)


def connect(address: str) -> Channel:
    """Connect to a `Listener`. Raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Channel(connection)


def memory_file() -> IO[bytes]:
    """Return a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("nbtrain"), "w+b")
    return tempfile.TemporaryFile()


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
