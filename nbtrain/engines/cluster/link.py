"""The launcher's end of the socket to the process that speaks with Ray (`driver`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ...errors import LaunchError

_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]  # no json.py of the notebook's folder
import json
order = json.loads(sys.argv.pop())
sys.path[:] = order["path"]
from nbtrain.engines.cluster.driver import main
main(order)
"""


class Link:
    """Starts the driver. It ends when this end of the socket, and all copies of it, are closed."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        order = {"path": [p for p in sys.path if p], "socket": theirs.fileno()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the kernel is not for it
            )
        except BaseException as error:  # an interrupt: its traceback would keep the socket open
            ours.close()
            self._said.close()
            if isinstance(error, OSError):
                why = f"no process could be started ({error.strerror})"
                raise LaunchError(why) from error
            raise
        finally:
            theirs.close()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._waiting: deque[tuple[str, Any]] = deque()
        self._owed = 0  # answers that have not come: each request has one, in their order

    def request(self, kind: str, **payload: Any) -> Any:
        """Have something done and return the answer. Raises `LaunchError` for a refusal."""
        self.send(kind, **payload)
        return self.answer()

    def hand_over(self, descriptor: int) -> None:
        """Give the driver a file. Raises `LaunchError`."""
        try:
            self._connection.send(("parcel", {}))
            self._owed += 1
            reduction.send_handle(self._connection, descriptor, self._process.pid)
        except OSError as error:
            raise self._is_gone() from error
        self.answer()

    def send(self, kind: str, **payload: Any) -> None:
        """Say something. Raises `LaunchError` if nobody listens."""
        try:
            self._connection.send((kind, payload))
            self._owed += 1
        except OSError as error:
            raise self._is_gone() from error

    def answer(
        self, patience: float | None = None, heard: Callable[[str, Any], None] | None = None
    ) -> Any:
        """Return the answer to the last request. Raises `LaunchError` for a refusal.

        Or if nothing at all was told for `patience` seconds. What is told meanwhile is `heard`,
        else kept for `messages`.
        """
        while True:
            try:
                if not self._connection.poll(patience):
                    raise LaunchError("the process that speaks with Ray does not answer")
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._is_gone() from error
            if kind not in ("answer", "refusal"):
                (heard or self._keep)(kind, value)
                continue
            self._owed -= 1
            if self._owed:  # of something that was said before
                continue
            if kind == "refusal":
                raise LaunchError(value)
            return value

    def _keep(self, kind: str, value: Any) -> None:
        self._waiting.append((kind, value))

    def messages(self, patience: float) -> list[tuple[str, Any]]:
        """Return what was told, answers too; wait for it up to `patience` s.

        Raises `LaunchError`.
        """
        found = list(self._waiting)
        self._waiting.clear()
        try:
            while self._connection.poll(0 if found else patience):
                found.append(self._connection.recv())
                self._owed -= found[-1][0] in ("answer", "refusal")
        except (EOFError, OSError) as error:
            if not found:  # else the next time: what it told last counts
                raise self._is_gone() from error
        return found

    @property
    def owes(self) -> bool:
        """Whether an answer has not come."""
        return self._owed > 0

    def _is_gone(self) -> LaunchError:
        said = b""
        with contextlib.suppress(OSError, ValueError):
            said = os.pread(self._said.fileno(), 1 << 16, 0)
        last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word of why"]
        return LaunchError(f"the process that speaks with Ray has ended ({last[0][:300]})")

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
        self._said.close()

    def reap(self) -> None:
        """Wait for the driver's end, so that it leaves no zombie: one serves a run to its end."""
        with contextlib.suppress(ChildProcessError):
            self._process.wait()
