"""Optimizers by name, and what their states take. Imported only where torch is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import PlanError
from . import anatomy

Make = Callable[[dict[int, Any]], torch.optim.Optimizer]
"""Makes an optimizer of parameters: those without memory, by the `id` of the real ones."""


class _EightBit(torch.optim.Optimizer):
    """Holds what bitsandbytes' 8-bit AdamW holds: two bytes a parameter, a scale each 256.

    Tensors of less than 4096 numbers stay in 32 bits, as there.
    """

    def __init__(self, params: Iterable[Any], **_: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter not in self.state:
                small = parameter.numel() < 4096
                like = torch.zeros_like(parameter, dtype=torch.float32 if small else torch.uint8)
                scales = torch.zeros(0 if small else -(-parameter.numel() // 256))
                self.state[parameter] = {
                    name: tensor.clone() for name in ("m", "v") for tensor in (like,)
                }
                self.state[parameter] |= {"scale_m": scales, "scale_v": scales.clone()}


_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "adamw8bit": ("", {}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}


def named(name: str, device: str) -> Make:
    """Return how to make the optimizer of that name."""
    if name not in _NAMED:
        raise PlanError(
            f"no optimizer is called {name!r}: {', '.join(_NAMED)}, none (for inference alone), "
            "or an optimizer of the notebook's"
        )
    class_name, options = _NAMED[name]
    cls = getattr(torch.optim, class_name, None) if class_name else _EightBit
    if cls is None:
        raise PlanError(f"torch {torch.__version__} has no {class_name}")

    def make(parameters: dict[int, Any]) -> torch.optim.Optimizer:
        trained = [p for p in parameters.values() if p.requires_grad]
        if not trained:
            raise PlanError("no parameter requires a gradient: ask for inference, --optimizer none")
        return cls(trained, lr=0.1, **options, **_loops(cls, {}, device))

    return make


def like(optimizer: Any, device: str) -> Make:
    """Return how to make one as the notebook's, of other parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    cls = type(inner)

    def make(parameters: dict[int, Any]) -> torch.optim.Optimizer:
        try:
            groups = [
                {**group, "params": [parameters[id(p)] for p in group["params"]]}
                | _loops(cls, group, device)
                for group in inner.param_groups
            ]
        except KeyError:
            raise PlanError(
                "the optimizer trains parameters that are not the model's: give the model that it "
                "was made for, or its name (adamw, sgd, …)"
            ) from None
        known = inspect.signature(cls).parameters
        made: torch.optim.Optimizer = cls(
            groups, **{k: v for k, v in inner.defaults.items() if k in known}
        )
        return made

    return make


def _loops(cls: Any, group: dict[str, Any], device: str) -> dict[str, Any]:
    """Choose how it goes over its parameters: all at once, with room for it, is a GPU's default."""
    if "foreach" not in inspect.signature(cls).parameters:
        return {}
    if group.get("fused"):  # needs no room, as one at a time needs next to none
        return {"fused": None, "foreach": False}
    chosen = group.get("foreach")
    return {"foreach": device == "cuda" if chosen is None else chosen}


_STATES = {"adamw": 8, "adam": 8, "adamw8bit": 2, "sgd-momentum": 4, "rmsprop": 4, "adagrad": 4}
"""Bytes a parameter in fp32, by the textbook (`anatomy` says which)."""


def textbook(name: str, model: torch.nn.Module, precision: str, shards: int) -> anatomy.Parts:
    """Return what a rank needs by the rule of thumb, with a share of the states in `shards`."""
    every = sum(p.numel() * p.element_size() for p in model.parameters()) // shards
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    half = sum(2 * p.numel() for p in model.parameters() if p.dtype is torch.float32)
    return anatomy.Parts(
        weights=every,
        copies=0 if precision == "no" else half // shards,
        gradients=0 if name == "none" else trained // shards,
        optimizer_states=_STATES.get(name, 0) * trained // 4 // shards,
    )
