"""Ends the training of a trainer in its own way: of transformers, Lightning and fastai."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ....part_api import Observer, patch, replace, when_imported


class Trainers(Observer):
    """Watches trainers from their start, and has them end once a training should finish.

    `finishing` returns ``step`` or ``epoch`` if the training should end after that, otherwise "".
    """

    purpose = "steering"

    def __init__(self, finishing: Callable[[], str]) -> None:
        self._finishing = finishing
        self._lightning: weakref.ref[Any] | None = None
        when_imported("transformers.trainer", self._add_callback)
        patch("fastai.learner:Learner", "_do_epoch", self._do_epoch)

    def _add_callback(self, module: ModuleType) -> None:
        """Add a callback to those of every later Trainer of transformers."""
        finishing = self._finishing

        class FinishTraining(module.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
                if finishing() == "step":
                    control.should_training_stop = True

            def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
                if finishing():
                    control.should_training_stop = True

        replace(module, "DEFAULT_CALLBACKS", [*module.DEFAULT_CALLBACKS, FinishTraining])

    def _do_epoch(self, original: Any, learner: Any) -> Any:
        """Run an epoch of fastai; after the training has ended, end the fit instead."""
        if self._finishing():
            raise sys.modules["fastai.callback.core"].CancelFitException
        return original(learner)

    def on_lightning_epoch(self, fit_loop: Any) -> None:
        """Remember the loop of Lightning that trains; a later fit of a finished training ends."""
        self._lightning = weakref.ref(fit_loop)
        if self._finishing():
            _stop_lightning(fit_loop)

    def end(self) -> None:
        """Have Lightning end after this step, or after this epoch; seen in 2.0 to 2.6."""
        fit_loop = self._lightning() if self._lightning is not None else None
        if fit_loop is None:
            return
        if self._finishing() == "step":
            _stop_lightning(fit_loop)
        else:
            fit_loop.max_epochs = fit_loop.epoch_progress.current.ready


def _stop_lightning(fit_loop: Any) -> None:
    """Have Lightning stop after this step, also before its least number of epochs or steps."""
    fit_loop.min_epochs = fit_loop.epoch_loop.min_steps = None
    fit_loop.trainer.should_stop = True
