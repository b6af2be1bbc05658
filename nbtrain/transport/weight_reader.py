"""Reads a file of weights through one descriptor, and checks it whole before any of it is used.

Not by `safetensors.safe_open`: that opens a path, where another file may be by now, and maps the
whole file, while a process that reads a mapping of a file which was cut short is killed (SIGBUS).
Here, a file is mapped only while a lease keeps it from being cut short, and else read: a copy more.
The format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NbtrainError
from ..system.files import open_own
from ..system.processes import boot
from .tensor_kinds import decoded, words

if TYPE_CHECKING:
    import torch

CHUNK = 32 << 20
"""Bytes that are mapped or read at a time: they count as this process's memory."""

_BLOCK = 1 << 14
"""Integers of eight bytes of which a checksum has the sum."""

KEY = "nbtrain"
"""The entry of the header's metadata that nbtrain writes."""

CHECKSUM = "nbtrain-checksum"
"""The entry with the checksum of that one."""

_LONGEST_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""


class WeightReader:
    """An open file of weights; a context manager that closes it.

    `written` is the file's `stamp` as the rank left it. Raises `NbtrainError` for a file that is
    damaged, or is none that a run saved, and `OSError`.
    """

    def __init__(self, path: Path, written: str = "") -> None:
        self.path, self._written = path, written
        self._descriptor = open_own(path)
        try:
            _take_lease(self._descriptor)
            self._entries, self.about = self._header()
        except BaseException:  # an interrupt, too: nobody would have it to close it
            self.close()
            raise

    def close(self) -> None:
        """Close the file. May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return what a tensor was in the rank; of one that is encoded, ``sparse_coo float32``."""
        shape, dtype, _ = self.about["tensors"][name]
        return tuple(shape), dtype

    def check(self) -> None:
        """Read the whole file. Raises `NbtrainError` if a `checksum` is not what was written.

        Not where nobody can have changed it: then what is read is in memory as it was written.
        """
        if self._is_as_written():
            return
        for name in self._entries:
            if checksum(self.chunks(name)) != self.about["tensors"][name][2]:
                raise self._damaged(f"`{name}` is not what the rank wrote")

    def _is_as_written(self) -> bool:
        """Whether nobody wrote to the file since the rank did, and none of it was on a disk only.

        A lease is had of a file only that nobody has open for writing.
        """
        descriptor = self._descriptor
        is_same = self._written and _has_lease(descriptor) and stamp(descriptor) == self._written
        return bool(is_same) and _is_in_memory(descriptor)

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor in order, some at a time; the memory is used again."""
        import torch

        is_encoded = name in self.about["encoded"]
        dtype = torch.uint8 if is_encoded else getattr(torch, self.about["tensors"][name][1])
        begin, end = self._entries[name]["data_offsets"]
        buffer = bytearray()
        for place in range(begin, end, CHUNK):
            size = min(end - place, CHUNK)
            count, offset = size // dtype.itemsize, 0
            if _has_lease(self._descriptor):
                data, offset = self._mapped(self._begin + place, size)
            else:
                data = buffer = buffer or bytearray(size)
                self._read_into(memoryview(buffer)[:size], self._begin + place)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nobody must write to a mapping
                chunk = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
            yield chunk

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, in memory of its own."""
        import torch

        if name in self.about["encoded"]:
            begin, end = self._entries[name]["data_offsets"]
            data = bytearray(end - begin)
            self._read_into(memoryview(data), self._begin + begin)
            return decoded(bytes(data))
        shape, dtype = self.shape_and_dtype(name)
        entire = torch.empty(shape, dtype=getattr(torch, dtype))
        flat, place = entire.view(-1), 0
        for chunk in self.chunks(name):
            flat[place : place + len(chunk)] = chunk
            place += len(chunk)
        return entire

    def _header(self) -> tuple[dict[str, Any], dict[str, Any]]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(self._read(0, 8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise self._damaged("it ends in its header")
        self._begin = 8 + length
        try:
            entries = json.loads(self._read(8, length))
            metadata = entries.pop("__metadata__", {})
            about = json.loads(metadata[KEY]) if KEY in metadata else None
            is_whole = about is None or metadata.get(CHECKSUM) == text_checksum(metadata[KEY])
            ends = [_end(entry) for entry in entries.values()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read: {error}") from error
        if about is None:
            raise NbtrainError(f"{self.path} is not a file that a run saved")
        if "tensors" not in about or about["tensors"].keys() != entries.keys():
            raise NbtrainError(
                f"{self.path} was written by an earlier version of nbtrain; "
                "safetensors.torch.load_file(path) returns its tensors"
            )
        if not is_whole:
            raise self._damaged("its header is not what the rank wrote")
        if max(ends, default=0) != size - self._begin:
            raise self._damaged("its size is not what its header says")
        return entries, about

    def _mapped(self, place: int, size: int) -> tuple[Any, int]:
        """Return a mapping that has some bytes of the file, and where they begin in it."""
        offset = place % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        where = {"offset": place - offset, "flags": flags, "prot": mmap.PROT_READ}
        return mmap.mmap(self._descriptor, size + offset, **where), offset

    def _read(self, place: int, size: int) -> bytes:
        data = bytearray(size)
        self._read_into(memoryview(data), place)
        return bytes(data)

    def _read_into(self, view: memoryview, place: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise self._damaged("it ends too early")
            view, place = view[count:], place + count

    def _damaged(self, reason: str) -> NbtrainError:
        return NbtrainError(f"{self.path} is damaged: {reason}")


def _end(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"offsets {begin} to {end}")
    return int(end)


def checksum(chunks: Iterator[torch.Tensor]) -> str:
    """Return a short text for the elements of a tensor, which come `CHUNK` bytes at a time.

    It has the sum of each `_BLOCK`: it differs once a bit flips, or a block is lost or moved. What
    a training may do but no disk does, exchange two numbers within a block, `fingerprints.sums`
    sees; this takes less than half the time.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        flat: Any = chunk.view(torch.uint8)
        even: Any = words(flat[: len(flat) // 8 * 8])
        place = len(even) // _BLOCK * _BLOCK
        sums = even[:place].view(-1, _BLOCK).sum(1).tolist()  # in one call: on torch's threads
        if place < len(even) or not sums:
            sums.append(int(even[place:].sum()))
        digest.update(repr((sums, flat[8 * len(even) :].tolist())).encode())
    return digest.hexdigest()


def text_checksum(text: str) -> str:
    """Return a checksum of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stamp(file: int | Path) -> str:
    """Return what identifies a file's content until somebody writes to it, or the host restarts."""
    status, since = os.stat(file), boot()
    about = (since, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    return " ".join(map(str, about)) if since else ""


def _is_in_memory(descriptor: int) -> bool:
    """Whether the whole file is in the system's page cache."""
    import torch

    size = os.fstat(descriptor).st_size
    with (
        contextlib.suppress(AttributeError, OSError, ValueError),
        warnings.catch_warnings(),
        mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapping,
    ):
        warnings.simplefilter("ignore")  # that nobody must write to it
        place = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), pages)
        return not failed and bytes(pages).count(b"\0") == 0
    return False


def _take_lease(descriptor: int) -> None:
    """Have whoever would cut the file short wait until it is closed, where the system can.

    A read lease does it on Linux, on local file systems (fcntl(2), "Leases"), for 45 s
    (/proc/sys/fs/lease-break-time). The signal that announces them is one that is ignored by
    default; the default one, SIGIO, would end the process.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def _has_lease(descriptor: int) -> bool:
    """Whether there is a lease, and nobody waits for its end: then none can end for 45 s."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    return False
