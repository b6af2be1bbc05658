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
from .evidence.not_copied_back import NotCopiedBack
from .phases import PhaseMeter
from .tensor_memory import TensorMemoryMeter
from .totals.training_place import LibraryPlaces
from .training_meter import TrainingMeter


def install(context: RankContext) -> None:
    """Add the observers of a task's training, for libraries that are imported now or later."""
    sources = context.job.plan.telemetry
    hooks.begin_task()
    integrations.hide_notebook_from_lightning()
    captures.watch()
    if "trainer" in sources:
        integrations.draw_with_tqdm()
    if "tracker" in sources:
        integrations.offer_tracker()
    places = LibraryPlaces()
    if {"steps", "loss", "data"} & set(sources):
        TrainingMeter(context, places).listen(sources)
    for observer in _observers(context, places):
        hooks.add(observer)
    hooks.begin_steps()


def _observers(context: RankContext, places: LibraryPlaces) -> Iterator[Observer]:
    """Yield the observers beside the meter, in the order of notification."""
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
