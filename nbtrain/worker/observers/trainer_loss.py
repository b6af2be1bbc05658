"""Finds a training whose loss and gradients transformers' Trainer multiplies.

The Trainer takes it that a model has divided its loss by the items of all ranks and all accumulated
batches, and by default (`average_tokens_across_devices`) multiplies it by the number of ranks. It
asks no more than whether ``forward`` accepts any keyword, as nearly all do: most classifiers take
the mean of one batch. Seen in transformers 5.15 to 5.24.
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
    reporter, factors = api.active, _factors(trainer)
    if reporter is None or reporter.rank or not factors:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT's
    if takes_the_mean(type(model)):
        text = (
            f"The Trainer multiplies the loss and the gradients of {type(model).__name__} by the "
            f"number of {' and of '.join(factors)}: it expects a model that divides its loss by "
            "all items of a step, and this one takes a mean."
        )
        remedy = "Write `model.accepts_loss_kwargs = False` before you create the Trainer."
        if len(factors) == 1 and factors[0].startswith("ranks"):
            remedy += " Or pass average_tokens_across_devices=False to TrainingArguments."
        reporter.writer.write(ev.RunNote.of(Finding("loss-multiplied", text, remedy)))


def _factors(trainer: Any) -> list[str]:
    """Return by what the Trainer multiplies the loss of a model that accepts keywords."""
    arguments = trainer.args
    module = inspect.getmodule(next(c for c in type(trainer).__mro__ if c.__name__ == "Trainer"))
    is_own = type(trainer).compute_loss is not vars(module)["Trainer"].compute_loss
    if is_own or not getattr(trainer, "model_accepts_loss_kwargs", False):
        return []
    if getattr(trainer, "compute_loss_func", None) or arguments.label_smoothing_factor:
        return []
    averages = getattr(arguments, "average_tokens_across_devices", False)
    counts = {
        "ranks": arguments.world_size if averages else 1,
        "accumulated batches": arguments.gradient_accumulation_steps,
    }
    return [f"{name} ({count})" for name, count in counts.items() if count > 1]


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
