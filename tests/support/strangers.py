"""Others on this host, who connect to a port that is not for them."""

from __future__ import annotations

import contextlib
import socket
import threading

HALF_A_MESSAGE = b"\x00\x01\x02\x03\x04\x05\x06"
"""The beginning of a message to torch's store, which waits for the rest."""


class Strangers:
    """Connect to a port again and again, send something, and keep the connections open."""

    def __init__(self, port: int, data: bytes, most: int = 20) -> None:
        self.connections: list[socket.socket] = []
        self._port, self._data, self._most = port, data, most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._connect)
        self._thread.start()

    def _connect(self) -> None:
        while not self._over.wait(0.005) and len(self.connections) < self._most:
            with contextlib.suppress(OSError):
                # From a port of its own: else a socket may connect to itself, and take the port.
                here = ("127.0.0.1", 0)
                connection = socket.create_connection(("127.0.0.1", self._port), 1, here)
                self.connections.append(connection)
                connection.setblocking(False)
                connection.send(self._data)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()
