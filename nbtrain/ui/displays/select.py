"""Chooses the display of a run, by ``--view`` and by what the notebook can show."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...tracking.state import RunState
from .. import limits
from . import kernel_comms
from .html_display import Display, HtmlDisplay, ipython_shell, is_marimo
from .rank_outputs import WithOutputs
from .terminal import TableDisplay, TextDisplay, can_redraw
from .widget_board import WidgetDisplay
from .widget_controls import PanelButton, RunButton


def choose(
    view: str,
    stop: Callable[[], None] = lambda: None,
    stacks: Callable[[], object] = lambda: "",
    buttons: Callable[[], Sequence[RunButton | PanelButton]] = tuple,
    *,
    inline: bool = False,
    is_background: bool = False,
) -> Display:
    """Return the display for ``--view``; its buttons call `stop` and `stacks`, and are `buttons`.

    'auto' is a board with a Stop button if a click can be handled while the cell runs. It is HTML
    in any other notebook, text in a terminal or a console, and text followed by the HTML summary in
    a headless run (``jupyter execute``, papermill). An `inline` run occupies the main thread, so no
    click is handled. A background run is only drawn in notebooks: in a terminal it would write over
    the prompt. In marimo, only a running cell can change its output.
    """
    if is_marimo() and view not in ("none", "text"):
        return Display() if is_background else HtmlDisplay()
    shell = ipython_shell()
    in_terminal = getattr(shell, "kernel", None) is None
    is_headless = _is_headless(shell)
    shows_text = in_terminal or (view == "auto" and _is_console(shell) and not is_headless)
    if view == "none" or (is_background and shows_text):
        return Display()
    if shell is None or (shows_text and view == "auto") or view == "text":
        redraws = view == "auto" and can_redraw(sys.stdout)
        return TableDisplay() if redraws else TextDisplay(is_raised=not is_background)
    if view == "auto" and is_headless and not is_background:
        return TextDisplay(keep_html=True)
    if view == "html" or (view == "auto" and (inline or not _has_widgets(shell))):
        return HtmlDisplay()
    if is_background:
        pump: kernel_comms.Pump | None = kernel_comms.idle_pump
    else:
        pump = None if inline else kernel_comms.find_pump(shell)
    if pump is None and view == "auto":
        return HtmlDisplay()
    return WidgetDisplay(pump, stop, stacks, buttons)


def with_outputs(display: Display) -> Display:
    """Return a display that also shows what ranks display; a headless one does so at the end.

    A display in plain text, or that shows nothing, is returned as it is.
    """
    if isinstance(display, TextDisplay):
        return WithOutputs(display, live=False) if display.keep_html else display
    is_page = isinstance(display, (HtmlDisplay, WidgetDisplay))
    return WithOutputs(display, live=True) if is_page else display


def _is_headless(shell: Any) -> bool:
    """Return whether a program executes this cell, so that ``input()`` is not allowed.

    False outside a kernel.
    """
    try:
        content = shell.get_parent()["content"]
    except (AttributeError, KeyError, TypeError):
        return False
    return content.get("allow_stdin") is False


def _is_console(shell: Any) -> bool:
    """Return whether a console runs this cell: jupyter-console, Spyder, qtconsole. They show text.

    Consoles use Python's jupyter_client, which numbers the messages of a session, while a page uses
    random ids. A server that runs a cell for a page uses jupyter_client too, but sends a cell id.
    """
    if "google.colab" in str(shell) or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return False  # these are pages, though their messages are not documented
    try:
        parent = shell.get_parent()
        number = str(parent["header"]["msg_id"]).removeprefix(f"{parent['header']['session']}_")
        return re.fullmatch(r"\d+_\d+", number) is not None and "cellId" not in parent["metadata"]
    except (AttributeError, KeyError, TypeError):
        return False


def _has_widgets(shell: Any) -> bool:
    """Return whether ipywidgets is installed, and the page sends clicks during a cell.

    Colab does not.
    """
    try:
        return "google.colab" not in str(shell) and bool(importlib.util.find_spec("ipywidgets"))
    except ValueError:  # sys.modules has a module of that name that has no spec
        return False


class GuardedDisplay:
    """A display whose failures do not stop the run. The first one warns.

    A failed drawing is tried again later: a lost browser may return, and the next state may be one
    that can be drawn. Clicks are handled in any case.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._failed = -math.inf
        self._warned = False

    def update(self, state: RunState, now: float) -> None:
        """Handle clicks, and draw the present state. A failure only warns, the first time.

        After a failed drawing, nothing is drawn for REPORT_INTERVAL_S; then it is drawn as usual
        again. Clicks are handled in any case.
        """
        self._attempt(self._display.listen)
        passed = time.monotonic() - self._failed
        if passed > limits.REPORT_INTERVAL_S and not self._attempt(
            partial(self._display.update, state, now)
        ):
            self._failed = time.monotonic()

    def finish(self, state: RunState, now: float) -> None:
        """Draw the final state, also soon after a failed drawing. A first failure only warns."""
        self._attempt(partial(self._display.finish, state, now))

    def _attempt(self, act: Callable[[], None]) -> bool:
        """Call `act`, and return whether it raised nothing. No `Exception` comes out.

        The first one of this display is shown as a warning, later ones are not.
        """
        try:
            act()
        except Exception as error:  # a lost page or a changed library must not end the training
            if not self._warned:
                self._warned = True
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(RuntimeWarning):  # even if warnings are errors
                    warnings.warn(
                        f"nbtrain: the display failed ({reason}); the run continues",
                        RuntimeWarning,
                        stacklevel=3,
                    )
            return False
        return True
