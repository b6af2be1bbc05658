"""Makes batches to run a model with: from its configuration, or with a real one's shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ...part_api import PlanError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Example = Callable[[], Inputs]
"""Returns the arguments to call a model with."""


def make_examples(model: Any, shape: tuple[int, ...]) -> list[Example]:
    """Return examples of a shape that the model may accept, the likely one first.

    Raises `PlanError` if the shape does not suit the model, or its configuration says that it takes
    neither texts nor images.
    """
    name = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if name is None or config is None:
        return [_tensor(shape, torch.float32), _tensor(shape, torch.int64)]
    if name == "input_ids":
        return _texts(model, shape)
    if name == "pixel_values":
        pixels = _pixels(type(model).__name__, config, shape)
        return [lambda: ((), {name: torch.zeros(shape[0], *pixels)})]
    raise PlanError(
        f"nbtrain cannot invent a batch of {name} for {type(model).__name__}: give a real "
        "batch (--batch-from NAME, or batch=)"
    )


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Example:
    return lambda: ((torch.zeros(shape, dtype=dtype),), {})


def _texts(model: Any, shape: tuple[int, ...]) -> list[Example]:
    """Return examples of token ids: first with a label per token, where the model takes labels.

    Classification gets none: the loss of a whole text keeps next to nothing, and the output's sum
    stands for it. Raises `PlanError` if the shape is not rows × tokens, or has more tokens than the
    model takes.
    """
    if len(shape) != 2:
        raise PlanError("the batch of a text model must be rows × tokens: --batch 8x512")
    name, longest = type(model).__name__, getattr(model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < shape[1]:
        raise PlanError(f"{name} takes {longest} tokens at most, not {shape[1]}")

    def example(*names: str) -> Example:
        return lambda: ((), {name: torch.zeros(shape, dtype=torch.int64) for name in names})

    labelled = "labels" in inspect.signature(model.forward).parameters
    if labelled and "Classification" not in name:
        return [example("input_ids", "labels"), example("input_ids")]
    return [example("input_ids")]


def _pixels(name: str, config: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one image: as it is given, or as the configuration has it.

    Raises `PlanError` for a shape of neither one nor four numbers, and for one number if the
    configuration has no size.
    """
    size = getattr(config, "image_size", None)
    if len(shape) == 4:
        return shape[1:]
    if len(shape) != 1 or not size:
        raise PlanError(
            f"the batch of {name} must be rows (--batch 8), or rows × channels × "
            "height × width (--batch 8x3x224x224)"
        )
    sides = (size, size) if isinstance(size, int) else size
    return (getattr(config, "num_channels", 3), *sides)


def rows_of(batch: Any) -> int:
    """Return how many rows a real batch has: the first length of its first tensor.

    Raises `PlanError` if the batch has no tensor with a dimension.
    """
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    if not tensors:
        raise PlanError(
            f"a batch must be a tensor, or a dict, list or tuple of tensors, not "
            f"{type(batch).__name__}; to take one from a loader: batch = next(iter(loader))"
        )
    return int(tensors[0].shape[0])


def like(model: Any, batch: Any, wanted: int) -> Example:
    """Return an example like a real batch, with `wanted` rows; of it, only shapes and types count.

    A dict is passed by name. Of a tuple, the model gets as many items as it requires: in
    (inputs, labels), the labels may be for the user's loss.
    """
    rows, many = rows_of(batch), isinstance(batch, (list, tuple))
    inputs = batch[: _positions(model, len(batch))] if many else batch

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dim() and tensor.shape[0] == rows
        shape = (wanted, *tensor.shape[1:]) if fits else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

    def example() -> Inputs:
        made = tree_map_only(torch.Tensor, resize, inputs)
        if isinstance(made, dict):
            return (), made
        return (tuple(made) if many else (made,)), {}

    return example


def _positions(model: Any, given: int) -> int:
    """Return how many of the `given` tensors a model's ``forward`` takes by position."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return given
    needed = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return min(given, max(1, needed))
