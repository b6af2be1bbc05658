"""Copies growing files from one host to another, in order and by offset, each part once.

The side that copies sends how much it has, and the other returns what follows. Whatever is lost on
the way, an answer or a minute of the link, is simply requested again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

PART, BATCH = 1 << 20, 8 << 20
"""Bytes of one file, and of all files, in one batch."""


def appended(folder: Path, have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
    """Return what files of a folder hold beyond the bytes that the other side has, by name.

    Each part comes with the offset it begins at. Together they are no more than a batch, which the
    files share evenly: none waits for another that grows without end. A missing file has no part.
    """
    grown = [name for name, offset in have.items() if size(folder, name) > offset]
    share = min(PART, BATCH // max(1, len(grown)))
    parts: dict[str, tuple[int, bytes]] = {}
    for name in grown:
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            file.seek(have[name])
            parts[name] = have[name], file.read(share)
    return parts


class FileCopies:
    """The copies of growing files from another host, appended to what `folder` had of them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self.have = dict.fromkeys(names, 0)
        """Bytes of each file that were copied so far."""
        for name in self.have:
            _end_line(folder, name)

    def add(self, parts: Mapping[str, tuple[int, bytes]]) -> bool:
        """Append the new bytes of `parts`; return whether there were any.

        What does not fit on a full disk is requested again, and lost only if it never fits.
        """
        grown = False
        for name, (offset, data) in parts.items():
            known = self.have.get(name)
            if known is None or not offset <= known < offset + len(data):
                continue  # of another run, after a gap, or copied already
            with contextlib.suppress(OSError):
                self.have[name] += self._append(name, data[known - offset :])
            grown = grown or self.have[name] > known
        return grown

    def lacks(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the copied bytes of each file that does not have all of its `sizes` yet."""
        return {n: self.have[n] for n, size in sizes.items() if self.have.get(n, size) < size}

    def _append(self, name: str, data: bytes) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(self._folder / name, flags, 0o600), "ab", buffering=0) as file:
            return file.write(data)


def size(folder: Path, name: str) -> int:
    """Return the bytes of a file, 0 where there is none."""
    with contextlib.suppress(OSError):
        path = f"{folder}/{name}"  # not pathlib: hundreds of files, many times per second
        return os.stat(path).st_size
    return 0


def _end_line(folder: Path, name: str) -> None:
    """End the last line of a file, if the writer did not: the rest was lost with its node.

    Unended, it would spoil the first line of the next attempt.
    """
    with contextlib.suppress(OSError), (folder / name).open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
