"""Transformers' Trainer: where it stands, and what it logs."""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import replace, when_imported
from .observer import notify


def watch() -> None:
    """Notify of progress and logs."""
    when_imported("transformers.trainer", _watch)


def _watch(module: Any) -> None:
    """Make every later Trainer notify of its progress and logs.

    Adds a callback to transformers' default callbacks, once in a process.
    """
    if any(each.__name__ == "TellObservers" for each in module.DEFAULT_CALLBACKS):
        return

    class TellObservers(module.TrainerCallback):  # type: ignore[misc]
        first = epoch = 0  # the step and the epoch of its start, not 0 after a restart

        def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            notify.on_shared_batches(getattr(args, "steps_per_generation", None) or 1)
            self.first, self.epoch = int(state.global_step), int(state.epoch or 0)
            self._report_position(state)

        def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.epoch += 1
            self._report_position(state)

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._report_position(state)

        def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            notify.on_shared_batches(1)
            self._report_position(state, is_over=True)

        def _report_position(self, state: Any, is_over: bool = False) -> None:
            notify.on_trainer_progress(state, self.first, self.epoch, is_over)

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
            if numbers:
                notify.on_log(numbers, int(state.global_step))

    replace(module, "DEFAULT_CALLBACKS", [*module.DEFAULT_CALLBACKS, TellObservers])
