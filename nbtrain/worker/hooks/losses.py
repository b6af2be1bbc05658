"""Hooks for backward, with the loss as it was before it was scaled or divided."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...system.instrumentation import patch
from .guard import telemetry
from .hook_state import state
from .observer import notify

_UNSCALED = "_nbtrain_unscaled"
"""The attribute of a scaled loss that refers to the loss; results computed from it lack it."""

_DIVISOR = "_nbtrain_divisor"
"""The attribute of a detached loss with what it was divided by."""


def watch() -> None:
    """Notify of backward, and of what scales a loss before it."""
    patch("torch:Tensor", "backward", _backward)
    # Accelerate divides by the steps of the accumulation, and DeepSpeed scales, too.
    patch("accelerate.accelerator:Accelerator", "backward", library_backward)
    patch("deepspeed.runtime.engine:DeepSpeedEngine", "backward", library_backward)
    sharded = "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"
    patch("torch.amp.grad_scaler:GradScaler", "scale", _scale)
    patch(sharded, "scale", _scale)
    patch("transformers.trainer:Trainer", "training_step", _trainer_step)
    for package in ("lightning.pytorch", "pytorch_lightning"):  # seen in 2.0 to 2.6
        result = f"{package}.loops.optimization.automatic:ClosureResult"
        patch(result, "from_training_step_output", _closure_result)


def forget_scaling() -> None:
    """Forget that a loss was scaled, at a step: another training may follow."""
    state.is_loss_scaled = False


def divisor(loss: Any) -> int:
    """Return the integer that a loss was last divided by, as in ``loss / steps``; otherwise 1.

    Also 1 for a tensor or a float as the divisor. Its node in the graph has it (private, seen in
    torch 2.7 to 2.13).
    """
    node: Any = getattr(loss, "grad_fn", None)
    if type(node).__name__ == "AliasBackward0":  # made a subclass of tensors, again
        node = node.next_functions[0][0]
    if node is None:
        return int(getattr(loss, _DIVISOR, 1))
    if type(node).__name__ != "DivBackward0":  # `node.name()` takes 4 µs in a training
        return 1
    other = node._saved_other
    is_whole = other.ndim == 0 and other.device.type == "cpu" and not other.is_floating_point()
    return int(other) if is_whole and other.dtype.is_signed else 1


def _backward(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``Tensor.backward``, and notify of the loss before any scaling, if that is known.

    Does not notify of the loss while a library that scales it calls, or of a product of unknown
    losses.
    """
    notify.on_fetch_or_backward(False)
    if state.is_loss_paused:
        return original(tensor, *args, **kwargs)
    loss = getattr(tensor, _UNSCALED, None)
    if loss is not None or not state.is_loss_scaled:
        _notify(tensor if loss is None else loss)
    # A subclass's backward comes here again, from its `__torch_function__`.
    is_subclass = type(tensor) is not sys.modules["torch"].Tensor
    return _pause_observers(is_subclass, original, tensor, *args, **kwargs)


def _notify(loss: Any) -> None:
    """Notify of backward if the loss is a tensor of one number.

    A subclass that only has methods of its own (fastai's, MONAI's) holds a value as a tensor does,
    and observers use it as one. One that computes in its own way (DTensor) is left out, because
    reading it may need other ranks.
    """
    torch: Any = sys.modules["torch"]
    if type(loss) is torch.Tensor:
        if loss.is_floating_point() and not loss.ndim:
            notify.on_backward(loss)
    elif (
        isinstance(loss, torch.Tensor)
        and type(loss).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    ):
        with torch._C.DisableTorchFunctionSubclass():
            if loss.is_floating_point() and not loss.ndim:
                notify.on_backward(loss)


def library_backward(original: Any, engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a library's backward, and notify of the loss as it was before the library scaled it."""
    if not state.is_loss_paused:  # else one library calls another
        _notify(loss)
    return _pause_observers(True, original, engine, loss, *args, **kwargs)


def _scale(original: Any, scaler: Any, outputs: Any) -> Any:
    """Return the scaled loss, and keep the loss with it: backward is called on the product."""
    scaled = original(scaler, outputs)
    if scaled is not outputs:  # the same where it is not enabled
        notify.on_loss_scaling()
        if not state.is_loss_paused:
            _remember_unscaled(outputs, scaled)
    return scaled


def _trainer_step(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the Trainer's step; if it accumulates gradients, do not notify of its losses.

    Backward then gets only a share of the loss. The Trainer's own log has the whole one.
    """
    steps = trainer.args.gradient_accumulation_steps
    steps = getattr(trainer, "current_gradient_accumulation_steps", steps)  # transformers 5
    return _pause_observers(steps > 1, original, trainer, *args, **kwargs)


def _pause_observers(is_paused: bool, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function; with `is_paused`, do not notify of losses until it returns."""
    before, state.is_loss_paused = state.is_loss_paused, state.is_loss_paused or is_paused
    try:
        return original(*args, **kwargs)
    finally:
        state.is_loss_paused = before


def _closure_result(original: Any, cls: Any, output: Any, normalize: int = 1) -> Any:
    """Return Lightning's closure result, and keep the loss from before its division with it.

    Lightning divides by the batches of an accumulation.
    """
    result = original(cls, output, normalize)
    if normalize != 1:
        _remember_undivided(output, result.closure_loss)
    return result


@telemetry
def _remember_undivided(output: Any, share: Any) -> None:
    if share is not None:
        whole = output["loss"] if isinstance(output, Mapping) else output
        setattr(share, _UNSCALED, whole.detach())


@telemetry
def _remember_unscaled(losses: Any, products: Any) -> None:
    """Keep each loss with its scaled product, as an attribute of the product.

    Until `forget_scaling`, a tensor without that attribute is not reported as a loss.
    """
    state.is_loss_scaled = True
    if hasattr(losses, "detach"):
        losses, products = [losses], [products]
    if isinstance(losses, (list, tuple)):  # an iterator's products do not exist yet
        for loss, product in zip(losses, products, strict=True):
            if hasattr(product, "detach"):  # not a list within the list
                whole = getattr(loss, _UNSCALED, loss).detach()
                setattr(whole, _DIVISOR, divisor(loss))
                setattr(product, _UNSCALED, whole)
