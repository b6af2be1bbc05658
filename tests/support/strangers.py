"""Others on this host, who connect to a port that is not for them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable

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


KINDS = {
    "nothing": b"",
    "seven bytes": HALF_A_MESSAGE,
    "half an HTTP request": b"POST /api/jobs/ HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{",
    # The preface of HTTP/2, whole settings, and the head of a frame of 16 KB that never comes.
    "half a gRPC call": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
    b"\0\x40\0\x01\x04\0\0\0\x01",
    "64 MB of junk": b"",
}
"""What a stranger sends before falling silent."""

JUNK = 64 << 20


class Crowd:
    """A process of its own that opens a connection of each of `KINDS` to ports, and stays."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.counts: dict[tuple[str, int], int] = {}
        """The connections that each place accepted."""

    def visit(self, places: Iterable[tuple[str, int]]) -> None:
        """Connect to the places that were not visited yet; return once it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for host, port in places:
            if (host, port) not in self.counts:
                self._process.stdin.write(f"{host} {port}\n")
                self._process.stdin.flush()
                self.counts[host, port] = int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return where the processes listen on TCP; any interface is 127.0.0.1."""
    import psutil

    places = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            places |= {
                (
                    "127.0.0.1" if entry.laddr.ip in ("0.0.0.0", "::") else entry.laddr.ip,
                    entry.laddr.port,
                )
                for entry in psutil.Process(pid).net_connections("tcp")
                if entry.status == psutil.CONN_LISTEN
            }
    return places


def _send_junk(connection: socket.socket) -> None:
    block = os.urandom(1 << 16)
    with contextlib.suppress(OSError):
        connection.settimeout(5)
        for _ in range(JUNK // len(block)):
            connection.sendall(block)


def main() -> None:
    """Connect to each ``HOST PORT`` on standard input, and answer how many were accepted."""
    connections = []
    for line in sys.stdin:
        host, port = line.split()
        accepted = 0
        for kind, data in KINDS.items():
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(port)), 2, (host, 0))
                connections.append(connection)
                accepted += 1
                connection.settimeout(1)
                connection.sendall(data)
                if kind == "64 MB of junk":
                    threading.Thread(target=_send_junk, args=(connection,), daemon=True).start()
        print(accepted, flush=True)


if __name__ == "__main__":
    main()
