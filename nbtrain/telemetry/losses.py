"""The loss of a training: what backward is called on, before anybody scales it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .. import stopping
from ..imports import when_imported
from ..late import KINDS, LateValues, captures
from .hooks import Hooks

INTERVAL = 0.5
"""Seconds between two losses that are read off a GPU or TPU."""

_UNSCALED = "_nbtrain_unscaled"
"""The attribute of a scaled loss that holds the loss; what is computed from it has none."""


class Losses:
    """Keeps the last loss; a GPU's is read behind the work (see `nbtrain.late`).

    A loss that a scaler made unknown (a sum of scaled ones, say) is not told: no number is better
    than a false one.
    """

    def __init__(self, hooks: Hooks, late: LateValues) -> None:
        self._hooks, self._late = hooks, late
        self._value: float | None = None
        self._told: float | None = None
        self._on_gpu: Any = None  # the last one there, detached: for the end
        self._due = 0.0
        self._quiet = False  # while a library does with the loss what it does
        self._scaling = False  # a loss was scaled since the last step

    def install(self) -> None:
        """Watch backward and who scales before it, now or when it is imported."""
        when_imported("torch", self._watch_backward)
        for module, owner in (
            ("accelerate.accelerator", "Accelerator"),  # divides by the accumulation's steps
            ("deepspeed.runtime.engine", "DeepSpeedEngine"),  # and scales
        ):
            when_imported(module, functools.partial(self._watch_library, owner))
        for module, owner in (
            ("torch.amp.grad_scaler", "GradScaler"),
            ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
        ):
            when_imported(module, functools.partial(self._watch_scaler, owner))
        when_imported("transformers.trainer", self._watch_trainer)
        for package in ("lightning.pytorch", "pytorch_lightning"):
            when_imported(f"{package}.loops.optimization.automatic", self._watch_lightning)

    def take(self) -> float | None:
        """Return the loss that is known and was not taken yet.

        Once: what stands still is no new point of a curve.
        """
        taken, self._value = self._value, None
        self._told = self._told if taken is None else taken
        return taken

    def last(self) -> float | None:
        """Return the last loss that is known, taken or not."""
        return self._told if self._value is None else self._value

    def read_last(self) -> None:
        """Begin to read the last loss on a GPU, however lately one was read."""
        if self._on_gpu is not None:
            self._late.submit({"loss": self._on_gpu}, self._arrived)

    def stepped(self) -> None:
        """Forget that a loss was scaled: what comes after a step may be another training."""
        self._scaling = False

    def _watch_backward(self, torch: ModuleType) -> None:
        losses, original = self, torch.Tensor.backward
        seen = self._hooks.harmless(self._went_backward)

        @functools.wraps(original)
        def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            stopping.before_next(fetch=False)
            if not losses._quiet:
                seen(self)
            return original(self, *args, **kwargs)

        torch.Tensor.backward = backward

    def _watch_library(self, owner: str, module: ModuleType) -> None:
        cls = getattr(module, owner)
        original, seen = cls.backward, self._hooks.harmless(self._saw)

        @functools.wraps(original)
        def backward(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            if self._quiet:  # one library within another
                return original(engine, loss, *args, **kwargs)
            seen(loss)
            self._quiet = True
            try:
                return original(engine, loss, *args, **kwargs)
            finally:
                self._quiet = False

        cls.backward = backward

    def _watch_scaler(self, owner: str, module: ModuleType) -> None:
        """A scaler multiplies the loss, and backward is called on the product."""
        cls = getattr(module, owner)
        original, scaled_it = cls.scale, self._hooks.harmless(self._scaled)

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not self._quiet and scaled is not outputs:  # the same, where it is not enabled
                scaled_it(outputs, scaled)
            return scaled

        cls.scale = scale

    def _watch_trainer(self, module: ModuleType) -> None:
        """Where it accumulates, backward is called on shares of a loss; its own log tells that."""
        original = module.Trainer.training_step

        @functools.wraps(original)
        def training_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._quiet
            self._quiet = before or getattr(trainer, "current_gradient_accumulation_steps", 1) > 1
            try:
                return original(trainer, *args, **kwargs)
            finally:
                self._quiet = before

        module.Trainer.training_step = training_step

    def _watch_lightning(self, module: ModuleType) -> None:
        """It divides the loss by the batches of an accumulation; seen in 2.0 to 2.6."""
        cls = module.ClosureResult
        original = cls.from_training_step_output
        divided = self._hooks.harmless(self._divided)

        @functools.wraps(original)
        def from_output(output: Any, normalize: int = 1) -> Any:
            result = original(output, normalize)
            if normalize != 1:
                divided(output, result.closure_loss)
            return result

        cls.from_training_step_output = staticmethod(from_output)

    def _divided(self, output: Any, share: Any) -> None:
        if share is not None:
            whole = output["loss"] if isinstance(output, Mapping) else output
            setattr(share, _UNSCALED, whole.detach())

    def _scaled(self, losses: Any, products: Any) -> None:
        self._scaling = True
        if hasattr(losses, "detach"):
            losses, products = [losses], [products]
        if isinstance(losses, (list, tuple)):  # an iterator's products are still to be made
            for loss, product in zip(losses, products, strict=True):
                if hasattr(product, "detach"):  # not a list within the list
                    setattr(product, _UNSCALED, getattr(loss, _UNSCALED, loss).detach())

    def _went_backward(self, tensor: Any) -> None:
        loss = getattr(tensor, _UNSCALED, None)
        if loss is not None:
            self._saw(loss)
        elif not self._scaling:
            self._saw(tensor)

    def _saw(self, loss: Any) -> None:
        """Take note of a loss: now, since who made it may change it in place."""
        torch: Any = sys.modules["torch"]
        ordinary = type(loss) in (torch.Tensor, torch.nn.Parameter) and loss.is_floating_point()
        if not ordinary or loss.ndim:
            return
        if loss.device.type == "cpu":
            self._value = loss.item()
        elif loss.device.type in KINDS:  # others would be waited for
            # On a TPU, a step that keeps its loss is another program than one that does not: all
            # keep it, those too whose loss is not read.
            self._on_gpu = loss.detach()
            now = time.monotonic()
            if now >= self._due and not _is_capturing(loss):
                self._due = now + INTERVAL
                self.read_last()

    def _arrived(self, values: dict[str, Any]) -> None:
        if "loss" in values:
            self._value = float(values["loss"])


def _is_capturing(loss: Any) -> bool:
    return loss.device.type == "cuda" and captures.under_way(sys.modules["torch"])
