"""How a rank ended, as a value, and which of several failures is the cause of a run's end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import RankDied
from .exceptions import Captured, restore, set_notes

_ECHOING = ("runtimeerror", "distbackenderror", "distnetworkerror", "diststoreerror")
# What a rank says when another one went away: the echo of a failure, not its cause.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "read error",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "socket timeout",
    "client socket has timed out",
    "watchdog caught collective operation timeout",
)


@dataclass(frozen=True)
class Failure:
    """A rank's failure: an exception (`error`), or a death (`returncode`, negative: a signal).

    `said` words a death where the return code would mislead: the rank was already failing, in the
    way told there, when the launcher ended it.
    """

    rank: int
    time: float
    error: Captured | None = None
    returncode: int | None = None
    log: str = ""
    said: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether this looks like the consequence of another rank's failure."""
        if self.error is None:  # native code may end a rank over it
            return self.returncode == -signal.SIGABRT and _is_native_echo(self.log)
        return is_echo(f"{self.error.type_name}: {self.error.text}")

    @property
    def summary(self) -> str:
        """One line: what happened."""
        if self.error is not None:
            return self.error.headline
        return self.said or describe_returncode(self.returncode)


def is_echo(error: str) -> bool:
    """Whether an error, as ``Type: text``, is what a rank says when another one went away."""
    kind, _, text = error.lower().partition(":")
    return kind in _ECHOING and any(echo in text for echo in _ECHOES)


def _is_native_echo(log: str) -> bool:
    said = log.lower()
    thrown = "terminate called" in said or "watchdog" in said
    return thrown and any(echo in said for echo in _ECHOES)


def headline(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest that is no echo."""
    return min(failures, key=lambda f: (f.is_echo, f.time, f.rank))


def describe_returncode(returncode: int | None) -> str:
    """Say in words how a process ended."""
    if returncode is None:
        return "ended, and another part of this process took its exit code (os.wait, SIGCHLD)"
    if returncode == 0:
        return "exited with code 0 before its function had returned"
    if returncode > 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = {
        "SIGKILL": " (often the system's answer to too little memory)",
        "SIGSEGV": " (a crash in native code)",
        "SIGBUS": " (often too little shared memory in /dev/shm)",
        "SIGABRT": " (native code gave up)",
    }.get(name, "")
    return f"was killed by {name}{hint}"


def to_exception(failure: Failure, note: str) -> BaseException:
    """Return what the notebook raises: the rank's own exception, or `RankDied`."""
    if failure.error is not None:
        error = restore(failure.error)
    else:
        died = f"rank {failure.rank} {failure.summary}."
        log = failure.log.rstrip()
        code = failure.returncode
        error = RankDied(
            f"{died} Its last words:\n{log}" if log else f"{died} It had printed nothing.",
            rank=failure.rank,
            exitcode=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            log=failure.log,
        )
    set_notes(error, [*getattr(error, "__notes__", []), note])
    return error


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks shortly: ``rank 3``, ``ranks 0, 4–7``."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(a) if a == b else f"{a}–{b}" for a, b in spans]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(words)}"
