"""Files that grow on one host, copied to another in order: by offsets, so nothing comes twice.

The side that copies says how much it has; the other returns what follows. Whatever was lost on the
way, an answer or a minute of the link, is simply asked for again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

PART, BATCH = 1 << 20, 8 << 20
"""Bytes of one file, and of all, that go in one batch."""

RATE = 5.0
"""Batches a second of one node, in the long run and in one burst."""


def appended(folder: Path, have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
    """Return what the files of a folder hold beyond what the other side has, by name.

    Each with the offset it begins at, and together no more than a batch; those that are not there
    have nothing.
    """
    found: dict[str, tuple[int, bytes]] = {}
    left = BATCH
    for name, offset in have.items():
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size > offset and left:
                file.seek(offset)
                data = file.read(min(PART, left))
                found[name], left = (offset, data), left - len(data)
    return found


class Copy:
    """The growing copies of some files of a folder elsewhere; what was there before stays first."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._before = {name: _size(folder / name) for name in names}
        self.have = dict.fromkeys(self._before, 0)
        """Bytes of each file that were copied."""

    def add(self, parts: Mapping[str, tuple[int, bytes]]) -> bool:
        """Append what is new of `parts`; return whether anything was.

        What does not fit on a full disk is asked for again, and lost only if it never does.
        """
        grown = False
        for name, (offset, data) in parts.items():
            known = self.have.get(name)
            if known is None or not offset <= known < offset + len(data):
                continue  # of another run, of a later moment, or here already
            with contextlib.suppress(OSError):
                self.have[name] += self._append(name, data[known - offset :])
            grown = grown or self.have[name] > known
        return grown

    def _append(self, name: str, data: bytes) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        try:
            return os.pwrite(descriptor, data, self._before[name] + self.have[name])
        finally:
            os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Pace:
    """Says how long to wait before the next batch: a few may follow at once, then `RATE` holds."""

    def __init__(self, now: float | None = None) -> None:
        self._left, self._at = RATE, time.monotonic() if now is None else now

    def wait(self, now: float) -> float:
        """Return the seconds to wait before a batch that is taken into account now."""
        self._left = min(RATE, self._left + RATE * (now - self._at)) - 1
        self._at = now
        return max(0.0, -self._left / RATE)
