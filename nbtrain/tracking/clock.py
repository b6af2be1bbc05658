"""The time of day, read once when the process or its last launch began, and counted from there.

``time.time()`` jumps when the clock is set: by NTP, by hand, or when a virtual machine is resumed.
Events are ordered by time, and a duration is the difference of two times. After a jump of an hour,
a run of ten seconds took an hour or 0 s, and a failure belonged to the wrong attempt. Compare times
of files with ``time.time()``, because they are the system's.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It counts the time that a laptop sleeps, too, where the system has such a clock (Linux)."""


def now(offset: float | None = None) -> float:
    """Return seconds since the epoch that never jump during a run.

    By the clock of another process of this host, if its `offset` is given: the events of its run
    have the times of that clock.
    """
    return time.clock_gettime(_CLOCK) + (_offset if offset is None else offset)


def synchronize() -> None:
    """Take the time of day from the system's clock again: a kernel lives for weeks."""
    follow(time.time() - time.clock_gettime(_CLOCK))


def offset() -> float:
    """Return what another process of this host must `follow` to have the same time."""
    return _offset


def follow(offset: float) -> None:
    """Make `now` return the time of another process of this host, given its `offset`.

    That process may have begun before the clock was set.
    """
    global _offset  # a process has one clock
    _offset = offset


_offset = 0.0
synchronize()
