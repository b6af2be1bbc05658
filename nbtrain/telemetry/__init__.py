"""What a rank reports without being asked. Each source can be left out.

Installed in the rank, after it has become one; nothing is undone there but `finish`, which tells
the last figures. (The inline engine, whose rank is the kernel, installs but the tracker, and
takes it away again.)
"""

from __future__ import annotations

from collections.abc import Collection

from .. import report
from ..late import captures
from ..plan import SOURCES, Plan
from . import bars, hooks, libraries
from .strays import Strays
from .training import Meter

_meter: Meter | None = None


def install(sources: Collection[str] = SOURCES, plan: Plan | None = None) -> None:
    """Watch this rank's training, whether its libraries are imported already or later.

    `plan` is what it runs, as far as it is known: the notebook's models are found in its task.
    """
    global _meter
    reporter = report.active()
    if reporter is None:
        return
    hooks.stay_out_of_compiling()
    libraries.leave_the_notebook()
    captures.watch()
    if "bars" in sources:
        bars.install()
    if {"steps", "loss", "data", "phases"} & set(sources):
        task = plan.task if plan is not None else None
        _meter = Meter(reporter.writer, reporter.rank, reporter.late, task)
        _meter.install(sources)
    if "steps" in sources and plan is not None and reporter.rank == 0:
        Strays(plan, reporter.writer).install()
    if "trainer" in sources:
        libraries.watch_trainer()
    if "tracker" in sources:
        libraries.offer_tracker()


def finish(wait: bool) -> None:
    """Tell the last figures: the training is over. With `wait`, those on their way too."""
    reporter = report.active()
    if reporter is not None:
        reporter.late.finish(wait)
    if _meter is not None:
        _meter.finish(wait)
