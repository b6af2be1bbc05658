"""Ends the processes that ranks started, also if the launcher was killed.

A rank leads a session, which contains all processes that it starts. Only the resource tracker of
`multiprocessing` is not killed: it exits by itself, and deletes what the ranks left in /dev/shm.
(torch's shared memory manager does the same, and has its own session.)

As a script, this file waits for the end of the launcher and cleans up if the launcher was killed.
It imports only the standard library, so that it starts fast.
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
_LEDGER = "ranks"
"""The file in the scratch folder with the pids of ranks that are not reaped yet."""

_PARENT_CHECK_INTERVAL_S = 0.1
"""Between two checks whether the launcher lives, on systems without pidfds."""


def signal_sessions(leaders: Collection[int], number: int) -> None:
    """Signal ranks and the processes that they started, except multiprocessing's resource trackers.

    Ended processes are ignored. A leader must not have been reaped, because another process could
    have its pid.
    """
    for leader in leaders:
        _signal(leader, number)
    seen = set(leaders)
    for _ in range(5):  # processes of these sessions may fork at the same time
        try:
            new = _members(leaders) - seen
        except OSError:  # no /proc, or no descriptors: signal the process groups
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
        with contextlib.suppress(OSError):  # it has just ended, or is hidden
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
    """Write the pids of the ranks that are not reaped.

    It does not use `system.files`, because this file imports nothing of nbtrain.
    """
    with contextlib.suppress(OSError):  # a full disk
        new = Path(scratch, f"{_LEDGER}.new")
        new.write_text(" ".join(map(str, leaders)))
        new.replace(Path(scratch, _LEDGER))


class OrphanReaper:
    """A process that ends the ranks' processes and deletes `scratch` if the launcher is killed.

    If it cannot be started, the run continues without it.
    """

    def __init__(self, scratch: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", __file__, str(os.getpid()), scratch],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # it must not get signals to the kernel's group
            )

    def close(self) -> None:
        """End the process, because the launcher cleans up itself."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError):
                self._process.wait()


def main(launcher: int, scratch: Path) -> None:
    """Wait for the launcher's end, kill the ranks' processes that are left, delete `scratch`."""
    _wait_for_end(launcher)
    leaders: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        leaders = {int(pid) for pid in (scratch / _LEDGER).read_text().split()}
    signal_sessions(leaders, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


def _wait_for_end(launcher: int) -> None:
    """Wait, without a timeout, until the launcher has ended; it must be this process's parent."""
    waiting = select.poll()
    wait: float | None = 1000 * _PARENT_CHECK_INTERVAL_S
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3
        waiting.register(os.pidfd_open(launcher), select.POLLIN)
        wait = None
    while os.getppid() == launcher:
        waiting.poll(wait)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
