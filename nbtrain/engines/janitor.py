"""What ranks leave behind: who ends the processes they started, also when the launcher is gone.

A rank leads a session, and what it starts belongs to that. One helper in it is spared, the
resource tracker of `multiprocessing`: it ends by itself, and deletes what the dead left in
/dev/shm. (torch's shared memory manager, which does the same, has a session of its own.)

Run as a script (standard library alone, so that it starts at once), this file waits for the end of
a launcher that is killed, and cleans up in its stead.
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
"""How often sessions are read again: their processes may fork meanwhile."""

_LEDGER = "ranks"
"""The file in the scratch folder that names the processes of ranks which are not reaped yet."""

_LOOK = 0.1
"""Seconds between two looks at the launcher where the system does not tell of its end."""


def signal_sessions(leaders: Collection[int], number: int) -> None:
    """Signal ranks and all that they started.

    A leader that is gone must not have been reaped: its number could be someone else's.
    """
    for leader in leaders:
        _signal(leader, number)
    seen = set(leaders)
    for _ in range(_ROUNDS):
        try:
            found = _members(leaders) - seen
        except OSError:  # no /proc, or no descriptor to read it: then those that left no group
            for leader in leaders:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, number)
            break
        if not found:
            break
        seen |= found
        for pid in found:
            if not _is_tracker(pid):
                _signal(pid, number)


def _members(leaders: Collection[int]) -> set[int]:
    """Return the processes in the sessions of `leaders`. Raises `OSError` without /proc."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # gone meanwhile, or hidden
            if name.isdecimal() and os.getsid(int(name)) in leaders:
                found.add(int(name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def write_ledger(scratch: str, leaders: Collection[int]) -> None:
    """Say which processes lead sessions now; a rank that was reaped is none of them any more."""
    with contextlib.suppress(OSError):  # a full disk
        new = Path(scratch, f"{_LEDGER}.new")
        new.write_text(" ".join(map(str, leaders)))
        new.replace(Path(scratch, _LEDGER))


class Janitor:
    """Waits beside a launcher, and ends its ranks' processes if the launcher is killed.

    `scratch` is the folder it deletes then. Where it cannot be started (no processes left) there
    is none: it matters only if the launcher is killed, too.
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
