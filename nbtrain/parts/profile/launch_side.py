"""Shows the profile that a launch asks for, below the board."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ...part_api import (
    Display,
    Engine,
    LaunchSide,
    NbtrainError,
    Plan,
    PlanError,
    RunFolder,
    RunState,
    last_run,
    show,
)
from ...ui.displays import select
from ...ui.displays.terminal import TextDisplay
from .files import recordings


class ProfileLaunch(LaunchSide):
    """Refuses a profile where nothing can be recorded, and shows the one that is."""

    def check(self, plan: Plan) -> None:
        """Refuse a profile of ranks whose steps nbtrain does not count. Raises `PlanError`."""
        if plan.profile is not None and "steps" not in plan.telemetry:
            raise PlanError("profile needs `steps` in --telemetry: it records optimizer steps")

    def display(self, plan: Plan, engine: Engine, board: Callable[..., Display]) -> Display | None:
        """Return a board with the profile below it, if the launch asks for one."""
        if plan.profile is None:
            return None
        return WithProfile(select.with_outputs(board(inline=engine.runs_in_kernel)), plan.view)


class WithProfile(Display):
    """A display of the run with its first profile below, once the ranks have recorded it."""

    def __init__(self, board: Display, view: str) -> None:
        self._board = board
        self._prints = isinstance(board, TextDisplay) and not board.keep_html
        self._is_silent = view == "none"
        self._run: Any = None
        self._handle: Any = None
        self._is_shown = False

    def listen(self) -> None:
        self._board.listen()

    def update(self, state: RunState, now: float) -> None:
        """Update the board, and show the profile once it is there."""
        self._board.update(state, now)
        if self._run is None:
            self._run = last_run()
            if not (self._prints or self._is_silent):
                # In the background, only this call belongs to the cell: its output comes here.
                self._handle = show({"text/plain": "", "text/html": ""})
        if not self._is_shown:
            self._show(state)

    def finish(self, state: RunState, now: float) -> None:
        """Show the end of the run, and the profile as it is known now."""
        self._board.finish(state, now)
        self._show(state)  # also what is known only now, as how many samples each rank trained on
        self._run = None  # a display lives as long as its cell

    def _show(self, state: RunState) -> None:
        """Show the first profile, if it is there."""
        if self._run is None or not any(recordings(RunFolder(self._run.folder))):
            return
        from .profile import profiles_of

        with contextlib.suppress(OSError, NbtrainError):  # the folder was deleted
            for profile in profiles_of(self._run)[:1]:
                self._is_shown = True
                text = repr(profile)
                if self._handle is not None:
                    page = {"text/html": profile._repr_html_(), "text/plain": text}
                    self._handle.update(page, raw=True)
                elif state.is_over and not self._is_silent:
                    print(text)
