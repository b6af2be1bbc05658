"""Reports a rank's training without any code of the user's. Each source can be turned off.

`install` runs in the rank once the process has become one, and is not undone. The inline engine,
whose rank is the kernel, offers the tracker only, and withdraws it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import hooks
from ..device_scalars import captures
from ..hooks import Observer
from ..rank_context import RankContext
from . import integrations
from .bars import Bars
from .data_loading import DataLoadingMeter
from .epochs import EpochMeter
from .evidence.not_copied_back import NotCopiedBack
from .evidence.work_sample import WorkSampler
from .loss import LossMeter
from .phases import PhaseMeter
from .precision import PrecisionMeter
from .reports import TrainingReports
from .steps import StepMeter
from .tensor_memory import TensorMemoryMeter
from .totals.training_place import LibraryPlaces


def install(context: RankContext) -> None:
    """Begin to observe a task's training, in libraries that are imported now or later.

    Call it once per task. It also hides the notebook from Lightning and, if their sources are on,
    makes trainers draw with tqdm and offers the tracker.
    """
    sources = context.job.plan.telemetry
    hooks.begin_task()
    integrations.hide_notebook_from_lightning()
    captures.watch()
    if "trainer" in sources:
        integrations.draw_with_tqdm()
    if "tracker" in sources:
        integrations.offer_tracker()
    places = LibraryPlaces()
    _add_meters(context, places)
    for observer in _observers(context, places):
        hooks.add(observer)
    hooks.begin_steps()


def _add_meters(context: RankContext, places: LibraryPlaces) -> None:
    """Add the meters of a training and their reports, in the order of notification.

    That of an epoch uses the figures of the others at the same step. At the end, the reports write
    the last counts before it writes the last epoch. A meter whose source is off counts nothing.
    """
    sources, on = context.job.plan.telemetry, hooks.notify
    if not {"steps", "loss", "data"} & set(sources):
        return
    figures, writer, rank = context.figures, context.writer, context.rank
    steps, precision, loss = StepMeter(context), PrecisionMeter(), LossMeter(context)
    data = DataLoadingMeter(figures, writer, rank)
    epochs = EpochMeter(figures, writer, rank, places)
    work = WorkSampler(context)
    reports = TrainingReports(context, (steps, precision, data, loss, epochs, work))
    if has_steps := "steps" in sources:
        hooks.add(steps)
        hooks.add(precision)
    if "data" in sources:
        hooks.add(data, without=() if has_steps else (on.on_step,))
    if "loss" in sources:
        hooks.add(loss, without=() if has_steps else (on.on_step,))
    hooks.add(reports, on.on_training_end)
    if has_steps:
        hooks.add(epochs)
        if context.world_size > 1:
            hooks.add(work, without=() if "loss" in sources else (on.on_backward,))
        hooks.add(reports, on.on_step)
    if "data" in sources:
        hooks.add(reports, on.on_batch)


def _observers(context: RankContext, places: LibraryPlaces) -> Iterator[Observer]:
    """Yield the observers beside the meters, in the order of notification."""
    plan, writer, rank = context.job.plan, context.writer, context.rank
    sources = plan.telemetry
    if "steps" in sources:
        yield TensorMemoryMeter(writer, rank, plan.task)
        if rank == 0:
            yield NotCopiedBack(plan, writer, context.job.ranks_stay)
        if context.stopper is not None:
            yield context.stopper
    if "phases" in sources:
        yield PhaseMeter(writer, rank)
    if "bars" in sources:
        yield Bars(writer, rank)
    if "trainer" in sources:
        yield from (places, integrations.LoggedValues())
    if "tracker" in sources:
        yield integrations.AcceleratorLogs()


def finish(context: RankContext, wait: bool) -> None:
    """Report the last figures of a training; with `wait`, wait for those on a device."""
    context.scalars.finish(wait)
    hooks.notify.on_training_end(wait)
