"""What a run leaves on a page: the forms of it, put there and updated through a display id."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from ..state import RunState
from . import html, text

INTERVAL = 0.2
"""Seconds between two updates of a display; on average, where looks for it come late."""

BYTES_PER_SECOND = 120_000
"""What the updates of a display may cost: a large board is drawn less often."""


class Front(Protocol):
    """Shows a run while it goes on, and what stays of it."""

    def listen(self) -> None:
        """Take in what the user did on the page; called at each look, also where drawing fails."""
        return

    def update(self, state: RunState, now: float) -> None:
        """Show the present state; called often, draws when it is worth it."""
        ...

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state, to stay."""
        ...


def ipython_shell() -> Any:
    """Return the running IPython shell; None in plain Python."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def execution_count() -> int | None:
    """Return the number of the cell that runs; None where no cell does."""
    count: int | None = getattr(ipython_shell(), "execution_count", None)
    return count


def bundle(state: RunState, now: float) -> dict[str, Any]:
    """Return the forms of a run that a notebook stores: HTML and text."""
    return {"text/html": html.render(state, now), "text/plain": text.summary(state, now)}


def put(what: Any) -> Any:
    """Put a widget, or a dictionary of forms, on the screen; return a handle to update it by."""
    from IPython import display

    show: Any = display.display
    return show(what, raw=isinstance(what, dict), display_id=True)


def wire_size(*forms: str) -> int:
    """Return about how many bytes the forms take as JSON, in which a quotation mark takes two."""
    return sum(len(form.encode()) + form.count('"') + form.count("\n") for form in forms)


class Pace:
    """Says when a new drawing is due: something changed, or a second went by on the clock."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._drawn = -1e9
        self._interval = INTERVAL

    def is_due(self, state: RunState, now: float) -> bool:
        """Whether to draw now; who is told so draws."""
        gone = now - self._drawn
        quiet = max(1.0, self._interval)
        if 0 <= gone < self._interval or (state is self._state and 0 <= gone < quiet):
            return False
        late = max(0.0, gone - self._interval)  # for a look that came late the next draws sooner
        self._drawn = now - (late if late < self._interval else 0)
        self._state = state
        return True

    def spent(self, size: int) -> None:
        """Take note of the bytes of a drawing: the next one waits until they are paid for."""
        self._interval = max(INTERVAL, size / BYTES_PER_SECOND)


class HtmlFront(Front):
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
            self._handle = put(data)
        else:
            self._handle.update(data, raw=True)
        self._pace.spent(wire_size(*data.values()))
