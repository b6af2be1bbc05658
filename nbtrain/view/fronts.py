"""Putting a picture on the user's screen: the only place that touches IPython or a terminal."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ..state import RunState
from . import html, text, wording

INTERVAL = 0.2
"""Seconds between two updates of a display, at least."""

TEXT_INTERVAL = 5.0
"""Seconds between two progress lines of a rank in plain text."""


class Front(Protocol):
    """Shows a run while it goes on, and what stays of it."""

    def update(self, state: RunState, now: float) -> None:
        """Show the present state; called often, draws when it is worth it."""
        ...

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state, to stay."""
        ...


def choose(view: str) -> Front:
    """Return the front for ``--view``.

    'auto' is HTML in a notebook, lines of text in a terminal, and lines of text followed by the
    HTML summary in a headless run (``jupyter execute``, papermill), which keeps what it executes.
    """
    if view == "none":
        return NoFront()
    shell = ipython_shell()
    kernel = getattr(shell, "kernel", None)
    if shell is None:
        return TextFront()
    if view == "widget":
        return WidgetFront()
    if view == "html" or (view == "auto" and kernel is not None and not _is_headless(shell)):
        return HtmlFront()
    return TextFront(keep_html=view == "auto" and kernel is not None)


def ipython_shell() -> Any:
    """Return the running IPython shell; None in plain Python."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _is_headless(shell: Any) -> bool:
    """Whether the one who asked for this cell cannot answer ``input()``: a program, no person."""
    try:
        content = shell.get_parent()["content"]
    except (AttributeError, KeyError, TypeError):
        return False
    return content.get("allow_stdin") is False


def bundle(state: RunState, now: float) -> dict[str, str]:
    """Return the forms of a run that a notebook stores: HTML and text."""
    return {"text/html": html.render(state, now), "text/plain": text.summary(state, now)}


def put(what: Any) -> Any:
    """Put a widget, or a dictionary of forms, on the screen; return a handle to update it by."""
    from IPython import display

    show: Any = display.display
    return show(what, raw=isinstance(what, dict), display_id=True)


class _Pace:
    """Says when a new drawing is due: something changed, or a second went by on the clock."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._drawn = -1e9

    def is_due(self, state: RunState, now: float) -> bool:
        gone = now - self._drawn
        if 0 <= gone < INTERVAL or (state is self._state and 0 <= gone < 1):
            return False
        self._state, self._drawn = state, now
        return True


class Guarded:
    """A front whose trouble is its own: drawing stops with a warning, the run goes on."""

    def __init__(self, front: Front) -> None:
        self._front: Front | None = front

    def update(self, state: RunState, now: float) -> None:
        """Show the present state if that works."""
        if self._front is not None:
            self._attempt(self._front.update, state, now)

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state if that works."""
        if self._front is not None:
            self._attempt(self._front.finish, state, now)

    def _attempt(
        self, draw: Callable[[RunState, float], None], state: RunState, now: float
    ) -> None:
        try:
            draw(state, now)
        except Exception as error:  # a lost front end, a library's change: not worth a training
            self._front = None
            with contextlib.suppress(RuntimeWarning):  # warnings may be errors: not here
                warnings.warn(
                    f"nbtrain: the view failed ({type(error).__name__}: {error}); the run goes on",
                    RuntimeWarning,
                    stacklevel=3,
                )


class NoFront:
    """Shows nothing."""

    def update(self, state: RunState, now: float) -> None:
        """Show nothing."""

    def finish(self, state: RunState, now: float) -> None:
        """Show nothing."""


class HtmlFront:
    """One HTML output, updated in place through its display id."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._pace = _Pace()

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


class WidgetFront:
    """An ipywidgets HTML widget while the run goes on, replaced by static HTML at its end."""

    def __init__(self) -> None:
        self._widget: Any = None
        self._handle: Any = None
        self._pace = _Pace()

    def update(self, state: RunState, now: float) -> None:
        if not self._pace.is_due(state, now):
            return
        if self._widget is None:
            import ipywidgets

            self._widget = ipywidgets.HTML(html.render(state, now))
            self._handle = put(self._widget)
        else:
            self._widget.value = html.render(state, now)

    def finish(self, state: RunState, now: float) -> None:
        if self._handle is None:
            put(bundle(state, now))
            return
        self._handle.update(bundle(state, now), raw=True)
        self._widget.close()


class TextFront:
    """Lines of text: what ranks print as it comes, a line of progress a rank now and then."""

    def __init__(self, *, keep_html: bool = False) -> None:
        self._keep_html = keep_html
        self._printed: dict[int, int] = {}
        self._lines: dict[int, str] = {}
        self._due: float | None = None
        self._noted = False

    def update(self, state: RunState, now: float) -> None:
        self._print_notes(state)
        self._print_output(state)
        if self._due is None:
            self._due = now + TEXT_INTERVAL
            print(f"● {state.name}: {wording.facts(state, now)}", flush=True)
        elif now >= self._due:
            self._due = now + TEXT_INTERVAL
            self._print_progress(state)

    def _print_notes(self, state: RunState) -> None:
        if not self._noted:
            self._noted = True
            print(*wording.notes(state), sep="\n", end="\n" if state.notes else "", flush=True)

    def _print_output(self, state: RunState) -> None:
        for rank in state.ranks:
            new = rank.log_count - self._printed.get(rank.rank, 0)
            if new <= 0:
                continue
            self._printed[rank.rank] = rank.log_count
            if new > len(rank.log):
                print(f"[rank {rank.rank}] … {new - len(rank.log)} lines, see run.logs()")
            for line in rank.log[-new:]:
                print(f"[rank {rank.rank}] {line}")
            sys.stdout.flush()

    def _print_progress(self, state: RunState) -> None:
        for rank in state.ranks:
            line = text.rank_line(rank, state)
            if self._lines.get(rank.rank) != line and not rank.is_over:
                self._lines[rank.rank] = line
                print(line, flush=True)

    def finish(self, state: RunState, now: float) -> None:
        self._print_notes(state)
        self._print_output(state)
        if self._keep_html:
            put(bundle(state, now))
        else:  # the notes were printed at the start
            print(text.summary(replace(state, notes=()), now), flush=True)
