"""Passes orders of the launcher to the ranks of a host, in two files of the run's folder.

A rank reads the bell, a number in shared memory, after each optimizer step: that takes 50 ns. It
reads the file with the orders only after the number has changed.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from ..system.files import read_regular, write_atomically


class OrderWriter:
    """The launcher's end, or on another host that of the process that starts the ranks there.

    Creates both files, before the ranks start. Raises `OSError` if they cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._orders, bell = _files(folder)
        self._number = 0
        write_atomically(self._orders, b"")
        self._bell = os.open(bell, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._ring()

    def write(self, orders: bytes) -> None:
        """Replace the orders, and ring the bell. Raises `OSError` on a full disk."""
        write_atomically(self._orders, orders)
        self._number += 1
        self._ring()

    def _ring(self) -> None:
        # Not through shared memory of this process, which SIGBUS would end on a full disk.
        os.pwrite(self._bell, self._number.to_bytes(8, sys.byteorder), 0)

    def close(self) -> None:
        """Close the bell. The files stay, since ranks may still read them."""
        os.close(self._bell)


class OrderReader:
    """A rank's end. Raises `OSError` if the run has no orders, or cannot share memory."""

    def __init__(self, folder: Path) -> None:
        self._orders, bell = _files(folder)
        descriptor = os.open(bell, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 8, access=mmap.ACCESS_READ)
        except ValueError as error:  # the file is shorter: it was cut, or the disk was full
            raise OSError(f"{bell} has no number") from error
        finally:
            os.close(descriptor)
        self.bell = memoryview(self._memory).cast("Q")
        """Its only item is the number of orders so far, which changes at any time."""

    def read(self) -> bytes:
        """Return the present orders. Raises `OSError` if the file was deleted."""
        return read_regular(self._orders)

    def close(self) -> None:
        """Give the memory back."""
        self.bell.release()
        self._memory.close()


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / "orders", folder / "bell"
