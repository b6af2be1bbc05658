"""Optimizers by name, and the size of their states."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import PlanError
from .breakdown import Parts


class _EightBit(torch.optim.Optimizer):
    """Holds what bitsandbytes' 8-bit AdamW holds: two bytes per parameter, two scales per 256."""

    def __init__(self, params: Iterable[Any], **_: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter not in self.state:
                self.state[parameter] = {
                    "moments": torch.zeros(2 * parameter.numel(), dtype=torch.uint8),
                    "scales": torch.zeros(2 * -(-parameter.numel() // 256)),
                }


_NAMED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {}, 8),
    "adam": (torch.optim.Adam, {}, 8),
    "adamw8bit": (_EightBit, {}, 2),
    "adagrad": (torch.optim.Adagrad, {}, 4),
    "rmsprop": (torch.optim.RMSprop, {}, 4),
    "sgd": (torch.optim.SGD, {}, 0),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}, 4),
}
"""Each optimizer's class, options, and bytes per parameter in fp32, by `breakdown`'s textbook."""


def make(optimizer: Any, parameters: dict[int, Any], device: str) -> torch.optim.Optimizer:
    """Make an optimizer by its name, or like the notebook's, for parameters without memory.

    These are given by the `id` of the real ones.
    """
    if not isinstance(optimizer, str):
        return _like(getattr(optimizer, "optimizer", optimizer), parameters, device)  # Accelerate's
    if optimizer not in _NAMED:
        raise PlanError(
            f"no optimizer is called {optimizer!r}; there are {', '.join(_NAMED)}, none "
            "(inference), and the notebook's own optimizers"
        )
    cls, options, _ = _NAMED[optimizer]
    trained = [p for p in parameters.values() if p.requires_grad]
    if not trained:
        raise PlanError("no parameter requires a gradient; for inference use --optimizer none")
    made: torch.optim.Optimizer = cls(trained, lr=0.1, **options, **_loops(cls, {}, device))
    return made


def _like(inner: Any, parameters: dict[int, Any], device: str) -> torch.optim.Optimizer:
    cls = type(inner)
    try:
        groups = [
            {**group, "params": [parameters[id(p)] for p in group["params"]]}
            | _loops(cls, group, device)
            for group in inner.param_groups
        ]
    except KeyError:
        raise PlanError(
            "the optimizer trains parameters that are not the model's: give its own model, or "
            "name the optimizer (adamw, sgd, …)"
        ) from None
    known = inspect.signature(cls).parameters
    made: torch.optim.Optimizer = cls(
        groups, **{name: value for name, value in inner.defaults.items() if name in known}
    )
    return made


def _loops(cls: Any, group: dict[str, Any], device: str) -> dict[str, Any]:
    """Return how it goes over parameters: by default, a GPU takes all at once, with room."""
    if "foreach" not in inspect.signature(cls).parameters:
        return {}
    if group.get("fused"):  # fused needs no room, and one at a time next to none
        return {"fused": None, "foreach": False}
    chosen = group.get("foreach")
    return {"foreach": device == "cuda" if chosen is None else chosen}


def textbook(name: str, model: torch.nn.Module, precision: str, shards: int) -> Parts:
    """Return what a rank needs by the rule of thumb, with all sharded over `shards` ranks."""
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    half = sum(2 * p.numel() for p in model.parameters() if p.dtype is torch.float32)
    states = _NAMED[name][2] if name in _NAMED else 0
    return Parts(
        weights=every // shards,
        copies=0 if precision == "no" else half // shards,
        gradients=0 if name == "none" else trained // shards,
        optimizer_states=states * trained // 4 // shards,
    )
