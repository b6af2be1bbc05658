"""Copies growing files from one host to another, in order and by offset, each part once.

The copying side sends how many bytes it has, and the other returns the bytes that follow. If an
answer or the link is lost, the same bytes are simply requested again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .limits import CHUNK_BYTES


def read_appended(folder: Path, have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
    """Read the bytes of a folder's files that the other side does not have, by name.

    `have` is how many bytes of each file it has. Each part comes with its offset. A file that has
    not grown, is missing or cannot be read has no part. The files share `CHUNK_BYTES` evenly, so
    that a file that keeps growing does not hold up the others; the rest follows in later calls.
    """
    grown = [name for name, offset in have.items() if file_size(folder, name) > offset]
    share = CHUNK_BYTES // max(1, len(grown))
    parts: dict[str, tuple[int, bytes]] = {}
    for name in grown:
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            file.seek(have[name])
            parts[name] = have[name], file.read(share)
    return parts


class FileCopies:
    """Copies of growing files from another host, appended to the files in `folder`."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self.have = dict.fromkeys(names, 0)
        """How many bytes of each file were copied so far."""
        for name in self.have:
            _end_line(folder, name)

    def add(self, parts: Mapping[str, tuple[int, bytes]]) -> bool:
        """Append the new bytes of `parts` to the files; return whether there were any.

        Parts of other files, after a gap, or copied already are ignored. Bytes that do not fit on a
        full disk are requested again. Raises nothing for a file that cannot be written.
        """
        grown, flags = False, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        for name, (offset, data) in parts.items():
            known = self.have.get(name)
            if known is None or not offset <= known < offset + len(data):
                continue  # of another run, after a gap, or copied already
            with contextlib.suppress(OSError):
                descriptor = os.open(self._folder / name, flags, 0o600)
                with open(descriptor, "ab", buffering=0) as file:
                    self.have[name] += file.write(data[known - offset :])
            grown = grown or self.have[name] > known
        return grown

    def lacks(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return how many bytes were copied of each file that is shorter than in `sizes`.

        Files that are not copied here are left out; empty if all are complete.
        """
        return {n: self.have[n] for n, size in sizes.items() if self.have.get(n, size) < size}


def file_size(folder: Path, name: str) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        path = f"{folder}/{name}"  # not pathlib: hundreds of files, many times per second
        return os.stat(path).st_size
    return 0


def _end_line(folder: Path, name: str) -> None:
    """End the last line of a file, in case its writer was lost in the middle of it.

    Otherwise the next attempt would append its first line to that one. Does nothing for a file that
    is empty, missing or cannot be written.
    """
    with contextlib.suppress(OSError), (folder / name).open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
