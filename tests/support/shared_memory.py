"""What a run leaves in /dev/shm, which every process of this host writes to."""

import contextlib
import os
import time
from collections.abc import Collection

import psutil


def names() -> set[str]:
    """Return what this user has in /dev/shm now.

    Without the semaphores of processes that `multiprocessing` spawns, and what joblib's pools have:
    a tracker of their own deletes them, behind their owner's end and held by nobody.
    """
    found = set()
    tracked = ("sem.mp-", "sem.loky-", "joblib_memmapping_folder_")
    for entry in os.scandir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and not entry.name.startswith(tracked):
                found.add(entry.name)
    return found


def left_behind(before: Collection[str] = (), patience: float = 3.0) -> list[str]:
    """Return what came since `before`, stays, and that no process outside this one's family has.

    Another worker of the tests, or another user, makes and deletes blocks at any moment; each is
    held by a process while it is there, or gone at the next look.
    """
    left, deadline = names() - set(before), time.monotonic() + patience
    while left and time.monotonic() < deadline:
        left -= _held_elsewhere()
        left &= names()
        time.sleep(0.05)
    return sorted(left)


def _held_elsewhere() -> set[str]:
    """Return what processes map or have open that are neither this one nor below it."""
    family = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    held: set[str] = set()
    for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - family:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/maps") as maps:
                places = {line.split(maxsplit=5)[-1].strip() for line in maps}
            held |= {place[9:] for place in places if place.startswith("/dev/shm/")}
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    place = os.readlink(entry)
                    held |= {place[9:]} if place.startswith("/dev/shm/") else set()
    return held
