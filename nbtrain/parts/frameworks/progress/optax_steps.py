"""Counts the steps that optax makes outside of `jit`.

Inside, Python runs once, while JAX traces: a step could be counted by a callback in the compiled
program alone, which is another program then. So nothing is added there, and nothing counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from types import ModuleType
from typing import Any

from ....part_api import (
    REPORT_INTERVAL_S,
    EventWriter,
    Observer,
    clock,
    guard_step,
    hooks,
    patch,
    rank_context,
)
from ....part_api import events as ev
from ....worker.observers.totals.training_place import TrainingPlace

_PURPOSE = "counting the steps of optax"


def watch(
    module: ModuleType | Any, _sources: Collection[str], writer: EventWriter, rank: int
) -> None:
    """Patch ``optax.apply_updates``, so that the updates outside of `jit` are counted."""
    meter = UpdateMeter(writer, rank)
    hooks.add(meter)

    def apply(original: Any, params: Any, updates: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(params, updates, *args, **kwargs)
        meter.count(updates)
        return result

    patch(module, "apply_updates", apply)


class UpdateMeter(Observer):
    """Counts updates outside of `jit`, and reports them twice a second."""

    purpose = _PURPOSE

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank, self._context = writer, rank, rank_context.get()
        self._place = TrainingPlace()
        self._steps = 0
        self._began: float | None = None
        self._due = 0.0

    @guard_step(_PURPOSE)
    def count(self, updates: Any) -> None:
        """Count an update as a step, unless JAX traces it, and report the count if that is due."""
        jax: Any = sys.modules["jax"]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(updates)[:1]):
            return
        self._context.optimizer_steps += 1
        self._steps = self._context.optimizer_steps
        now = time.monotonic()
        if now >= self._due:
            self._began, self._due = self._began or now, now + REPORT_INTERVAL_S
            self._place.look(self._steps, 0)
            self._report()

    def on_training_end(self, wait: bool) -> None:
        """Report the last count, unless another training came after it."""
        if self._began is not None and self._steps == self._context.optimizer_steps:
            self._report()

    def _report(self) -> None:
        elapsed = time.monotonic() - (self._began or 0.0)
        place = self._place.report(self._steps, 0, None, None, None)
        counts = {"steps": self._steps, "elapsed": elapsed, **place._asdict()}
        self._writer.write(ev.TrainingUpdate(clock.now(), self._rank, **counts))
