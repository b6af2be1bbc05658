"""Patches transformers, Lightning and Accelerate in a rank, so that it sees their logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...system.instrumentation import patch, replace, when_imported
from ...system.safe_hooks import telemetry
from .. import api
from .totals import training_place


def hide_notebook_from_lightning() -> None:
    """Have Lightning treat a rank like a process of torchrun, not like a notebook.

    In a notebook it forks processes of its own where it is given more than one device.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        replace(f"{package}.trainer.connectors.accelerator_connector", "_IS_INTERACTIVE", False)
    for package in ("lightning.fabric", "lightning_fabric"):  # seen in 2.0 to 2.6
        replace(f"{package}.connector", "_IS_INTERACTIVE", False)


def watch_trainer() -> None:
    """Report as metrics what transformers' `Trainer` and Lightning log; have them use tqdm bars."""
    when_imported("transformers.trainer", _watch_trainer)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        name = f"{package}.trainer.connectors.callback_connector"
        when_imported(name, _replace_rich_bar)
        connector = f"{package}.trainer.connectors.logger_connector.logger_connector"
        patch(f"{connector}:_LoggerConnector", "log_metrics", _log_of_lightning)  # 2.0 to 2.6
    training_place.watch_lightning()


def _replace_rich_bar(module: Any) -> None:
    """Lightning draws with rich where it is installed, which needs a screen that no rank has."""
    if hasattr(module, "TQDMProgressBar"):  # seen in 2.0 to 2.6
        replace(module, "RichProgressBar", module.TQDMProgressBar)


def _log_of_lightning(
    original: Any, connector: Any, metrics: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(connector, metrics, *args, **kwargs)
    if metrics and not connector.trainer.sanity_checking:  # without a logger it comes here, too
        _report_values(metrics, int(connector.trainer.global_step))
    return result


def _watch_trainer(module: Any) -> None:
    # In a notebook its progress is a table that a forked rank cannot show; a tqdm bar is reported.
    replace(module, "DEFAULT_PROGRESS_CALLBACK", module.ProgressCallback)

    class ReportLogs(module.TrainerCallback):  # type: ignore[misc]
        first = epoch = 0  # the step and the epoch at which it began: not 0 after a restart

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.first, self.epoch = int(state.global_step), int(state.epoch or 0)
            self._moved(state)

        def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.epoch += 1
            self._moved(state)

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._moved(state)

        def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._moved(state, is_over=True)

        def _moved(self, state: Any, is_over: bool = False) -> None:
            training_place.trainer_moved(state, first=self.first, epoch=self.epoch, is_over=is_over)

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
            if numbers:
                api.log_values(int(state.global_step), numbers)

    replace(module, "DEFAULT_CALLBACKS", [*module.DEFAULT_CALLBACKS, ReportLogs])


def watch_accelerate() -> None:
    """Report what ``accelerator.log`` is given, whatever tracker it is for."""
    patch("accelerate.accelerator:Accelerator", "log", _log)


def _log(
    original: Any, accelerator: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any
) -> Any:
    result = original(accelerator, values, step, *args, **kwargs)
    trackers = getattr(accelerator, "trackers", ())
    if accelerator.is_main_process and not any(t.name == "nbtrain" for t in trackers):
        _report_values(values, step)
    return result


@telemetry
def _report_values(values: Any, step: Any) -> None:
    api.log_values(step, {str(k): v for k, v in dict(values).items() if api.is_metric(v)})


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
