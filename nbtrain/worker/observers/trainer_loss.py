"""Finds a training whose loss and gradients transformers' Trainer multiplies by the ranks.

By default (`average_tokens_across_devices`) the Trainer multiplies the loss by the number of
processes, since it takes it that the model has divided it by the items of all of them. It asks no
more than whether ``forward`` accepts any keyword, as nearly all do: most classifiers take the mean
themselves. Seen in transformers 5.15 to 5.24.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from ...findings import Finding
from ...system.instrumentation import patch
from ...system.safe_hooks import telemetry
from ...tracking import events as ev
from .. import api


def watch() -> None:
    """Look at each training of a Trainer when it begins."""
    patch("transformers.trainer:Trainer", "train", _train)


def _train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    _look(trainer)
    return original(trainer, *args, **kwargs)


@telemetry
def _look(trainer: Any) -> None:
    reporter, ranks = api.active, trainer.args.world_size
    if reporter is None or reporter.rank or ranks < 2 or not _is_scaled(trainer):
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT's
    if takes_the_mean(type(model)):
        text = (
            f"The Trainer multiplies the loss and the gradients of {type(model).__name__} by the "
            f"number of ranks, {ranks}: it expects a model that divides its loss by the items of "
            "all ranks, and this one takes a mean."
        )
        remedy = (
            "Pass average_tokens_across_devices=False to TrainingArguments, or set "
            "model.accepts_loss_kwargs = False, which is right with gradient accumulation, too."
        )
        reporter.writer.write(ev.RunNote.of(Finding("loss-multiplied", text, remedy)))


def _is_scaled(trainer: Any) -> bool:
    """Whether the Trainer multiplies the loss of a model that accepts keywords."""
    module = inspect.getmodule(next(c for c in type(trainer).__mro__ if c.__name__ == "Trainer"))
    return bool(
        getattr(trainer.args, "average_tokens_across_devices", False)
        and getattr(trainer, "model_accepts_loss_kwargs", False)
        and getattr(trainer, "compute_loss_func", None) is None
        and not trainer.args.label_smoothing_factor
        and type(trainer).compute_loss is getattr(module, "Trainer").compute_loss  # noqa: B009
    )


def takes_the_mean(model: Any) -> bool:
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
