"""Stores tensors of every kind as the plain tensors that a safetensors file holds.

A file holds strided tensors of the common dtypes. Another one that `torch.save` can write (sparse,
nested, quantized, complex) is held as that function's bytes; `torch.load` reads them with
``weights_only=True``, which runs no code of the file's.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PLAIN = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
)
"""Dtypes that every reader of safetensors files knows."""

_PART = 32 << 20
"""Elements that are looked at in one call: each call makes a mask of as many."""


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no shape yet: that of a ``LazyLinear``, before its first batch."""
    return "Uninitialized" in type(tensor).__name__


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Whether there is nothing in memory: on the meta device, or without a shape yet."""
    return tensor.is_meta or is_lazy(tensor)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in a block of memory."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of what is in memory: of an expanded dimension, which repeats it, the first."""
    for dim in range(tensor.dim() if is_strided(tensor) else 0):
        if tensor.size(dim) > 1 and not tensor.stride(dim):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_block(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's bytes are its numbers; not if they are conjugated when read."""
    return is_strided(tensor) and not tensor.is_conj() and not tensor.is_neg()


def address(tensor: torch.Tensor) -> int:
    """Return where a block begins in the host's memory; 0 if a tensor is none, or elsewhere."""
    if has_no_bytes(tensor) or tensor.device.type != "cpu" or not is_block(tensor):
        return 0
    return tensor.data_ptr()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a file holds a tensor as it is."""
    return is_block(tensor) and str(tensor.dtype).removeprefix("torch.") in _PLAIN


def fits_a_file(tensor: torch.Tensor) -> bool:
    """Whether a file can hold a tensor, plain or encoded; one in oneDNN's own format it cannot."""
    return not has_no_bytes(tensor) and not tensor.is_mkldnn


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested one, that of its parts one after another."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(length for part in tensor.unbind() for length in part.shape)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's content."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a tensor is made of: itself, or indices and values."""
    import torch

    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # the public ones ask for coalescing
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def stored_kind(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, after how it is kept unless that is in one block of memory."""
    if is_strided(tensor):
        return str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    layout = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else layout
    return f"{layout} {str(tensor.dtype).removeprefix('torch.')}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are numbers. Their sum, which takes less, tells it nearly always."""
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() < 2:
        return True  # torch cannot add up float8
    tensor = tensor.detach()
    wide = torch.float32 if tensor.element_size() == 2 else None  # half precision ends at 65504
    if tensor.sum(dtype=wide).isfinite():
        return True
    return all(bool(part.isfinite().all()) for part in torch.split(tensor.reshape(-1), _PART))


def encoded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any kind as bytes; equal tensors as equal bytes."""
    import torch

    content = tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach().cpu()
    if is_strided(content):  # neither the class, which `torch.load` refuses, nor what it views
        content = content.as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone()
    return saved_bytes(content)


def saved_bytes(content: Any) -> torch.Tensor:
    """Return what `torch.save` writes of a value."""
    import torch

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized or nested tensors will change one day
        torch.save(content, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def decoded(data: torch.Tensor) -> Any:
    """Return the tensor that `encoded`, or the value that `saved_bytes` made bytes of.

    Raises `pickle.UnpicklingError` for a value whose class could run code.
    """
    import torch

    with warnings.catch_warnings(), _nested_are_safe():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


@contextlib.contextmanager
def _nested_are_safe() -> Iterator[None]:
    """Have `torch.load` read nested tensors: torch 2.15 refuses them, as 2.4 does jagged ones."""
    from torch import _utils, serialization
    from torch.nested._internal import nested_tensor

    parts: list[Any] = [_utils._rebuild_nested_tensor, set, nested_tensor.NestedTensor]
    if hasattr(nested_tensor, "_rebuild_njt"):
        parts.append(nested_tensor._rebuild_njt)
    before = serialization.get_safe_globals()
    serialization.add_safe_globals(parts)
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor of any kind another content, in place: what refers to it still does."""
    import torch

    there = value.to(target.device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target.is_quantized:  # `copy_` would keep the scale
            target.data = there
            return
        if str(target.layout).startswith("torch.sparse_") and target.layout != torch.sparse_coo:
            target.resize_as_sparse_(there)  # else `copy_` refuses another number of values
        target.copy_(there)
