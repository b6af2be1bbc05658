"""Reading files that grow, a line at a time, from the start or further on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from . import events as ev


class Tail:
    """Reads the complete lines that were appended to a file since the last call.

    At most `limit` bytes a call: where more was appended, and `skip` is true, the oldest are
    passed over, so that a rank that prints without end costs its reader nothing. A line of more
    than `longest` bytes, by default the limit, is broken. A file that was deleted and made anew is
    read from its start.
    """

    def __init__(
        self, path: Path, *, limit: int = 1 << 20, skip: bool = False, longest: int = 0
    ) -> None:
        self._path, self._limit, self._skip = path, limit, skip
        self._longest = longest or limit
        self.passed = 0
        """Lines that were passed over so far, as far as they were counted."""
        self._offset = 0
        self._rest = b""

    def lines(self, *, flush: bool = False) -> list[bytes]:
        """Return new complete lines; with `flush`, an incomplete last one as well."""
        try:
            data = self._appended()  # may have emptied the rest
        except FileNotFoundError:  # not yet there, or deleted meanwhile
            return []
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if (flush or len(self._rest) > self._longest) and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def _appended(self) -> bytes:
        size = self._path.stat().st_size
        if size < self._offset:  # not its number: some file systems give others now and then
            self.skip_to(0)
        if size <= self._offset:
            return b""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            if self._skip and size - self._offset > self._limit:
                self.passed += _newlines(file, min(size - self._limit - self._offset, _COUNTED))
                self._offset, self._rest = size - self._limit, b""
            file.seek(self._offset)
            data = file.read(self._limit)
        self._offset += len(data)
        return data

    def skip_to(self, offset: int) -> None:
        """Go on reading from there."""
        self._offset, self._rest = offset, b""

    @property
    def behind(self) -> bool:
        """Whether more than the last call returned is already in the file."""
        try:
            return self._path.stat().st_size > self._offset
        except FileNotFoundError:
            return False


_COUNTED = 1 << 26
"""Bytes, of those that are passed over in a call, in which lines are counted."""


def _newlines(file: BinaryIO, size: int) -> int:
    found = 0
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        found += block.count(b"\n")
        size -= len(block)
    return found


def event_tail(path: Path) -> Tail:
    """Return a tail that holds little of a file of events: many may be read side by side."""
    return Tail(path, limit=1 << 16, longest=1 << 20)


def new_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield the events that were appended since the last time, of a long file some of them."""
    return (event for line in tail.lines() if (event := ev.from_line(line)) is not None)


def all_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield every event from where the tail stands to the end of its file."""
    while True:
        yield from new_events(tail)
        if not tail.behind:
            return


def read_events(path: Path) -> Iterator[ev.Event]:
    """Read every event of a file."""
    return all_events(event_tail(path))


def last_bytes(path: Path, size: int = 1 << 16) -> bytes:
    """Return the end of a file; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except FileNotFoundError:
        return b""
