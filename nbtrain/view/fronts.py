"""Which front shows a run: by what ``--view`` asks for, and by what is here to show it on."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from ..state import RunState
from . import comms
from .screen import HtmlFront, ipython_shell
from .terminal import TableFront, TextFront, can_redraw
from .widget import WidgetFront


class Front(Protocol):
    """Shows a run while it goes on, and what stays of it."""

    def update(self, state: RunState, now: float) -> None:
        """Show the present state; called often, draws when it is worth it."""
        ...

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state, to stay."""
        ...


def choose(view: str, stop: Callable[[], None] = lambda: None, *, inline: bool = False) -> Front:
    """Return the front for ``--view``; `stop` is what its button calls, from any thread.

    'auto' is a board with a Stop button where a click can be heard while the cell runs, HTML in
    any other notebook, text in a terminal, and lines of text followed by the HTML summary in a
    headless run (``jupyter execute``, papermill), which keeps what it executes. An `inline` run
    has the main thread to itself: nothing hears a click.
    """
    shell = ipython_shell()
    kernel = getattr(shell, "kernel", None)
    if view == "none":
        return NoFront()
    if shell is None or (kernel is None and view == "auto") or view == "text":
        redraws = view == "auto" and can_redraw(sys.stdout)
        return TableFront() if redraws else TextFront()
    if view == "auto" and _is_headless(shell):
        return TextFront(keep_html=True)
    if view == "html" or (view == "auto" and (inline or not _has_widgets(shell))):
        return HtmlFront()
    pump = None if inline else comms.find(shell)
    return HtmlFront() if pump is None and view == "auto" else WidgetFront(pump, stop)


def _is_headless(shell: Any) -> bool:
    """Whether the one who asked for this cell cannot answer ``input()``: a program, no person."""
    try:
        content = shell.get_parent()["content"]
    except (AttributeError, KeyError, TypeError):
        return False
    return content.get("allow_stdin") is False


def _has_widgets(shell: Any) -> bool:
    """Whether the page shows widgets, and sends their clicks: Colab does neither mid-cell."""
    return "google.colab" not in str(shell) and importlib.util.find_spec("ipywidgets") is not None


class Guarded:
    """A front whose trouble is its own: drawing stops with a warning, the run goes on.

    What stays of the run is attempted even so.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._failed = False

    def update(self, state: RunState, now: float) -> None:
        """Show the present state if that works."""
        if not self._failed:
            self._attempt(self._front.update, state, now)

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state if that works."""
        self._attempt(self._front.finish, state, now)

    def _attempt(
        self, draw: Callable[[RunState, float], None], state: RunState, now: float
    ) -> None:
        try:
            draw(state, now)
        except Exception as error:  # a lost front end, a library's change: not worth a training
            if self._failed:
                return
            self._failed = True
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
