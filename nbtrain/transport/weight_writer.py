"""Writes a file of weights, in the format of safetensors, and reads each tensor only once for it.

Not by safetensors' `save_file`: that wants the header, which has the checksums, before the tensors.
Here a second thread computes them while this one writes. The header's place is kept free.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tensor_kinds import DTYPES
from .weight_reader import CHECKSUM, CHUNK, KEY, checksum, text_checksum

if TYPE_CHECKING:
    import torch

_MARK = "0" * 32
"""As long as a checksum."""


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    kinds: Mapping[str, Sequence[Any]],
    about: Mapping[str, Any],
    is_finite: Callable[[str], bool],
) -> list[str]:
    """Write contiguous tensors on the CPU; return the names of those that are not finite.

    The header says what they were (`kinds`), beside `about`. Raises `OSError`.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    places, end = dict[str, int](), 0
    for name in order:
        places[name], end = end, end + tensors[name].nbytes

    def header(sums: Mapping[str, str], not_finite: Sequence[str]) -> bytes:
        each = {name: [*kinds[name], sums[name]] for name in tensors}
        text = json.dumps({**about, "tensors": each, "not_finite": not_finite})
        entries: dict[str, Any] = {
            "__metadata__": {"format": "pt", KEY: text, CHECKSUM: text_checksum(text)}
        }
        for name, place in places.items():
            tensor = tensors[name]
            entries[name] = {
                "dtype": DTYPES[str(tensor.dtype)],
                "shape": list(tensor.shape),
                "data_offsets": [place, place + tensor.nbytes],
            }
        return json.dumps(entries).encode()

    room = -(-len(header(dict.fromkeys(tensors, _MARK), sorted(tensors))) // 8) * 8
    with _Marks(tensors, is_finite) as marks:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # of a file that was there already
            for name, place in places.items():
                _write(descriptor, tensors[name], 8 + room + place)
            known = {name: marks.of(name) for name in tensors}
            not_finite = sorted(name for name, mark in known.items() if not mark[1])
            sums = {name: mark[0] for name, mark in known.items()}
            data = room.to_bytes(8, "little") + header(sums, not_finite).ljust(room)
            _write_all(descriptor, memoryview(data), 0)
        finally:
            os.close(descriptor)
    return not_finite


class _Marks:
    """Checksums of tensors, and whether these are finite; computed by a thread ahead of time."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], is_finite: Callable[[str], bool]
    ) -> None:
        self._tensors, self._is_finite = tensors, is_finite
        self._done: dict[str, tuple[str, bool]] = {}
        self._is_needed = True
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Marks:
        with suppress(RuntimeError):  # no more threads may be started
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_needed = False
        self._join()

    def of(self, name: str) -> tuple[str, bool]:
        """Return the mark of a tensor; raise here what the thread could not do."""
        self._join()
        return self._done.get(name) or self._mark(name)

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        with suppress(Exception):  # `of` meets it again
            for name in self._tensors:
                if not self._is_needed:
                    return
                self._done[name] = self._mark(name)

    def _mark(self, name: str) -> tuple[str, bool]:
        return checksum(_chunks(self._tensors[name])), self._is_finite(name)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8)
    yield from torch.split(flat, CHUNK) if len(flat) else ()


def _write(descriptor: int, tensor: torch.Tensor, place: int) -> None:
    if not tensor.nbytes:
        return
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    _write_all(descriptor, memoryview(data), place)


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[:CHUNK], place)  # an interrupt is heard in between
        data, place = data[count:], place + count
