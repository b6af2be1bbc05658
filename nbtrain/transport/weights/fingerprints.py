"""Finds out whether a tensor has changed, by fingerprints of a few bytes or by its bits."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .tensor_kinds import encoded, has_no_bytes, is_block, is_lazy, shape_of

if TYPE_CHECKING:
    import torch


_FEW = 1 << 12
"""Elements, the first of a tensor, that are looked at by themselves: a training changes them."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU: itself if it is there already, or has no bytes."""
    return tensor if has_no_bytes(tensor) else tensor.detach().cpu()


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fingerprint of each tensor, computed once for tied ones."""
    marks = {id(t): fingerprint(on_cpu(t)) for t in {id(t): t for t in tensors.values()}.values()}
    return {name: marks[id(tensor)] for name, tensor in tensors.items()}


def fingerprint(tensor: torch.Tensor, before: Any = None) -> Any:
    """Return a value that differs, but for a chance of 2⁻⁶³, once any element of a tensor does.

    Not `Tensor._version`: fused optimizers and ``.data`` leave it as it is (torch 2.13). Takes
    0.2 s per GB, on the CPU. A tensor of a kind that cannot be read is never as it was. Where the
    first block is not as it was `before`, the rest is not read: the value is some other one.
    """
    kind = f"{type(tensor).__name__} {tensor.dtype}"
    try:
        if has_no_bytes(tensor):  # nothing in it could change
            return f"{kind} {id(tensor)}" if is_lazy(tensor) else f"{kind} {tensor.shape}"
        plain = (tensor.detach() if is_block(tensor) else encoded(tensor)).contiguous()
        content = [shape_of(tensor), tensor.dtype]
        start = _digest([*content, sums(plain.reshape(-1)[:_FEW])])
        if isinstance(before, str) and not before.startswith(start):
            return object()
        return start + _digest([*content, sums(plain)])
    except Exception:  # whatever a kind of tensor raises that is not made of plain bytes
        return object()


def checksum(tensor: torch.Tensor) -> str:
    """Return a short text for the content of a plain tensor, which differs once a bit does."""
    return _digest([tuple(tensor.shape), tensor.dtype, sums(tensor)])


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def sums(tensor: torch.Tensor) -> Any:
    """Return weighted sums over a strided tensor's bytes, half a MiB each, and its last bytes."""
    import torch

    weights = factors()
    flat: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    even = flat[: len(flat) // 8 * 8]
    # A copy of what begins between two words in memory: it cannot be viewed as words.
    aligned = even.clone() if even.storage_offset() % 8 else even
    parts = aligned.view(torch.int64).split(len(weights))
    each = [int(torch.dot(part, weights[: len(part)])) for part in parts if len(part)]
    return each, bytes(flat[len(even) :].tolist())


@functools.cache
def factors() -> torch.Tensor:
    """Return odd numbers drawn by chance, the same in every process.

    By none of torch's own operations: one on so many elements starts a pool of threads, which a
    fork does not survive, in the notebook.
    """
    import torch

    data = bytearray(hashlib.shake_128(b"nbtrain").digest(8 << 16))
    low = slice(0 if sys.byteorder == "little" else 7, None, 8)
    data[low] = data[low].translate(bytes(byte | 1 for byte in range(256)))
    return torch.frombuffer(data, dtype=torch.int64)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers: NaN is equal to itself."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.contiguous().reshape(-1)
    return flat.view(sizes.get(flat.element_size(), torch.int64))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of a type are equal bit by bit: NaN is equal to itself."""
    import torch

    both = [bits(left), bits(right)]
    if all(b.nbytes % 8 == b.storage_offset() * b.element_size() % 8 == 0 for b in both):
        both = [b.view(torch.int64) for b in both]  # up to three times as fast
    few = slice(_FEW)  # in which most that differ do: torch compares so few without threads
    return both[0][few].equal(both[1][few]) and both[0].equal(both[1])
