"""Reports a rank's training without any code of the user's. Each source can be turned off.

`install` runs in the rank once the process has become one, and is not undone. The inline engine,
whose rank is the kernel, offers the tracker only, and withdraws it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ...planning.option_types import SOURCES
from ...planning.plan import Plan
from .. import api, hooks, stopping
from ..device_scalars import captures
from ..hooks import Observer
from . import integrations
from .bars import Bars
from .evidence.not_copied_back import NotCopiedBack
from .phases import PhaseMeter
from .tensor_memory import TensorMemoryMeter
from .totals.training_place import LibraryPlaces
from .training_meter import TrainingMeter


def install(
    sources: Collection[str] = SOURCES, plan: Plan | None = None, *, ranks_stay: bool = False
) -> None:
    """Add the observers of this rank's training, for libraries that are imported now or later.

    Does nothing in a process that is no rank. `plan` is what the rank runs, if it is known: its
    task names the notebook's models. If the `ranks_stay`, the models that they make stay, too, and
    are not reported as lost.
    """
    reporter = api.active
    if reporter is None:
        return
    hooks.begin_task()
    integrations.hide_notebook_from_lightning()
    captures.watch()
    if "trainer" in sources:
        integrations.draw_with_tqdm()
    if "tracker" in sources:
        integrations.offer_tracker()
    if {"steps", "loss", "data"} & set(sources):
        TrainingMeter(reporter, plan).listen(sources)
    for observer in _observers(reporter, sources, plan, ranks_stay):
        hooks.add(observer)
    hooks.begin_steps()


def _observers(
    reporter: api.Reporter, sources: Collection[str], plan: Plan | None, ranks_stay: bool
) -> Iterator[Observer]:
    """Yield the observers beside the meter, in the order of notification."""
    writer, rank = reporter.writer, reporter.rank
    if "steps" in sources:
        yield TensorMemoryMeter(writer, rank, plan.task if plan else None)
        if plan is not None and rank == 0:
            yield NotCopiedBack(plan, writer, ranks_stay)
        if stopping.active is not None:
            yield stopping.active
    if "phases" in sources:
        yield PhaseMeter(writer, rank)
    if "bars" in sources:
        yield Bars(writer, rank)
    if "trainer" in sources:
        yield from (LibraryPlaces(), integrations.LoggedValues())
    if "tracker" in sources:
        yield integrations.AcceleratorLogs()


def finish(wait: bool) -> None:
    """Report the last figures of a training; with `wait`, wait for those on a device."""
    if api.active is not None:
        api.active.late.finish(wait)
    hooks.tell("on_training_end", wait)
