"""The launcher's connection to the process that starts and follows ranks on other hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...errors import LaunchError
from ..process.interpreter import interpreter_command
from .driver import Driver

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=Driver)
Method = Callable[Concatenate[D, P], Awaitable[T]]

_ANSWERS = ("answer", "refusal")
"""The kinds of the messages that end a request."""


class DriverClient:
    """Starts the driver. It ends when this end of the socket, and all copies of it, are closed."""

    def __init__(self, driver: type[Driver]) -> None:
        self._cluster = driver.cluster
        self.environment = dict(os.environ)
        """That of this process when the driver started, which the driver has."""
        launcher_end, driver_end = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        order = {"path": [p for p in sys.path if p], "socket": driver_end.fileno()}
        try:
            self._process = subprocess.Popen(
                interpreter_command(driver.__module__, order),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[driver_end.fileno()],
                start_new_session=True,  # an interrupt of the kernel is not for it
            )
        except BaseException as error:  # an interrupt: its traceback would keep the socket open
            launcher_end.close()
            self._output.close()
            if isinstance(error, OSError):
                reason = f"no process could be started ({error.strerror})"
                raise LaunchError(reason) from error
            raise
        finally:
            driver_end.close()
        self._connection: Connection[Any, Any] = Connection(launcher_end.detach())
        self._unanswered = 0  # each request has one answer, and they come in order
        self.is_free = False
        """Whether the driver has ended a run, all of it, and does nothing else."""
        self.last_answer = ""
        """Its kind: an answer, or a refusal."""
        self.cause: object = None
        """What it was started for: only a launch with the same cause can use it again."""

    def changed_variables(self) -> dict[str, str]:
        """Return the variables of this process that are not the driver's, or have other values."""
        return {n: v for n, v in os.environ.items() if self.environment.get(n) != v}

    def request(self, method: Method[D, P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the driver; return its answer. Raises `LaunchError` for a refusal."""
        self.send(method, *args, **kwargs)
        answer: T = self.answer()
        return answer

    def send(self, method: Method[D, P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Request a call of a driver's method, without waiting for its answer.

        Raises `LaunchError` if the driver has ended.
        """
        try:
            self.is_free = False
            self._connection.send((method.__name__, args, kwargs))
            self._unanswered += 1
        except OSError as error:
            raise self._driver_error() from error

    def answer(
        self, patience: float | None = None, on_message: Callable[[str, Any], None] | None = None
    ) -> Any:
        """Wait for the answer to the last request, and return it; None without an open request.

        Answers to earlier requests are dropped, other messages go to `on_message`. Raises
        `LaunchError` for a refusal, if nothing at all comes for `patience` seconds (None: no
        limit), and if the driver has ended.
        """
        kind, answer = "answer", None
        while self._unanswered:
            messages = self.messages(patience)
            if not messages:
                raise LaunchError(f"the process that talks to {self._cluster} does not answer")
            for message in messages:
                if message[0] in _ANSWERS:  # the last of them counts
                    kind, answer = message
                elif on_message is not None:
                    on_message(*message)
        if kind == "refusal":
            raise LaunchError(str(answer))
        return answer

    def messages(self, patience: float | None) -> list[tuple[str, Any]]:
        """Return the messages that came, answers too; wait for the first up to `patience` s.

        None waits without a limit. Empty if none came. Raises `LaunchError` if the driver has
        ended.
        """
        messages: list[tuple[str, Any]] = []
        try:
            while self._connection.poll(0 if messages else patience):
                messages.append(self._connection.recv())
                if messages[-1][0] in _ANSWERS:
                    self._unanswered -= 1
                    self.last_answer = messages[-1][0]
        except (EOFError, OSError) as error:
            if not messages:  # else at the next call: its last messages count
                raise self._driver_error() from error
        return messages

    @property
    def is_awaited(self) -> bool:
        """Whether a request was not answered yet."""
        return self._unanswered > 0

    def _driver_error(self) -> LaunchError:
        """Return the error of a driver that has ended, with the last line that it printed."""
        output = b""
        with contextlib.suppress(OSError, ValueError):
            output = os.pread(self._output.fileno(), 1 << 16, 0)
        lines = output.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1][:300] if lines else "it printed no reason"
        return LaunchError(f"the process that talks to {self._cluster} has ended ({reason})")

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
        self._output.close()

    def close_and_reap(self) -> None:
        """Close this end, and leave no zombie: others may have copies of it until a run's end."""
        self.close()
        threading.Thread(target=self.reap, name="nbtrain-driver", daemon=True).start()

    def reap(self) -> None:
        """Wait for the driver's end."""
        with contextlib.suppress(ChildProcessError):
            self._process.wait()


kept: dict[str, DriverClient] = {}
"""Drivers that have joined a cluster, by its name. A launch like the one before uses it again."""


def _leave_drivers() -> None:
    """Leave the drivers to the process that this one was forked from: they end with that."""
    for client in kept.values():
        client.close()
    kept.clear()


os.register_at_fork(after_in_child=_leave_drivers)
