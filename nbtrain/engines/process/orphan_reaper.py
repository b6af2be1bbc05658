"""Ends the processes that ranks started, also if the launcher was killed.

A rank leads a session, and what it starts belongs to that. One helper in it is spared, the
resource tracker of `multiprocessing`: it ends by itself, and deletes what the ranks left in
/dev/shm. (torch's shared memory manager, which does the same, has a session of its own.)

Run as a script (with the standard library alone, so that it starts at once), this file waits for
the end of a launcher that is killed, and cleans up in its place.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

_TRACKER = b"multiprocessing.resource_tracker"
_ROUNDS = 5
"""Times that sessions are read again: their processes may fork meanwhile."""

_LEDGER = "ranks"
"""The file in the scratch folder with the processes of the ranks that are not reaped yet."""

_LOOK = 0.1
"""Seconds between two looks at the launcher where the system does not report its end."""


def signal_sessions(leaders: Collection[int], number: int) -> None:
    """Signal ranks and all that they started.

    A leader that has ended must not have been reaped: another process could have its number.
    """
    for leader in leaders:
        _signal(leader, number)
    seen = set(leaders)
    for _ in range(_ROUNDS):
        try:
            new = _members(leaders) - seen
        except OSError:  # no /proc, or no descriptor to read it: then those that left no group
            for leader in leaders:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, number)
            break
        if not new:
            break
        seen |= new
        for pid in new:
            if not _is_tracker(pid):
                _signal(pid, number)


def _members(leaders: Collection[int]) -> set[int]:
    """Return the processes in the sessions of `leaders`. Raises `OSError` without /proc."""
    members: set[int] = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is hidden
            if name.isdecimal() and os.getsid(int(name)) in leaders:
                members.add(int(name))
    return members


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def write_ledger(scratch: str, leaders: Collection[int]) -> None:
    """Write which processes lead sessions now: a rank that was reaped does not any more.

    Not by `system.files`: this file must do without nbtrain.
    """
    with contextlib.suppress(OSError):  # a full disk
        new = Path(scratch, f"{_LEDGER}.new")
        new.write_text(" ".join(map(str, leaders)))
        new.replace(Path(scratch, _LEDGER))


class OrphanReaper:
    """Waits beside a launcher, and ends its ranks' processes if the launcher is killed.

    `scratch` is the folder it deletes then. It is missing where no process can be started: it
    matters only if the launcher is killed, too.
    """

    def __init__(self, scratch: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", __file__, str(os.getpid()), scratch],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the signal that ends the kernel's group is not for it
            )

    def close(self) -> None:
        """End it: the launcher cleans up itself."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError):
                self._process.wait()


def main(launcher: int, scratch: Path) -> None:
    """Wait for the launcher's end, then kill what its ranks left running and delete `scratch`."""
    _wait_for_end(launcher)
    leaders: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        leaders = {int(pid) for pid in (scratch / _LEDGER).read_text().split()}
    signal_sessions(leaders, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


def _wait_for_end(launcher: int) -> None:
    waiting = select.poll()
    wait: float | None = 1000 * _LOOK
    with contextlib.suppress(AttributeError, OSError):  # not Linux ≥ 5.3
        waiting.register(os.pidfd_open(launcher), select.POLLIN)
        wait = None
    while os.getppid() == launcher:
        waiting.poll(wait)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
