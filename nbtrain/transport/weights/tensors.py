"""Knows tensors of every kind: their bytes, whether they changed, and how to fill them in place.

safetensors files hold strided tensors of the common dtypes. Any other tensor that `torch.save` can
write (sparse, nested, quantized, complex) is stored as the bytes that `torch.save` writes.
`torch.load` reads them with ``weights_only=True``, which runs no code of the file.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PLAIN_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
)
"""Dtypes that every reader of safetensors files supports."""


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no shape yet, as in a ``LazyLinear`` before its first batch."""
    return "Uninitialized" in type(tensor).__name__


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory: it is on the meta device, or has no shape yet."""
    return tensor.is_meta or is_lazy(tensor)


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one block of numbers: not sparse, nested or quantized."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_block(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one block of numbers that are stored as they are read.

    That is: strided, and neither conjugated nor negated when it is read. Also True for a subclass,
    and on the meta device.
    """
    return is_strided(tensor) and not tensor.is_conj() and not tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a safetensors file can hold a tensor as it is."""
    return is_block(tensor) and str(tensor.dtype).removeprefix("torch.") in PLAIN_DTYPES


def can_be_saved(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be saved, plain or encoded.

    False for one without memory, or in oneDNN's format.
    """
    return not has_no_bytes(tensor) and not tensor.is_mkldnn


def shared_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor that is in memory shared by processes; 0 for others."""
    if has_no_bytes(tensor) or tensor.device.type != "cpu" or not is_block(tensor):
        return 0
    return tensor.data_ptr() if tensor.is_shared() else 0  # type: ignore[no-untyped-call]


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; for a sharded tensor, of this rank's part.

    0 without memory, on a TPU, and for a tensor that is no block.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    is_in_memory = not has_no_bytes(local) and local.device.type != "xla" and is_block(local)
    return local.untyped_storage().data_ptr() if is_in_memory else 0


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; for a nested tensor, the shapes of its parts in succession.

    Raises for a lazy tensor.
    """
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(length for part in tensor.unbind() for length in part.shape)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's content."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that make up a tensor.

    They are the tensor itself, the parts of a nested one, or the indices (two tensors in a
    compressed layout) and the values of a sparse one.
    """
    import torch

    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # the public ones raise before coalescing
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def stored_kind(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype without "torch.", preceded by its layout if that is not one block.

    For example "float32", "quantized qint8" or "sparse_coo float32".
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_strided(tensor):
        return dtype
    if tensor.is_quantized:
        return f"quantized {dtype}"
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return f"{layout} {dtype}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. Their sum is cheaper, and nearly always decides.

    True for integers and for float8, which torch cannot add up.
    """
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() < 2:
        return True  # torch cannot add up float8
    tensor = tensor.detach()
    wide = torch.float32 if tensor.element_size() == 2 else None  # half precision ends at 65504
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU: itself if it is there already, or has no memory."""
    return tensor if has_no_bytes(tensor) else tensor.detach().cpu()


def encode(tensor: torch.Tensor) -> torch.Tensor:
    """Return all that `decode` needs of a tensor of any kind, as a new tensor of bytes on the CPU.

    Equal tensors have equal bytes. Gradients and the subclass are lost. A tensor in oneDNN's format
    comes back strided.
    """
    import torch

    content = tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach().cpu()
    if is_strided(content):  # without its class, which `torch.load` refuses, and its whole storage
        content = content.as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone()
    return save_to_bytes(content)


def save_to_bytes(content: Any) -> torch.Tensor:
    """Return the bytes that `torch.save` writes for a value, as a tensor of uint8."""
    import torch

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized and nested tensors will change
        torch.save(content, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def decode(data: torch.Tensor) -> Any:
    """Return the value whose bytes `encode` or `save_to_bytes` returned.

    Raises `pickle.UnpicklingError` for a value whose class could run code.
    """
    import torch
    from torch._utils import _rebuild_nested_tensor
    from torch.nested._internal.nested_tensor import NestedTensor, _rebuild_njt

    # torch 2.15 refuses nested tensors unless they are listed.
    safe: list[Any] = [_rebuild_nested_tensor, NestedTensor, _rebuild_njt, set]
    with warnings.catch_warnings(), torch.serialization.safe_globals(safe):
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fingerprint of each tensor. A tied tensor is read once."""
    unique = {id(tensor): tensor for tensor in tensors.values()}
    by_id = {key: fingerprint(to_cpu(tensor)) for key, tensor in unique.items()}
    return {name: by_id[id(tensor)] for name, tensor in tensors.items()}


