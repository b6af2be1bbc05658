"""Shows a run as an output of a notebook, and updates it through its display id."""

from __future__ import annotations

import math
import sys
from typing import Any

from ...system.host import is_crowded
from ...tracking.state import RunState
from .. import limits, text_summary
from ..board import board


class Display:
    """Shows a run while it lasts, and then its final state. This base class shows nothing."""

    is_text = False
    """Whether it only prints."""
    is_in_place = True
    """Whether its final state is where it has been from the start, and not at the end of a text."""

    def listen(self) -> None:
        """Handle what the user did on the page. Called often, also while drawing fails."""

    def update(self, state: RunState, now: float) -> None:
        """Show the present state. Called often; draws only when a drawing is due."""

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state, which stays on the page."""


def ipython_shell() -> Any:
    """Return the running IPython shell; None in plain Python."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def execution_count() -> int | None:
    """Return the number of the running cell; None if no cell runs."""
    count: int | None = getattr(ipython_shell(), "execution_count", None)
    return count


def bundle(state: RunState, now: float) -> dict[str, Any]:
    """Return what a notebook stores of a run, by MIME type: HTML and text."""
    return {"text/html": board.render(state, now), "text/plain": text_summary.summary(state, now)}


def is_marimo() -> bool:
    """Return whether a cell of a marimo notebook runs in this thread."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and bool(marimo.running_in_notebook())


class _MarimoOutput:
    """The output of marimo's running cell. A new drawing replaces the one before."""

    def update(self, data: dict[str, Any], raw: bool = True) -> None:
        marimo = sys.modules["marimo"]
        marimo.output.replace(marimo.Html(data["text/html"]))


def show(output: Any) -> Any:
    """Display a widget or a dictionary of MIME types; return a handle that updates the output.

    Without IPython, prints the text of a dictionary and returns None. In marimo, replaces what the
    cell showed.
    """
    if is_marimo():
        handle = _MarimoOutput()
        handle.update(output)
        return handle
    if ipython_shell() is None and isinstance(output, dict):
        print(output.get("text/plain", ""))
        return None
    from IPython import display

    display_function: Any = display.display
    return display_function(output, raw=isinstance(output, dict), display_id=True)


class Pace:
    """Decides when a new drawing is due: something changed, or a second passed.

    On a host whose cores are all busy, drawings take time from the ranks, so they are fewer.
    """

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._drawn = -math.inf

    def claim_drawing(self, state: RunState, now: float) -> bool:
        """Return whether to draw now, and count True as a drawing: the caller must draw.

        `now` is in seconds. A changed state is drawn after MIN_DRAW_INTERVAL_S, an unchanged one
        after MAX_DRAW_INTERVAL_S, and on a crowded host only after the latter. The first call
        returns True.
        """
        passed = now - self._drawn
        is_slow = state is self._state or is_crowded()
        interval = limits.MAX_DRAW_INTERVAL_S if is_slow else limits.MIN_DRAW_INTERVAL_S
        if 0 <= passed < interval:
            return False
        late = passed - interval  # the next drawing comes earlier by this time
        self._drawn = now - (late if 0 <= late < interval else 0)
        self._state = state
        return True


class HtmlDisplay(Display):
    """One HTML output, updated in place through its display id."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._pace = Pace()

    def update(self, state: RunState, now: float) -> None:
        if self._pace.claim_drawing(state, now):
            self._draw(state, now)

    def finish(self, state: RunState, now: float) -> None:
        self._draw(state, now)

    def _draw(self, state: RunState, now: float) -> None:
        """Show the board, or replace the one that is shown."""
        data = bundle(state, now)
        if self._handle is None:
            self._handle = show(data)
        else:
            self._handle.update(data, raw=True)
