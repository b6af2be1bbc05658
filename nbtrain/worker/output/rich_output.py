"""Sends a rank's figures, tables and other rich displays to the notebook.

Each display is an event. If there are too many, the last one is sent at the end of the task, with
the number of those left out. In ordinary runs the text form is also written to the rank's log, for
terminals. A cell of ranks that stay shows values as other cells do.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...findings import Finding
from ...planning.plan import Cell, Task
from ...system.instrumentation import patch, replace, when_imported
from ...system.text import format_bytes, plural, text_of_html
from ...tracking import clock
from ...tracking import events as ev
from ...transport import result_pickler
from .. import limits, rank_context

_KINDS = ("text/html", "image/png", "image/svg+xml", "image/jpeg", "text/latex", "text/markdown")
_LEFT_OUT = "nbtrain: left out"
"""The name of the display with the number of those left out."""


class RichOutput:
    """Sends the displays of a task. Each task has its own."""

    def __init__(self, call: Callable[[Task], Any], *, shows_values: bool = False) -> None:
        """Prepare to run tasks by `call`.

        With `shows_values`, the value that a cell ends in is displayed, and texts of displays are
        sent and not printed to the log.
        """
        self._call, self._shows_values = call, shows_values
        self._names: list[str] = []
        self._spent = 0
        self._left_out = 0
        self._last: ev.Displayed | None = None  # of those that were left out
        self._clears = False
        self._has_figures = _has_figures()
        self._has_noted_widget = False
        self._updated: dict[str, str] = {}  # texts of displays in the place of others, by name

    def install(self, *, in_notebook: bool = False) -> None:
        """Have ``display(x)``, ``plt.show()`` and the like send what they show.

        A fresh process of a notebook gets a shell, which draws figures, as soon as IPython is used.
        """
        patch("ipywidgets.widgets.widget:Widget", "send_state", self._note_widget)
        if _shell() is not None:
            self._watch(_shell())
        elif in_notebook:
            if importlib.util.find_spec("matplotlib_inline"):
                os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
            when_imported("IPython.core.interactiveshell", self._make_shell)

    def _make_shell(self, _module: ModuleType) -> None:
        from ...transport import payload

        self._watch(payload.shell_of_rank())

    def _watch(self, shell: Any) -> None:
        replace(shell.display_pub, "publish", self._publish)
        replace(shell.display_pub, "clear_output", self._clear)

    def run(self, task: Task) -> Any:
        """Run a task and return its value, with the rest of its displays sent.

        With `shows_values`, the value that a cell ends in is displayed. It is also returned if it
        is at most `MAX_DISPLAY_BYTES`, else None is; the value of a training function is returned
        at any size.
        """
        try:
            value = self._call(task)
            if self._shows_values and isinstance(task, Cell) and value is not None:
                self._show(value)
                value = _drop_large_value(value) if task.function is None else value
            if not self._has_figures:  # else the notebook shows its own
                with contextlib.suppress(Exception):  # figures that were drawn and not shown
                    sys.modules["matplotlib_inline.backend_inline"].flush_figures()
        finally:
            for text in filter(None, self._updated.values()):
                print(text)
            self._updated.clear()
            self._send_last()
        return value

    def _note_widget(self, _original: Any, widget: Any, *_args: Any, **_kwargs: Any) -> None:
        """Report, once, that a widget was changed here: no message of it leaves a rank."""
        context = rank_context.current()
        if not self._has_noted_widget and context is not None and context.rank == 0:
            self._has_noted_widget = True
            name = type(widget).__name__
            text = f"a rank changed a widget ({name}), which the notebook does not show."
            remedy = "Print the value, log it, or return it and change the widget in the notebook."
            context.writer.write(ev.RunNote.of(Finding("widget", text, remedy)))

    def _show(self, value: Any) -> None:
        """Display a value as a cell shows its last one."""
        shell = _shell()
        data = None
        with contextlib.suppress(Exception):  # a repr of the user's own
            if shell is not None:
                data = shell.display_formatter.format(value)[0]
            else:
                from IPython.core import formatters

                formatter: Any = formatters.DisplayFormatter()
                data = formatter.format(value)[0]
        self._publish(data or {"text/plain": repr(value)})

    def _clear(self, wait: bool = False) -> None:
        """Let the next display, which comes soon as a rule, take the place of those so far."""
        self._clears = bool(self._names)

    def _publish(
        self,
        data: Any = None,
        *_args: Any,
        transient: Any = None,
        update: bool = False,
        **_kwargs: Any,
    ) -> None:
        """Send a display in the forms that a notebook shows, and print its text to the log.

        Without `shows_values`, plain text alone is only printed. Of a form over
        `MAX_DISPLAY_BYTES`, the text and the size are sent.
        """
        if not isinstance(data, dict) or (context := rank_context.current()) is None:
            return
        name = str((transient or {}).get("display_id") or "")
        if not self._shows_values:
            self._print(_display_text(data), name if update else "")
        forms = {kind: _text_of(data[kind]) for kind in (*_KINDS, "text/plain") if kind in data}
        bundle = {kind: form for kind, form in forms.items() if form is not None}
        if not bundle or not (self._shows_values or set(bundle) - {"text/plain"}):
            return
        size = _size(bundle)
        if size > limits.MAX_DISPLAY_BYTES:
            # A character has six bytes at most.
            text = bundle.get("text/plain", "")[: limits.MAX_DISPLAY_BYTES // 8]
            bundle = {"text/plain": f"{text} ({format_bytes(size)} is too much to display)"}
        event = ev.Displayed(clock.now(), context.rank, bundle, name, self._clears)
        if self._clears:
            self._names.clear()
        self._clears = False
        sharing_ranks = 1 if context.rank == 0 else context.world_size
        self._send(event, room=limits.MAX_ALL_DISPLAYS_BYTES // sharing_ranks)

    def _print(self, text: str, name: str) -> None:
        """Log the text of a display; of those that update one of a `name`, the last at the end."""
        if name:
            self._updated[name] = text
        elif text:
            print(text)

    def _send(self, event: ev.Displayed, room: int) -> None:
        """Write a display as an event, or keep it as the last one after too many or too large ones.

        `room` is in bytes, for all displays of this rank. The first display that is left out is
        replaced by a note.
        """
        size = _size(event.data)
        is_new = not event.name or event.name not in self._names
        if self._spent + size > room or (is_new and len(self._names) >= limits.MAX_DISPLAYS):
            if not self._left_out:
                is_number = is_new and self._spent + size <= room
                much = f"{limits.MAX_DISPLAYS} displays" if is_number else "so much"
                text = f"… more than {much}: only the last display is shown after this"
                self._write(ev.Displayed(event.time, event.rank, {"text/plain": text}, _LEFT_OUT))
            self._left_out += 1
            self._last = event
            return
        self._spent += size
        if is_new:
            self._names.append(event.name)
        self._write(event)

    def _send_last(self) -> None:
        """Send the last display that was left out, if there is one, and how many others were."""
        last = self._last
        if last is not None:
            text = f"… {plural(self._left_out - 1, 'display')} left out"
            self._write(ev.Displayed(last.time, last.rank, {"text/plain": text}, _LEFT_OUT))
            self._write(last)
            self._last = None

    def _write(self, event: ev.Displayed) -> None:
        context = rank_context.current()
        if context is not None:
            context.writer.write(event)


def _display_text(data: Mapping[str, Any]) -> str:
    """Return the text of a display for the log; "" without text and HTML.

    A ``text/plain`` that is itself markup, or begins with "<" beside HTML (a bare repr), is not
    used: the words of the HTML are returned, of at most `MAX_DISPLAY_BYTES`.
    """
    text, html = data.get("text/plain"), data.get("text/html")
    if type(text) is str and not text.lstrip().startswith("<"):
        return text
    if type(html) is not str and type(text) is str and re.search(r"</[a-zA-Z]+>", text):
        html = text
    if type(html) is not str:
        return str(text or "")
    return text_of_html(html[: limits.MAX_DISPLAY_BYTES])


def _text_of(form: Any) -> str | None:
    """Return a form of a display as a notebook stores it; None for one that is no text or bytes."""
    if isinstance(form, bytes):
        return base64.b64encode(form).decode("ascii")
    return form if type(form) is str else None


def _size(data: Mapping[str, Any]) -> int:
    return sum(len(ev.encode(form)) for form in data.values())


def _has_figures() -> bool:
    """Whether pyplot has figures open: those of a cell of the notebook that is running."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    return helpers is not None and bool(helpers.Gcf.figs)


def _drop_large_value(value: Any) -> Any:
    """Return a value that is small enough to be sent, else None."""
    try:
        result_pickler.dumps(value, limit=limits.MAX_DISPLAY_BYTES)
    except Exception:  # too large, or any reducer of any class
        return None
    return value


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