def fingerprint(tensor: torch.Tensor) -> Any:
    """Return a value that differs once any element of a tensor does: a short text.

    The chance that it does not is 2⁻⁶³. `Tensor._version` does not suffice: fused optimizers and
    ``.data`` leave it unchanged (torch 2.13). Takes 0.2 s per GB, on the CPU. A tensor that cannot
    be read gets a new object, which never equals its earlier fingerprint. Never raises.
    """
    kind = f"{type(tensor).__name__} {tensor.dtype}"
    try:
        if has_no_bytes(tensor):  # it has no content that could change
            return f"{kind} {id(tensor)}" if is_lazy(tensor) else f"{kind} {tensor.shape}"
        plain = (tensor.detach() if is_block(tensor) else encode(tensor)).contiguous()
        return _digest([shape_of(tensor), tensor.dtype, weighted_sums(plain)])
    except Exception:  # from a kind of tensor that is not made of plain bytes
        return object()


def checksum(tensor: torch.Tensor) -> str:
    """Return a short text that differs once a bit of a plain tensor does."""
    return _digest([tuple(tensor.shape), tensor.dtype, weighted_sums(tensor)])


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def weighted_sums(tensor: torch.Tensor) -> tuple[list[int], bytes]:
    """Return weighted sums of a strided tensor's bytes, one for each half MiB, and the rest.

    The rest is the last bytes that fill no word of 8.
    """
    import torch

    weights = odd_weights()
    flat: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    even = flat[: len(flat) // 8 * 8]
    # A block that begins within a word of memory cannot be viewed as words.
    aligned = even.clone() if even.storage_offset() % 8 else even
    blocks = aligned.view(torch.int64).split(len(weights))
    each = [int(torch.dot(block, weights[: len(block)])) for block in blocks if len(block)]
    return each, bytes(flat[len(even) :].tolist())


@functools.cache
def odd_weights() -> torch.Tensor:
    """Return pseudorandom odd numbers, int64, the same in every process.

    Cached. Not drawn by torch: an operation on this many elements starts a pool of threads in the
    notebook, and threads do not survive a fork.
    """
    import torch

    data = bytearray(hashlib.shake_128(b"nbtrain").digest(8 << 16))
    low = slice(0 if sys.byteorder == "little" else 7, None, 8)
    data[low] = data[low].translate(bytes(byte | 1 for byte in range(256)))
    return torch.frombuffer(data, dtype=torch.int64)


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal bit by bit, so that NaN equals itself.

    Their shapes are not compared.
    """
    import torch

    both: Any = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    if all(len(flat) % 8 == flat.storage_offset() % 8 == 0 for flat in both):
        both = [flat.view(torch.int64) for flat in both]
    return bool(both[0].equal(both[1]))


def write_if_changed(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Write a value into a tensor of any kind, in place, and return whether it changed.

    A tensor that only differs in precision stays: a rank may have cast a model for an evaluation. A
    lazy tensor takes the value's shape. The tensor keeps its dtype and device.
    """
    if is_lazy(target):
        target.materialize(value.shape)  # type: ignore[attr-defined]  # as torch's own loading does
    value = value.to(target.device)
    before = target.detach().to(value.dtype)
    if not is_block(target) or not is_block(value):
        if fingerprint(before) == fingerprint(value):
            return False
        _assign_any_kind(target, value)
        return True
    if has_same_bits(before, value):
        return False
    sizes = zip(target.shape, target.stride(), strict=True)
    if any(size > 1 and not stride for size, stride in sizes):  # an expanded one repeats elements
        target.data = value.to(target.dtype, copy=True)
    else:
        target.detach().copy_(value)
    return True


def _assign_any_kind(target: torch.Tensor, value: torch.Tensor) -> None:
    """Set a quantized or sparse tensor to a value, in place.

    A quantized one takes the value's scale, and its memory.
    """
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target.is_quantized:  # `copy_` would keep the scale
            target.data = value
            return
        if str(target.layout).startswith("torch.sparse_") and target.layout != torch.sparse_coo:
            target.resize_as_sparse_(value)  # else `copy_` refuses another number of values
        target.copy_(value)
