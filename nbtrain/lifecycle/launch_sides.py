"""What a part does in the process that launches: each part may have a `LaunchSide`."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .. import part
from ..engines import Engine
from ..findings import Finding
from ..planning.plan import Cell, Plan
from ..tracking import events as ev
from ..tracking.state import RunState
from ..transport.job import Job


class CellPlace(Protocol):
    """Where cells run instead of in new ranks."""

    @property
    def variables(self) -> Iterable[str]:
        """The names that a cell finds there beside the notebook's."""

    def run(self, plan: Plan) -> Any:
        """Run a cell there, and return its `Run`. Raises what `nbtrain.launch` does."""


class Companion:
    """What goes along with a run in the process that watches it; a part overrides what it needs."""

    holds_screen = False
    """Whether nothing else may be drawn now."""

    def attend(self, state: RunState) -> bool:
        """Do what is due; return whether to be asked again in some ms: somebody types."""
        return False

    def notes(self) -> Sequence[ev.Event]:
        """Return events for the run since the last call."""
        return ()

    def ranks_ended(self) -> None:
        """Let go of ranks: all of an attempt have ended."""

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Hear how the run ended, just before that is written; return events that precede it.

        Where this takes long, ask whether a stop `is_pressed` meanwhile.
        """
        return ()


class LaunchSide:
    """A part's side of a launch; a part overrides what it needs."""

    def check(self, plan: Plan) -> None:
        """Refuse a plan. Raises `NbtrainError`; nothing was started."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return the engine that starts the ranks, by default the one that was chosen.

        Raises `NbtrainError`; nothing was started.
        """
        return engine

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        """Return what may go wrong with a plan that is resolved, and what refuses it."""
        return ()

    def place(self, options: Namespace) -> CellPlace | None:
        """Return where a cell with these options runs, if not in new ranks. Raises `PlanError`."""
        return None

    def before_cell(
        self,
        cell: Cell,
        raw: str,
        history: Sequence[str],
        failures: Mapping[int, int],
        options: Namespace,
    ) -> None:
        """Do something with a cell that is about to run. Raises `PlanError`.

        `raw` is its text, `history` has the texts of the cells before it, and `failures` the line
        at which a cell failed, by the cell's number.
        """

    def debug(self, error: BaseException) -> bool:
        """Open ``%debug`` for an exception of a rank; False if it is not this part's."""
        return False

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return what goes along with a run; called before its ranks start."""
        return None


@functools.cache
def launch_sides() -> tuple[LaunchSide, ...]:
    """Return the sides of all parts."""
    return tuple(
        part.load(each.launch_side)() for each in part.parts().values() if each.launch_side
    )


def companions(job: Job, engine: Engine, request_stop: Callable[[str], None]) -> list[Companion]:
    """Return all that goes along with a run."""
    found = (side.companion(job, engine, request_stop) for side in launch_sides())
    return [each for each in found if each is not None]
