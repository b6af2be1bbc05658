"""The contract for parts in the process that launches: each part may have a `LaunchSide`."""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from .. import part
from ..engines import Engine
from ..findings import Finding
from ..planning.option_types import Option
from ..planning.plan import Cell, Plan
from ..tracking import events as ev
from ..tracking.launch_log import attempt
from ..tracking.run_folder import RunFolder
from ..tracking.state import RunState
from ..transport.job import Job
from ..ui.displays.html_display import Display, is_marimo
from ..ui.displays.widget_controls import PanelButton, RunButton


class CellPlace(Protocol):
    """A place for cells other than new ranks."""

    @property
    def variables(self) -> Iterable[str]:
        """The names that a cell can use there besides those of the notebook."""

    def run(self, plan: Plan) -> Any:
        """Run a cell there, and return its `Run`. Raises the errors of `nbtrain.launch`."""


class Companion:
    """Takes part in a run, in the process that watches it. A part overrides what it needs."""

    holds_screen = False
    """Whether the board may not be drawn now."""

    def attend(self, state: RunState) -> float:
        """Do the next work; return the most seconds until the next call.

        The launcher calls at least every `POLL_INTERVAL_S`, on a crowded host half as often.
        """
        return math.inf

    def notes(self) -> Sequence[ev.Event]:
        """Return new events for the run since the last call."""
        return ()

    def ranks_ended(self) -> None:
        """Release what belongs to the ranks of an attempt; all of them have ended."""

    def describe_success(self, state: RunState) -> str:
        """Return what is special about a run that has succeeded, for people; "" for nothing."""
        return ""

    def judge(self, end: ev.Finished) -> ev.Finished:
        """Return the end of the run as it is recorded, by default as the launcher judges it."""
        return end

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Handle the end of the run just before it is recorded; return events to record first.

        Long work should check whether the user presses stop again (`is_pressed`).
        """
        return ()


class LaunchSide:
    """What a part does in a launch. A part overrides what it needs."""

    cell_options: Sequence[Option] = ()
    """Options of ``%%distributed`` for this part; `place` and `before_cell` get their values. An
    option whose field or flag is taken is left out."""

    def check(self, plan: Plan) -> None:
        """Check a plan before anything is started. Raises `NbtrainError` to refuse it."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return the engine that starts the ranks, by default `engine`.

        Raises `NbtrainError` to refuse the plan.
        """
        return engine

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        """Return findings about a resolved plan, also those that refuse it."""
        return ()

    def describe_host(self) -> str:
        """Return which devices of this part the host seems to have, for the doctor, or ""."""
        return ""

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Return a run's job with what its ranks need of this part, by default `job`.

        For example `Job.environment`, or a `RankSide` that only some ranks need.
        """
        return job

    def place(self, options: Namespace) -> CellPlace | None:
        """Return the place for a cell with these options; None: new ranks. Raises `PlanError`."""
        return None

    def before_cell(
        self,
        cell: Cell,
        raw: str,
        history: Sequence[str],
        failures: Mapping[int, int],
        options: Namespace,
    ) -> None:
        """Handle a cell that will run next; raise `PlanError` to refuse it.

        `raw` is its text, and `history` has the texts of the cells before it. `failures` maps the
        number of each cell that failed to the line of its error.
        """

    def debug(self, error: BaseException) -> bool:
        """Open ``%debug`` for an exception of a rank; return False if this part cannot."""
        return False

    def display(self, plan: Plan, engine: Engine, board: Callable[[], Display]) -> Display | None:
        """Return what shows a run instead of the `board`; None: the board."""
        return None

    def display_below(self, folder: RunFolder, is_text: bool) -> Display | None:
        """Return what is shown below the board of a run that has started; None for nothing.

        With `is_text`, the board is plain text.
        """
        return None

    def buttons(self, folder: RunFolder) -> Sequence[RunButton | PanelButton]:
        """Return buttons for the board of a run that has started."""
        return ()

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return the part's companion for a run; None without one.

        Called before the ranks start.
        """
        return None


@functools.cache
def launch_sides() -> tuple[LaunchSide, ...]:
    """Return the launch sides of all parts."""
    return tuple(
        part.load(each.launch_side)() for each in part.parts().values() if each.launch_side
    )


def buttons(folder: RunFolder) -> list[RunButton | PanelButton]:
    """Return the parts' buttons for the board of a run that has started."""
    found = (
        attempt("the buttons of a part", partial(side.buttons, folder), ())
        for side in launch_sides()
    )
    return [button for of_part in found for button in of_part]


class _Stack(Display):
    """A display with others below it."""

    def __init__(self, top: Display, below: Sequence[Display]) -> None:
        self._displays = [top, *below]
        self._live = [top, *below] if top.is_in_place else [top]
        """Those that show something before the end: after that, it would come above the top one."""

    def listen(self) -> None:
        for each in self._displays:
            each.listen()

    def update(self, state: RunState, now: float) -> None:
        for each in self._live:
            each.update(state, now)

    def finish(self, state: RunState, now: float) -> None:
        for each in self._displays:
            each.finish(state, now)


def add_below(display: Display, folder: RunFolder) -> Display:
    """Return a display of a run with what parts show below it.

    One that shows nothing is returned as it is, and in marimo, where a cell has one output, any.
    """
    if type(display) is Display or is_marimo():
        return display
    found = (
        attempt("what a part shows", partial(side.display_below, folder, display.is_text), None)
        for side in launch_sides()
    )
    below = [each for each in found if each is not None]
    return _Stack(display, below) if below else display


def companions(
    job: Job, engine: Engine, request_stop: Callable[[str], None]
) -> Iterator[Companion]:
    """Yield the companions of a run, each when it is made: a later one may fail."""
    found = (side.companion(job, engine, request_stop) for side in launch_sides())
    return (each for each in found if each is not None)
