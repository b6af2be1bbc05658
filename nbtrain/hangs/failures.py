"""Describes how a rank ended, and finds the failure that caused the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import RankDied
from ..tracking.state import ECHO_OF_JAX, ECHOES, RankState, RunState, is_secondary_failure
from ..transport.exceptions import CapturedException, restore, set_notes

NO_GRADIENT = "no gradient"
"""Code of evidence: names the parameters for which the exception has only numbers."""

FRESH_WORKER = "fresh worker"
"""Code of evidence: a DataLoader worker was spawned, so it had none of the notebook's objects."""

LOADER_WORKER, DISK_FULL, FORK_REFUSED = "data loader worker", "disk full", "fork refused"
"""Codes of evidence that are also kinds of `FailureReport`."""


@dataclass(frozen=True)
class Failure:
    """A rank's failure: it raised an exception, or its process died."""

    rank: int
    time: float
    error: CapturedException | None = None
    """The exception; None if the process died."""
    returncode: int | None = None
    """An exit code, or a negative signal number, if the process died."""
    log: str = ""
    description: str = ""
    """Replaces the return code's sentence if it would mislead: the launcher killed a rank that had
    already failed."""

    @property
    def is_secondary(self) -> bool:
        """Whether another rank's failure probably caused this one."""
        if self.error is None:  # native code may abort a rank that has lost its peers
            text = self.log.lower()
            is_native = "terminate called" in text or "watchdog" in text
            is_echo = is_native and any(echo in text for echo in ECHOES)
            is_echo = is_echo or ECHO_OF_JAX in text
            return self.returncode == -signal.SIGABRT and is_echo
        return is_secondary_failure(self.error.type_name, self.error.text)

    @property
    def summary(self) -> str:
        """One line: what happened."""
        if self.error is not None:
            return self.error.headline
        return self.description or describe_returncode(self.returncode)


def find_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest primary one."""
    return min(failures, key=lambda f: (f.is_secondary, f.time, f.rank))


def find_causes(state: RunState) -> list[RankState]:
    """Return the ranks that failed by themselves, or all failed ranks if each lost its peers."""
    failed = [rank for rank in state.ranks if rank.status in ("failed", "failing")]
    return [rank for rank in failed if not rank.has_lost_peers] or failed


def describe_returncode(returncode: int | None) -> str:
    """Describe in a few words how a process ended."""
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

    The `note` is added to it. `cells` maps the files of cells to their names, which replace them in
    a stack of `faulthandler`.
    """

    def name_cell(call: re.Match[str]) -> str:
        return f"  {cells[call[1]]}" if call[1] in cells else call[0]

    if failure.error is not None:
        error = restore(failure.error)
    else:
        log, code = _CALL.sub(name_cell, failure.log.rstrip()), failure.returncode
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
