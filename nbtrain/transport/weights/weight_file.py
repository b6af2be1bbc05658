"""Writes and reads a file of weights: safetensors' format, with all else as JSON in its header.

The header has a checksum of each tensor, so that a whole file is checked before any of it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import NbtrainError
from ...system.files import open_own
from ...system.processes import boot
from .tensors import checksum, decode, encode, is_finite, is_plain, shape_of, stored_kind

if TYPE_CHECKING:
    import torch

_ABOUT = "nbtrain"
"""The entry of the header that nbtrain writes, a JSON text."""


@dataclass(frozen=True)
class WeightFile:
    """The content of a file."""

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    """All that is not a tensor."""


def save(content: WeightFile, path: Path) -> list[str]:
    """Write a file; return the names of the tensors that are not finite. Raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = content.tensors
    plain = {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
    stored = {
        name: tensor.detach().contiguous() if name in plain else encode(tensor)
        for name, tensor in tensors.items()
    }
    not_finite = sorted(name for name, tensor in plain.items() if not is_finite(tensor))
    about = {
        **content.about,
        "tensors": {name: [shape_of(t), stored_kind(t)] for name, t in tensors.items()},
        "checksums": {name: checksum(tensor) for name, tensor in stored.items()},
        "encoded": sorted(tensors.keys() - plain.keys()),
        "not_finite": not_finite,
    }
    metadata = {"format": "pt", _ABOUT: json.dumps(about)}
    separate, end = {}, 0
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()  # safetensors refuses tensors that overlap in memory
        separate[name] = tensor.clone() if begin < end else tensor
        end = max(end, begin + tensor.nbytes)
    try:
        save_file(separate, path, metadata)
    except SafetensorError as error:  # it has no errno, but Rust's text of one
        code = re.search(r"\(os error (\d+)\)", str(error))
        number = int(code[1]) if code else 0
        raise OSError(number, os.strerror(number) if code else str(error)) from error
    return not_finite


class WeightReader:
    """An open file of weights; a context manager that closes it.

    `written` is the file's `stamp` as the rank left it. Raises `OSError`, and `NbtrainError` for a
    file that is damaged or that no run saved.

    The file is opened once, and `safe_open` reads that descriptor: runs are pruned, so the path may
    soon name another file, or be gone. A process that reads a mapping of a file that was cut short
    is killed (SIGBUS). nbtrain never cuts a file of weights: it replaces the file.
    """

    def __init__(self, path: Path, written: str = "") -> None:
        self.path = path
        self._descriptor = open_own(path)
        try:
            self._is_as_written = written == stamp(self._descriptor) != ""
            self.about = self._read_about()
        except BaseException:  # also an interrupt: the caller never gets it, so close it here
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
        return list(self.about["tensors"])

    def shape_and_kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the `stored_kind` that a tensor had in the rank."""
        shape, kind = self.about["tensors"][name]
        return tuple(shape), kind

    def check(self) -> None:
        """Read the whole file. Raises `NbtrainError` if a checksum is not as it was written.

        A file that nobody has written to since the rank closed it is not read again.
        """
        for name, tensor in () if self._is_as_written else self._read_stored(self.names()):
            if checksum(tensor) != self.about["checksums"][name]:
                raise self._damage_error(f"`{name}` is not what the rank wrote")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors with their names. They are mapped from the file: copy what you keep."""
        for name, tensor in self._read_stored(names):
            yield name, decode(tensor) if name in self.about["encoded"] else tensor

    def _read_stored(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        with self._map() as file:
            for name in names:
                yield name, file.get_tensor(name)

    def _map(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(f"/dev/fd/{self._descriptor}", framework="pt")
        except SafetensorError as error:
            raise self._damage_error(str(error)) from error

    def _read_about(self) -> dict[str, Any]:
        with self._map() as file:
            metadata, names = file.metadata() or {}, set(file.keys())
        text = metadata.get(_ABOUT)
        if text is None:
            raise NbtrainError(f"{self.path} is not a file that a run saved")
        try:
            about: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise self._damage_error(f"its header cannot be read: {error}") from error
        if "checksums" not in about or "state" in about:  # an optimizer's, as JSON
            raise NbtrainError(
                f"{self.path} was written by an earlier version of nbtrain; "
                "safetensors.torch.load_file(path) returns its tensors"
            )
        if names != {*about["tensors"]}:
            raise self._damage_error("its header is not what the rank wrote")
        return about

    def _damage_error(self, reason: str) -> NbtrainError:
        return NbtrainError(f"{self.path} is damaged: {reason}")


def stamp(file: int | Path) -> str:
    """Return a text that identifies a file's content until it is written to, or the host restarts.

    Returns "" if the host's start is unknown.
    """
    status, since = os.stat(file), boot()
    parts = (since, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    return " ".join(map(str, parts)) if since else ""
