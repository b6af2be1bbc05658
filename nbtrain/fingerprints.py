"""Whether a tensor is as it was: fingerprints, of a few bytes, and the bits themselves."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no shape yet: that of a ``LazyLinear``, before its first batch."""
    return "Uninitialized" in type(tensor).__name__


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Whether there is nothing in memory: on the meta device, or without a shape yet."""
    return tensor.is_meta or is_lazy(tensor)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU: itself if it is there already, or has no bytes."""
    return tensor if has_no_bytes(tensor) else tensor.detach().cpu()


def fits_a_file(tensor: torch.Tensor) -> bool:
    import torch

    return not has_no_bytes(tensor) and tensor.layout is torch.strided


def parted(
    tensors: Mapping[str, torch.Tensor], before: Mapping[str, Any], enough: float
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of what changed, and the fingerprints of the rest; one tensor at a time.

    Once more than `enough` bytes did, whatever fits a file counts as changed, unread.
    """
    size = 0
    marks, copies = dict[int, Any](), dict[int, Any]()
    changed, same = dict[str, Any](), dict[str, str]()
    for name, tensor in tensors.items():
        key = id(tensor)  # tied weights are one
        here = copies[key] if key in copies else on_cpu(tensor)
        if size > enough and fits_a_file(here):
            marks[key] = None
        elif key not in marks:
            marks[key] = fingerprint(here)
        if marks[key] is not None and marks[key] == before.get(name):
            same[name] = marks[key]
        else:
            size += here.nbytes if key not in copies and fits_a_file(here) else 0
            changed[name] = copies[key] = here
    return changed, same


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fingerprint of each tensor; those of tied ones are taken once."""
    told = {id(t): fingerprint(on_cpu(t)) for t in {id(t): t for t in tensors.values()}.values()}
    return {name: told[id(tensor)] for name, tensor in tensors.items()}


def fingerprint(tensor: torch.Tensor) -> Any:
    """Return what differs, but for a chance of 2⁻⁶³, once any element of a tensor does.

    Not `Tensor._version`: fused optimizers and ``.data`` leave it as it is (torch 2.13). Takes
    0.1 s a GB, on the CPU. A tensor of a kind that cannot be read is never as it was.
    """
    kind = f"{type(tensor).__name__} {tensor.dtype}"
    try:
        if has_no_bytes(tensor):  # nothing in it could change
            return f"{kind} {id(tensor)}" if is_lazy(tensor) else f"{kind} {tensor.shape}"
        told = [tensor.shape, tensor.dtype, *map(_sum, dense_parts(tensor.detach()))]
    except Exception:  # whatever a kind of tensor raises that is not made of plain bytes
        return object()
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a tensor is made of: itself, or indices and values."""
    import torch

    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # the public ones ask for coalescing
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _sum(tensor: torch.Tensor) -> Any:
    import torch

    factors = _factors()
    flat: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    even: Any = flat[: len(flat) // 8 * 8].view(torch.int64)
    sums = tuple(int(torch.dot(part, factors[: len(part)])) for part in even.split(len(factors)))
    return sums, bytes(flat[len(even) * 8 :].tolist())


@functools.cache
def _factors() -> torch.Tensor:
    import torch

    chance = torch.Generator("cpu").manual_seed(1)  # its own: the notebook's goes on as it was
    low, high, size = -(2**63), 2**63 - 1, (1 << 16,)
    # Whatever the user's default device is.
    return torch.randint(low, high, size, generator=chance, dtype=torch.int64, device="cpu") | 1


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers: NaN is equal to itself."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.contiguous().reshape(-1)
    return flat.view(sizes.get(flat.element_size(), torch.int64))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a type are equal bit by bit: NaN is equal to itself."""
    import torch

    both = [bits(one), bits(other)]
    if all(b.nbytes % 8 == b.storage_offset() * b.element_size() % 8 == 0 for b in both):
        both = [b.view(torch.int64) for b in both]  # up to three times as fast
    return both[0].equal(both[1])
