"""Has Accelerate know nbtrain as a tracker, and Lightning and transformers run in a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...system.instrumentation import patch, replace, when_imported
from .. import api
from ..hooks import Observer


class LoggedValues(Observer):
    """Reports as metrics what libraries log."""

    def on_log(self, values: Any, step: int | None) -> None:
        """Report what is a number or a short text."""
        _report_values(values, step)


class AcceleratorLogs(Observer):
    """Reports what ``accelerator.log`` is given on the main process, for any tracker."""

    def on_accelerate_log(self, accelerator: Any, values: Any, step: int | None) -> None:
        """Report the values, unless nbtrain's own tracker has."""
        trackers = getattr(accelerator, "trackers", ())
        if accelerator.is_main_process and not any(t.name == "nbtrain" for t in trackers):
            _report_values(values, step)


def _report_values(values: Any, step: int | None) -> None:
    api.log_values(step, {str(k): v for k, v in dict(values).items() if api.is_metric(v)})


def hide_notebook_from_lightning() -> None:
    """Have Lightning treat a rank like a process of torchrun, not like a notebook.

    In a notebook it forks processes of its own where it is given more than one device.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        replace(f"{package}.trainer.connectors.accelerator_connector", "_IS_INTERACTIVE", False)
    for package in ("lightning.fabric", "lightning_fabric"):  # seen in 2.0 to 2.6
        replace(f"{package}.connector", "_IS_INTERACTIVE", False)


def draw_with_tqdm() -> None:
    """Have transformers and Lightning show tqdm's bars, which are reported."""
    when_imported("transformers.trainer", _replace_table)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        name = f"{package}.trainer.connectors.callback_connector"
        when_imported(name, _replace_rich_bar)


def _replace_table(module: Any) -> None:
    """In a notebook, the Trainer's progress is a table that a forked rank cannot show."""
    replace(module, "DEFAULT_PROGRESS_CALLBACK", module.ProgressCallback)


def _replace_rich_bar(module: Any) -> None:
    """Lightning draws with rich where it is installed, which needs a screen that no rank has."""
    if hasattr(module, "TQDMProgressBar"):  # seen in 2.0 to 2.6
        replace(module, "RichProgressBar", module.TQDMProgressBar)


def offer_tracker() -> Callable[[], None]:
    """Make ``Accelerator(log_with="nbtrain")`` work in this process; return what undoes it."""
    name = "accelerate.tracking"
    cancel = when_imported(
        name, lambda m: m.LOGGER_TYPE_TO_CLASS.setdefault("nbtrain", _tracker_class(m))
    )
    undo = patch("accelerate.accelerator", "filter_trackers", _let_nbtrain_pass)

    def withdraw() -> None:
        undo()
        cancel()
        if name in sys.modules:
            sys.modules[name].LOGGER_TYPE_TO_CLASS.pop("nbtrain", None)

    return withdraw


def _let_nbtrain_pass(original: Any, log_with: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return the trackers to make; below 1.15 Accelerate refuses names that are not its own."""
    asked = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    # Not `in`: another tracker may be an object with an equality of its own.
    others = [each for each in asked if not (isinstance(each, str) and each == "nbtrain")]
    if len(others) == len(asked):
        return list(original(log_with, *args, **kwargs))
    return [*original(others, *args, **kwargs), "nbtrain"]


def _tracker_class(module: Any) -> type:
    """Return the tracker, made for the Accelerate that is installed."""

    class NbtrainTracker(module.GeneralTracker):  # type: ignore[misc]
        """Reports what ``accelerator.log`` is given as metrics of the rank."""

        name = "nbtrain"
        requires_logging_directory = False
        main_process_only = False  # where Accelerate lets other ranks have one, they report too

        def __init__(self, run_name: str = "", **_options: Any) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            """Return nothing: what is logged goes to the rank's own file."""

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Print the configuration into the rank's log."""
            print("configuration:", ", ".join(f"{k}={v}" for k, v in values.items()))

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Report the values as metrics."""
            api.log_values(step, {str(k): v for k, v in values.items() if api.is_metric(v)})

    return NbtrainTracker
