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
from typing import Any

PART, BATCH = 1 << 20, 8 << 20
"""Bytes of one file, and of all, that go in one batch."""

RATE = 5.0
"""Batches a second of one node, in the long run and in one burst."""


def appended(folder: Path, have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
    """Return what the files of a folder hold beyond what the other side has, by name.

    Each with the offset it begins at, and together no more than a batch, of which each file has
    its share: none waits for one that grows without end. Those that are not there have nothing.
    """
    grown = [name for name, offset in have.items() if size(folder, name) > offset]
    share = min(PART, BATCH // max(1, len(grown)))
    found: dict[str, tuple[int, bytes]] = {}
    for name in grown:
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            file.seek(have[name])
            found[name] = have[name], file.read(share)
    return found


class Copy:
    """The growing copies of some files of a folder elsewhere; what was there before stays first."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._before = {name: _end_line(folder, name) for name in names}
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

    def lacks(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return how much there is of those files that are to have so many bytes, and do not."""
        return {n: self.have[n] for n, whole in sizes.items() if self.have.get(n, whole) < whole}

    def _append(self, name: str, data: bytes) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        try:
            return os.pwrite(descriptor, data, self._before[name] + self.have[name])
        finally:
            os.close(descriptor)


def size(folder: Path, name: str) -> int:
    """Return the bytes of a file, 0 where there is none."""
    try:
        return os.stat(f"{folder}/{name}").st_size  # of hundreds of files, many times a second
    except OSError:
        return 0


def _end_line(folder: Path, name: str) -> int:
    """Return the size of a file, whose last line is ended if whoever wrote it could not do that.

    The rest of it was lost with its node: it must not take the next attempt's first line with it.
    """
    with contextlib.suppress(OSError), (folder / name).open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
    return size(folder, name)


def keep(path: Path, data: Any) -> None:
    """Write a file that is there whole or not at all. Raises `OSError`."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(memoryview(data))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


class Pace:
    """Says how long to wait before the next of many: a few may follow at once, then `rate` holds.

    `rate` is in 1/s, and how many the few are.
    """

    def __init__(self, rate: float = RATE, now: float | None = None) -> None:
        self._rate = self._left = rate
        self._at = time.monotonic() if now is None else now

    def wait(self, now: float) -> float:
        """Return the seconds to wait, for one more that is taken into account now."""
        self._left = min(self._rate, self._left + self._rate * (now - self._at)) - 1
        self._at = now
        return max(0.0, -self._left / self._rate)
