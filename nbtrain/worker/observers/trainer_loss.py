"""Finds a training whose loss and gradients transformers' Trainer multiplies.

The Trainer assumes that a model divides its loss by the items of all ranks and all accumulated
batches, and by default (`average_tokens_across_devices`) multiplies it by the number of ranks. It
checks only whether ``forward`` accepts any keyword, as nearly all models do, while most classifiers
take the mean of one batch. Seen in transformers 5.15 to 5.24.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from typing import Any

from ...findings import Finding
from ...tracking import events as ev
from .. import api
from ..hooks import Observer


class TrainerLoss(Observer):
    """Checks each Trainer when it computes its first loss."""

    purpose = "looking at the Trainer's loss"

    def __init__(self) -> None:
        self._seen = weakref.WeakSet[Any]()

    def on_trainer_loss(self, trainer: Any, items: Any) -> None:
        """Check a Trainer once. Without `items` it multiplies nothing."""
        if trainer not in self._seen:
            self._seen.add(trainer)
            if items is not None:
                _look(trainer)


def _look(trainer: Any) -> None:
    reporter, factors = api.active, _factors(trainer)
    if reporter is None or reporter.rank or not factors:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT's
    if uses_batch_mean(type(model)):
        text = (
            f"The Trainer multiplies the loss and the gradients of {type(model).__name__} by the "
            f"number of {' and of '.join(factors)}: it expects a model that divides its loss by "
            "all items of a step, and this one takes a mean."
        )
        remedy = "Write `model.accepts_loss_kwargs = False` before you create the Trainer."
        if len(factors) == 1 and factors[0].startswith("ranks"):
            remedy = "Pass average_tokens_across_devices=False to TrainingArguments."
        reporter.writer.write(ev.RunNote.of(Finding("loss-multiplied", text, remedy)))


def _factors(trainer: Any) -> list[str]:
    """Return by what the Trainer multiplies the loss of a model that accepts keywords."""
    arguments = trainer.args
    is_divided = getattr(trainer, "compute_loss_func", None) or arguments.label_smoothing_factor
    if is_divided or not getattr(trainer, "model_accepts_loss_kwargs", False):
        return []
    averages = getattr(arguments, "average_tokens_across_devices", False)
    counts = {
        "ranks": arguments.world_size if averages else 1,
        "accumulated batches": arguments.gradient_accumulation_steps,
    }
    return [f"{name} ({count})" for name, count in counts.items() if count > 1]


def uses_batch_mean(model: Any) -> bool:
    """Whether a class computes its loss in ``forward`` without the number of items it is given."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(model.forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError, AttributeError):  # not written in Python, or by hand
        return False
    if "num_items_in_batch" in source:
        return False
    made = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any("loss" in ast.unparse(target) for target in node.targets)
        and isinstance(node.value, ast.Call)
    ]
    gets_all = any(key.arg is None for call in made for key in call.keywords)  # **kwargs
    return not gets_all and any(call.args or call.keywords for call in made)
