"""Shows what ranks displayed below the board, each display as an output of the cell."""

from __future__ import annotations

import math
from typing import Any

from ...system.text import format_ranks
from ...tracking import events as ev
from ...tracking.state import RankState, RunState
from .. import limits
from .html_display import Display, is_marimo, show

_EMPTY = {"text/plain": "", "text/html": ""}


class RankOutputs:
    """Shows what rank 0 or `rank` displays: new displays below, updates in their place."""

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self._slots: list[tuple[Any, ev.Displayed | None]] = []
        self._labelled: int | None = None
        self._updated_at = -math.inf

    def update(self, state: RunState, now: float) -> None:
        """Show new and changed displays, at most once in MAX_DRAW_INTERVAL_S."""
        if not 0 <= now - self._updated_at < limits.MAX_DRAW_INTERVAL_S:
            self._updated_at = now
            self._show(state.ranks[self._rank or 0])

    def finish(self, state: RunState) -> None:
        """Show all displays of rank 0, or of the first rank with any, and name the other ranks.

        Only ranks that displayed something are named. With a chosen rank, only its displays are
        shown.
        """
        talkers = [rank for rank in state.ranks if rank.displayed]
        if self._rank is not None or state.ranks[0].displayed:
            self._show(state.ranks[self._rank or 0])
        elif talkers:
            self._show(talkers[0])
        others = [rank.rank for rank in talkers if rank.rank != self._labelled]
        if self._rank is None and others:
            verb = "has displays, too" if len(others) == 1 else "have displays, too"
            text = f"{format_ranks(others)} {verb}: run.show(rank={others[0]})"
            show(_label(text))

    def _show(self, rank: RankState) -> None:
        """Show a rank's displays: new ones below, changed ones in place, cleared ones empty.

        Does nothing if it has not displayed anything, and in marimo. A label with the rank comes
        first, once.
        """
        if not rank.displayed or is_marimo():
            return
        if self._labelled is None:
            self._labelled = rank.rank
            show(_label(f"rank {rank.rank}:"))
        for index, event in enumerate(rank.displayed):
            if index == len(self._slots):
                self._slots.append((show(dict(event.data)), event))
            elif self._slots[index][1] is not event:
                handle = self._slots[index][0]
                handle.update(dict(event.data), raw=True)
                self._slots[index] = handle, event
        # The rank cleared these displays.
        for index in range(len(rank.displayed), len(self._slots)):
            handle, previous = self._slots[index]
            if previous is not None:
                handle.update(_EMPTY, raw=True)
                self._slots[index] = handle, None


class WithOutputs(Display):
    """A display of a run, and below it what its ranks display: at the end or, if `live`, always."""

    def __init__(self, display: Display, *, live: bool) -> None:
        self._display, self._live = display, live
        self.is_in_place = display.is_in_place
        self._outputs = RankOutputs()

    def listen(self) -> None:
        self._display.listen()

    def update(self, state: RunState, now: float) -> None:
        self._display.update(state, now)
        if self._live:
            self._outputs.update(state, now)

    def finish(self, state: RunState, now: float) -> None:
        self._display.finish(state, now)
        self._outputs.finish(state)


def _label(text: str) -> dict[str, str]:
    html = f'<div style="opacity:.7;font-size:12px">{text}</div>'
    return {"text/plain": text, "text/html": html}
