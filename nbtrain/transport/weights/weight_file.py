"""Writes and reads a file of weights: safetensors' format, with all else as JSON in its header.

What a file cannot hold as it is (`tensor_kinds.encoded`) is in it as bytes. The header has a
checksum of each tensor, so that a file is checked whole before any of it is used.
"""

from __future__ import annotations

import hashlib
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
from .fingerprints import checksum
from .tensor_kinds import decoded, encoded, is_finite, is_plain, shape_of, stored_kind

if TYPE_CHECKING:
    import torch

MAPPED = 80 << 20
"""Bytes of a file that are mapped at a time: they count as this process's memory.

A file is opened anew after so many, which takes 0.3 ms (safetensors 0.8, a header of 60 tensors):
to load 1 GB took 7 % longer with 32 MiB, and 3 % less, but twice the memory, with all at once.
"""

_KEY = "nbtrain"
"""The entry of the header's metadata that nbtrain writes."""

_CHECKSUM = "nbtrain-checksum"
"""The entry with the checksum of that one."""


@dataclass(frozen=True)
class WeightFile:
    """The content of a file."""

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor."""


def save(content: WeightFile, path: Path) -> list[str]:
    """Write a file; return the names of the tensors that are not finite. Raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = content.tensors
    plain = {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
    stored = {
        name: tensor.detach().contiguous() if name in plain else encoded(tensor)
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
    text = json.dumps(about)
    metadata = {"format": "pt", _KEY: text, _CHECKSUM: _text_checksum(text)}
    try:
        save_file({_key(name): t for name, t in _apart(stored).items()}, path, metadata)
    except SafetensorError as error:  # it has no errno, but Rust's text of one
        code = re.search(r"\(os error (\d+)\)", str(error))
        number = int(code[1]) if code else 0
        raise OSError(number, os.strerror(number) if code else str(error)) from error
    return not_finite


def _key(name: str) -> str:
    """Return a tensor's name in a file: the format has the metadata under one of its own."""
    return f"{name}'" if name.startswith("__metadata__") else name


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that overlap others in memory: safetensors refuses them. Few models have any."""
    apart, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        apart[name] = tensor.clone() if begin < end else tensor
        end = max(end, begin + tensor.nbytes)
    return apart


class WeightReader:
    """An open file of weights; a context manager that closes it.

    `written` is the file's `stamp` as the rank left it. Raises `NbtrainError` for a file that is
    damaged, or is none that a run saved, and `OSError`.

    The file is opened once, and `safe_open` reads that descriptor: meanwhile the path may name
    another file, or none, since runs are pruned. A process that reads a mapping of a file which
    is cut short is killed (SIGBUS). Nothing in nbtrain cuts a file of weights: it is replaced.
    """

    def __init__(self, path: Path, written: str = "") -> None:
        self.path = path
        self._descriptor = open_own(path)
        try:
            self._is_as_written = written == stamp(self._descriptor) != ""
            self.about = self._read_about()
        except BaseException:  # an interrupt, too: the caller gets nothing that it could close
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
        """Return what a tensor was in the rank; of one that is encoded, ``sparse_coo float32``."""
        shape, kind = self.about["tensors"][name]
        return tuple(shape), kind

    def check(self) -> None:
        """Read the whole file. Raises `NbtrainError` if a checksum is not what was written.

        A file that nobody has written to since the rank closed it is not read for that.
        """
        for name, tensor in () if self._is_as_written else self._stored(self.names()):
            if checksum(tensor) != self.about["checksums"][name]:
                raise self._damaged(f"`{name}` is not what the rank wrote")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors with their names. They are in the file's memory: copy what is kept."""
        for name, tensor in self._stored(names):
            yield name, decoded(tensor) if name in self.about["encoded"] else tensor

    def _stored(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting = list(names)[::-1]
        while waiting:
            with self._mapped() as file:
                size = 0
                while waiting and size < MAPPED:
                    name = waiting.pop()
                    tensor = file.get_tensor(_key(name))
                    size += tensor.nbytes
                    yield name, tensor
                del tensor  # what refers to a mapping keeps it

    def _mapped(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(f"/dev/fd/{self._descriptor}", framework="pt")
        except SafetensorError as error:
            raise self._damaged(str(error)) from error

    def _read_about(self) -> dict[str, Any]:
        with self._mapped() as file:
            metadata, names = file.metadata() or {}, set(file.keys())
        text = metadata.get(_KEY)
        if text is None:
            raise NbtrainError(f"{self.path} is not a file that a run saved")
        try:
            about: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise self._damaged(f"its header cannot be read: {error}") from error
        if "checksums" not in about:
            raise NbtrainError(
                f"{self.path} was written by an earlier version of nbtrain; "
                "safetensors.torch.load_file(path) returns its tensors"
            )
        is_whole = metadata.get(_CHECKSUM) == _text_checksum(text)
        if not is_whole or names != {*map(_key, about["tensors"])}:
            raise self._damaged("its header is not what the rank wrote")
        return about

    def _damaged(self, reason: str) -> NbtrainError:
        return NbtrainError(f"{self.path} is damaged: {reason}")


def _text_checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stamp(file: int | Path) -> str:
    """Return what identifies a file's content until somebody writes to it, or the host restarts."""
    status, since = os.stat(file), boot()
    about = (since, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    return " ".join(map(str, about)) if since else ""
