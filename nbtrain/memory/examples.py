"""Batches to run a model with: made up by its configuration, or shaped like a real one.

Imported only where torch is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PlanError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Example = Callable[[int], Inputs]
"""Returns what to call a model with, for so many rows."""


def of_shape(model: Any, shape: tuple[int, ...]) -> list[Example]:
    """Return examples of a shape that the model may take, the likely one first."""
    name = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if name == "input_ids" and config is not None:
        return [_text(model, config, shape)]
    if name == "pixel_values" and config is not None:
        return [_images(model, config, shape)]
    if config is not None and name is not None:
        raise PlanError(
            f"a batch of {name} cannot be made up for {type(model).__name__}: give one of your "
            "own (--batch-from NAME, or batch=)"
        )
    return [_tensor(shape, torch.float32), _tensor(shape, torch.int64)]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Example:
    return lambda rows: ((torch.zeros(rows, *shape[1:], dtype=dtype),), {})


def _text(model: Any, config: Any, shape: tuple[int, ...]) -> Example:
    if len(shape) != 2:
        raise PlanError("the batch of a text model is rows × tokens: 8x512 (--batch 8x512)")
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < shape[1]:
        raise PlanError(f"{type(model).__name__} takes {longest} tokens at most, not {shape[1]}")
    return lambda rows: (
        (),
        {
            "input_ids": torch.zeros(rows, shape[1], dtype=torch.int64),
            **_labels(model, rows, (rows, shape[1])),
        },
    )


def _images(model: Any, config: Any, shape: tuple[int, ...]) -> Example:
    size = getattr(config, "image_size", None)
    sides = shape[2:] if len(shape) == 4 else (size, size) if isinstance(size, int) else size
    channels = shape[1] if len(shape) == 4 else getattr(config, "num_channels", 3)
    if len(shape) not in (1, 4) or not sides:
        raise PlanError(
            f"the batch of {type(model).__name__} is rows (--batch 8), or rows × channels × height "
            "× width (--batch 8x3x224x224)"
        )
    return lambda rows: (
        (),
        {
            "pixel_values": torch.zeros(rows, channels, *sides),
            **_labels(model, rows, None),
        },
    )


def _labels(model: Any, rows: int, tokens: tuple[int, int] | None) -> dict[str, Any]:
    """Make up the labels that a transformers model computes its loss from, by its class's name."""
    name, known = type(model).__name__, inspect.signature(model.forward).parameters
    if "start_positions" in known:
        ones = torch.zeros(rows, dtype=torch.int64)
        return {"start_positions": ones, "end_positions": ones.clone()}
    if "labels" not in known or (tokens is None and "Classification" not in name):
        return {}
    if "TokenClassification" in name or "Classification" not in name:
        single = "NextSentence" in name
        return {"labels": torch.zeros(rows if single or not tokens else tokens, dtype=torch.int64)}
    regression = getattr(model.config, "num_labels", 2) == 1
    return {"labels": torch.zeros(rows, dtype=torch.float32 if regression else torch.int64)}


def rows_of(batch: Any) -> int:
    """Return how many rows a real batch has: the first length of its first tensor."""
    found = [t for t in tree_leaves(_plain(batch)) if isinstance(t, torch.Tensor) and t.dim()]
    if not found:
        raise PlanError(
            f"a batch is a tensor, or a dict, list or tuple of tensors, not {type(batch).__name__} "
            "(of a loader: batch = next(iter(loader)))"
        )
    return int(found[0].shape[0])


def like(model: Any, batch: Any) -> Example:
    """Return an example shaped as a real batch; of it nothing is read but shapes and types.

    A dict goes in by name. Of a tuple, as many as the model takes: (inputs, labels) may be one's
    own loss's affair.
    """
    batch, rows = _plain(batch), rows_of(batch)
    many = isinstance(batch, (list, tuple))
    taken = batch[: _positions(model, len(batch))] if many else batch

    def example(wanted: int) -> Inputs:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            fits = tensor.dim() and tensor.shape[0] == rows
            shape = (wanted, *tensor.shape[1:]) if fits else tensor.shape
            return torch.zeros(shape, dtype=tensor.dtype)

        made = tree_map_only(torch.Tensor, resized, taken)
        if isinstance(made, dict):
            return (), made
        return (tuple(made) if many else (made,)), {}

    return example


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _positions(model: Any, given: int) -> int:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return given
    needed = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return min(given, max(1, needed))
