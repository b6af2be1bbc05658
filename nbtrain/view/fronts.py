"""Which front shows a run: by what ``--view`` asks for, and by what is here to show it on."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..state import RunState
from . import comms
from .screen import Front, HtmlFront, ipython_shell
from .terminal import TableFront, TextFront, can_redraw
from .widget import WidgetFront, heard


def choose(
    view: str,
    stop: Callable[[], None] = lambda: None,
    stacks: Callable[[], object] = lambda: "",
    *,
    inline: bool = False,
    behind: bool = False,
) -> Front:
    """Return the front for ``--view``; `stop` and `stacks` are what its buttons call.

    'auto' is a board with a Stop button where a click can be heard while the cell runs, HTML in
    any other notebook, text in a terminal, and lines of text followed by the HTML summary in a
    headless run (``jupyter execute``, papermill), which keeps what it executes. An `inline` run
    has the main thread to itself: nothing hears a click. A run that goes on `behind` its cell is
    drawn in a notebook alone: a terminal's prompt is not to be written over.
    """
    shell = ipython_shell()
    kernel = getattr(shell, "kernel", None)
    if view == "none" or (behind and kernel is None):
        return NoFront()
    if shell is None or (kernel is None and view == "auto") or view == "text":
        redraws = view == "auto" and can_redraw(sys.stdout)
        return TableFront() if redraws else TextFront()
    if view == "auto" and _is_headless(shell) and not behind:
        return TextFront(keep_html=True)
    if view == "html" or (view == "auto" and (inline or not _has_widgets(shell))):
        return HtmlFront()
    pump = comms.Idle() if behind else None if inline else comms.find(shell)
    return HtmlFront() if pump is None and view == "auto" else WidgetFront(pump, stop, stacks)


def ears() -> Callable[[], None]:
    """Return what hears the clicks on boards while a cell waits for a run behind it.

    A KeyboardInterrupt must not be raised in it: a message of another cell's could be lost.
    """
    pump = comms.find(ipython_shell())

    def hear() -> None:
        nonlocal pump
        if pump is not None and not pump.pump(heard()):
            pump = None

    return hear


def _is_headless(shell: Any) -> bool:
    """Whether the one who asked for this cell cannot answer ``input()``: a program, no person."""
    try:
        content = shell.get_parent()["content"]
    except (AttributeError, KeyError, TypeError):
        return False
    return content.get("allow_stdin") is False


def _has_widgets(shell: Any) -> bool:
    """Whether the page shows widgets, and sends their clicks: Colab does neither mid-cell."""
    if "google.colab" in str(shell):
        return False
    try:
        return importlib.util.find_spec("ipywidgets") is not None
    except ValueError:  # somebody put a module of that name there by hand
        return False


RETRY = 5.0
"""Seconds after which a drawing that failed is tried again."""


class Guarded:
    """A front whose trouble is its own: the run goes on, with one warning.

    A drawing that failed is tried again later, and clicks are heard meanwhile: a browser that was
    away comes back, and the figure that could not be drawn is followed by one that can.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._failed = -math.inf
        self._warned = False

    def update(self, state: RunState, now: float) -> None:
        """Take in clicks, and show the present state if that works."""
        self._attempt(self._front.listen)
        gone = time.monotonic() - self._failed
        if gone > RETRY and not self._attempt(partial(self._front.update, state, now)):
            self._failed = time.monotonic()

    def finish(self, state: RunState, now: float) -> None:
        """Show the final state if that works."""
        self._attempt(partial(self._front.finish, state, now))

    def _attempt(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # a lost front end, a library's change: not worth a training
            if not self._warned:
                self._warned = True
                _warn(f"the view failed ({type(error).__name__}: {error}); the run goes on")
            return False
        return True


def _warn(what: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # warnings may be errors: not here
        warnings.warn(f"nbtrain: {what}", RuntimeWarning, stacklevel=4)


class NoFront(Front):
    """Shows nothing."""

    def update(self, state: RunState, now: float) -> None:
        """Show nothing."""

    def finish(self, state: RunState, now: float) -> None:
        """Show nothing."""
