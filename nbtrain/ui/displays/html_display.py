"""Shows a run as an output of a notebook, and updates it through its display id."""

from __future__ import annotations

import sys
import time
from typing import Any

from ...system.host import is_crowded
from ...tracking.state import RunState
from .. import limits, text_summary
from ..board import board


class Display:
    """Shows a run while it goes on, and its final state; this one shows nothing."""

    def listen(self) -> None:
        """Handle what the user did on the page; called often, also while drawing fails."""

    def update(self, state: RunState, now: float) -> None:
        """Show the present state; called often, draws now and then."""

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state, to stay."""


def ipython_shell() -> Any:
    """Return the running IPython shell; None in plain Python."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def execution_count() -> int | None:
    """Return the number of the running cell; None if no cell runs."""
    count: int | None = getattr(ipython_shell(), "execution_count", None)
    return count


def bundle(state: RunState, now: float) -> dict[str, Any]:
    """Return the forms of a run that a notebook stores: HTML and text."""
    return {"text/html": board.render(state, now), "text/plain": text_summary.summary(state, now)}


def in_marimo() -> bool:
    """Return whether a cell of a marimo notebook runs in this thread."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and bool(marimo.running_in_notebook())


class _MarimoOutput:
    """The output of marimo's running cell: a picture takes the place of the one before."""

    def update(self, data: dict[str, Any], raw: bool = True) -> None:
        marimo = sys.modules["marimo"]
        marimo.output.replace(marimo.Html(data["text/html"]))


def show(output: Any) -> Any:
    """Display a widget or a dictionary of MIME types; return a handle that updates the output.

    Without IPython, the text of a dictionary is printed, and there is no handle.
    """
    if in_marimo():
        handle = _MarimoOutput()
        handle.update(output)
        return handle
    if ipython_shell() is None and isinstance(output, dict):
        print(output.get("text/plain", ""))
        return None
    from IPython import display

    display_function: Any = display.display
    return display_function(output, raw=isinstance(output, dict), display_id=True)


def wire_size(*forms: str) -> int:
    """Return about how many bytes the forms take as JSON, where a quotation mark takes two."""
    return sum(len(form.encode()) + form.count('"') + form.count("\n") for form in forms)


class Pace:
    """Decides when a new drawing is due: something changed, or a second passed."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._drawn = -1e9
        self._interval = limits.MIN_DRAW_INTERVAL_S
        self._began = 0.0  # by the clock of this thread's CPU time

    def is_due(self, state: RunState, now: float) -> bool:
        """Return whether to draw now; the caller then draws."""
        passed = now - self._drawn
        quiet = max(1.0, self._interval)
        if 0 <= passed < self._interval or (state is self._state and 0 <= passed < quiet):
            return False
        late = max(0.0, passed - self._interval)  # a late drawing brings the next one forward
        self._drawn = now - (late if late < self._interval else 0)
        self._state = state
        self._began = time.thread_time()
        return True

    def spent(self, size: int) -> None:
        """Record the bytes of a drawing: the next one waits until `MAX_BYTES_PER_S` allows it.

        And on a host whose cores are all busy, until `MAX_DRAW_CORE_SHARE` does.
        """
        seconds = (
            (time.thread_time() - self._began) / limits.MAX_DRAW_CORE_SHARE if is_crowded() else 0.0
        )
        self._interval = max(
            limits.MIN_DRAW_INTERVAL_S,
            size / limits.MAX_BYTES_PER_S,
            min(limits.MAX_DRAW_INTERVAL_S, seconds),
        )


class HtmlDisplay(Display):
    """One HTML output, updated in place through its display id."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._pace = Pace()

    def update(self, state: RunState, now: float) -> None:
        if self._pace.is_due(state, now):
            self._draw(state, now)

    def finish(self, state: RunState, now: float) -> None:
        self._draw(state, now)

    def _draw(self, state: RunState, now: float) -> None:
        data = bundle(state, now)
        if self._handle is None:
            self._handle = show(data)
        else:
            self._handle.update(data, raw=True)
        self._pace.spent(wire_size(*data.values()))
