"""How a GPU would run a model, simulated on tensors that are on no GPU.

PyTorch's own imitation of a GPU tensor (``FakeTensor`` with the device ``cuda``) initialises CUDA,
which a kernel that forks must not. So the step runs as on a CPU, and operations that a GPU runs in
another way are replaced. Imported only where torch is needed.
"""

from __future__ import annotations

import re
import types
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_IN_FP32 = frozenset(
    re.findall(
        r"\w+",
        """
        __pow__ pow exp expm1 log log2 log10 log1p rsqrt reciprocal cumsum cumprod prod softplus
        layer_norm rms_norm group_norm softmax log_softmax logsumexp cosine_similarity cdist
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div interpolate
        binary_cross_entropy_with_logits cosine_embedding_loss triplet_margin_loss
        """,
    )
)
"""What autocast runs in fp32 on a GPU; on the CPU it runs most of these in half precision
(https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference")."""


class AsCuda(TorchFunctionMode):
    """Dropout with a mask of a byte, attention that keeps no matrix, autocast's list for GPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INSTEAD:
            return _INSTEAD[func](*args, **kwargs)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in _IN_FP32:
            args, kwargs = tree_map_only(torch.Tensor, widened, (args, kwargs))
        return func(*args, **kwargs)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp32 if it is in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention that keeps what fused kernels keep: inputs, output, one number for each query."""
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
    if key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    output: torch.Tensor = kernel(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return output


_INSTEAD: dict[Any, Any] = {
    F.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    F.scaled_dot_product_attention: _attention,
}


def _opened(function: Any) -> Any:
    """Copy a torch function that shows itself, but not what it calls, to a mode.

    The copy does not show itself, so it can run with the mode on.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, names, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPENED = {f: _opened(f) for f in (F.multi_head_attention_forward, torch.autograd.backward)}
"""The function of nn.MultiheadAttention, and backward, in which checkpointing runs forwards."""
