"""Reports a rank's training without any code of the user's. Each source can be turned off.

`install` runs in the rank once the process has become one, and is not undone. The inline engine,
whose rank is the kernel, offers the tracker only, and withdraws it.
"""

from __future__ import annotations

from collections.abc import Collection

from ...planning.option_types import SOURCES
from ...planning.plan import Plan
from ...system import safe_hooks
from .. import api
from ..device_scalars import captures
from . import fastai, integrations, progress_bars, trainer_loss
from .evidence.unsynced import UnsyncedModels
from .training_meter import TrainingMeter

_meter: TrainingMeter | None = None


def install(
    sources: Collection[str] = SOURCES, plan: Plan | None = None, *, ranks_stay: bool = False
) -> None:
    """Watch this rank's training, whether its libraries are imported already or later.

    `plan` is what the rank runs, where it is known: its task names the notebook's models. Where
    the `ranks_stay`, so do the models that they make.
    """
    global _meter
    reporter = api.active
    if reporter is None:
        return
    safe_hooks.activate()
    integrations.hide_notebook_from_lightning()
    captures.watch()
    if "bars" in sources:
        progress_bars.install()
    if {"steps", "loss", "data", "phases"} & set(sources):
        _meter = TrainingMeter(reporter, plan)
        _meter.install(sources)
    if "steps" in sources and plan is not None and reporter.rank == 0:
        UnsyncedModels(plan, reporter.writer, ranks_stay).install()
    if "trainer" in sources:
        integrations.watch_trainer()
        trainer_loss.watch()
        fastai.watch_recorder()
    if "tracker" in sources:
        integrations.offer_tracker()
        integrations.watch_accelerate()


def meter() -> TrainingMeter | None:
    """Return what watches this rank's training, if something does."""
    return _meter


def finish(wait: bool) -> None:
    """Report the last figures of a training that is over; with `wait`, also those on their way."""
    reporter = api.active
    if reporter is not None:
        reporter.late.finish(wait)
    if _meter is not None:
        _meter.finish(wait)
