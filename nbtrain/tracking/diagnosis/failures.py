"""Describes how a rank ended, and finds the failure that caused the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...errors import RankDied
from ...transport.exceptions import CapturedException, restore, set_notes

_ECHOING = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
# What a rank raises when another one went away: the echo of a failure, not its cause.
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


NO_GRADIENT = "no gradient"
"""The code of the evidence that names parameters, where the exception has their numbers alone."""

FRESH_WORKER = "fresh worker"
"""The code of evidence that a DataLoader's worker had nothing of the notebook."""

LOADER_WORKER, DISK_FULL, FORK_REFUSED = "data loader worker", "disk full", "fork refused"
"""The codes of evidence that says what a failure is; kinds of `FailureReport`."""


@dataclass(frozen=True)
class Failure:
    """A rank's failure: it raised an exception, or its process died."""

    rank: int
    time: float
    error: CapturedException | None = None
    """The exception; None where the process died."""
    returncode: int | None = None
    """How the process died: an exit code, or negative, a signal."""
    log: str = ""
    description: str = ""
    """Replaces the return code's sentence where that would mislead: the launcher ended a rank that
    was failing already."""

    @property
    def is_secondary(self) -> bool:
        """Whether this looks like the consequence of another rank's failure."""
        if self.error is None:  # native code may end a rank over it
            text = self.log.lower()
            is_native = "terminate called" in text or "watchdog" in text
            is_abort = self.returncode == -signal.SIGABRT
            return is_abort and is_native and any(echo in text for echo in _ECHOES)
        return is_secondary_failure(self.error.type_name, self.error.text)

    @property
    def summary(self) -> str:
        """One line: what happened."""
        if self.error is not None:
            return self.error.headline
        return self.description or describe_returncode(self.returncode)


def is_secondary_failure(error_type: str, text: str) -> bool:
    """Whether an error is what a rank raises when another one went away; `text` is torch's."""
    text = text.lower()
    return error_type in _ECHOING and any(echo in text for echo in _ECHOES)


def headline(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest that is no echo."""
    return min(failures, key=lambda f: (f.is_secondary, f.time, f.rank))


def describe_returncode(returncode: int | None) -> str:
    """Describe how a process ended."""
    if returncode is None:
        return "ended, and other code in this process collected its exit code (os.wait, SIGCHLD)"
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
        "SIGABRT": " (native code ended the process)",
    }.get(name, "")
    return f"was killed by {name}{hint}"


_CALL = re.compile(r'^  File "([^"]+)"(?=, line \d+ in )', re.M)


def to_exception(
    failure: Failure, note: str, cells: Mapping[str, str] = MappingProxyType({})
) -> BaseException:
    """Return what the notebook raises: the rank's own exception, or `RankDied`.

    `cells` are the names of cells by their files, for the calls that `faulthandler` has listed.
    """

    def name(call: re.Match[str]) -> str:
        return f"  {cells[call[1]]}" if call[1] in cells else call[0]

    if failure.error is not None:
        error = restore(failure.error)
    else:
        log, code = _CALL.sub(name, failure.log.rstrip()), failure.returncode
        printed = f"Its last output:\n{log}" if log else "It had printed nothing."
        error = RankDied(
            f"rank {failure.rank} {failure.summary}. {printed}",
            rank=failure.rank,
            exitcode=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            log=failure.log,
        )
    set_notes(error, [*getattr(error, "__notes__", []), note])
    return error
