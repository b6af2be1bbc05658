"""What transformers, Lightning and Accelerate say of a training, taken where they say it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .. import report
from ..imports import when_imported


def leave_the_notebook() -> None:
    """Have Lightning take a rank for what torchrun starts, and not for the notebook.

    In a notebook it forks processes of its own where it is told of more than one device.
    """
    for name in (
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "lightning.fabric.connector",
        "pytorch_lightning.trainer.connectors.accelerator_connector",
        "lightning_fabric.connector",
    ):
        # Found out at its import, from sys.ps1; seen in 2.0 to 2.6.
        when_imported(name, lambda module: vars(module).update(_IS_INTERACTIVE=False))


def watch_trainer() -> None:
    """Make the logs of transformers' `Trainer` metrics; its bar, and Lightning's, ordinary ones."""
    when_imported("transformers.trainer", _watch_trainer)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{package}.trainer.connectors.callback_connector", _watch_lightning)


def _watch_lightning(module: Any) -> None:
    """Lightning draws with rich where it is installed, which no rank has a screen for."""
    if hasattr(module, "RichProgressBar") and hasattr(module, "TQDMProgressBar"):  # 2.0 to 2.6
        module.RichProgressBar = module.TQDMProgressBar


def _watch_trainer(module: Any) -> None:
    # In a notebook its progress is a table that a forked rank cannot show; a bar is caught.
    module.DEFAULT_PROGRESS_CALLBACK = module.ProgressCallback

    class LogsBecomeMetrics(module.TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
            if numbers:
                report.log_values(int(state.global_step), numbers)

    module.DEFAULT_CALLBACKS = [*module.DEFAULT_CALLBACKS, LogsBecomeMetrics]


def offer_tracker() -> Callable[[], None]:
    """Make ``Accelerator(log_with="nbtrain")`` work in this process; return what undoes it."""
    name = "accelerate.tracking"
    cancel = when_imported(name, _register)

    def take_back() -> None:
        cancel()
        if name in sys.modules:
            sys.modules[name].LOGGER_TYPE_TO_CLASS.pop("nbtrain", None)

    return take_back


def _register(module: Any) -> None:
    known = module.LOGGER_TYPE_TO_CLASS
    if "nbtrain" not in known:
        known["nbtrain"] = tracker_class(module)


def tracker_class(module: Any) -> type:
    """Return the tracker, made for the Accelerate that is installed."""

    class NbtrainTracker(module.GeneralTracker):  # type: ignore[misc]
        """Puts what ``accelerator.log`` is given on nbtrain's board."""

        name = "nbtrain"
        requires_logging_directory = False
        main_process_only = False  # where Accelerate lets other ranks have one, they report too

        def __init__(self, run_name: str = "", **_options: Any) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            """Nothing: what is logged goes to the rank's own file."""

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Print the configuration, so that the log has it."""
            print("configuration:", ", ".join(f"{k}={v}" for k, v in values.items()))

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Report the values as metrics."""
            report.log_values(step, {str(k): v for k, v in values.items() if report.is_metric(v)})

    return NbtrainTracker
