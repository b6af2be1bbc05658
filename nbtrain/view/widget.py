"""The board with its controls: widgets while the run goes on, static HTML once it is over."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..state import RunState
from . import html
from .comms import Idle, Pump
from .controls import Controls
from .screen import Front, Pace, bundle, put, wire_size

_VIEW = "application/vnd.jupyter.widget-view+json"
KEEP = 20
"""Boards of runs that are over and stay open as widgets: as many as run folders are kept."""

_NO_WIDGETS = (
    '<div style="opacity:.7;font-size:12px">As it was when the run began: this page shows no '
    "widgets. <code>--view html</code> keeps it up to date without them.</div>"
)
"""Stands in the HTML form, which a page shows that has no renderer for widgets."""


class WidgetFront(Front):
    """Controls above the board's parts, and static HTML in their place at the end.

    The parts are widgets of their own: a new number in the table takes away no text that somebody
    has selected in the log.

    What a user does with the controls is taken in by `pump`, in the middle of the cell; without
    one there are none.

    A page that was reloaded, or closed and opened, since the run began gets nothing through a
    display id: what it shows is the widget that was saved with the notebook, for as long as the
    kernel has it. So the last boards stay, as widgets too, with no button and the last picture;
    closed ones would be "Error displaying widget" to those who come back.
    """

    def __init__(
        self, pump: Pump | Idle | None, stop: Callable[[], None], stacks: Callable[[], object]
    ) -> None:
        self._pump = pump
        self._stop, self._stacks = stop, stacks
        self._parts: list[Any] = []
        self._frame: Any = None
        self._controls: Controls | None = None
        self._box: Any = None
        self._handle: Any = None
        self._pace = Pace()

    def update(self, state: RunState, now: float) -> None:
        if self._box is None:
            self._open(state, now)
        heard = self._controls is not None and self._controls.has_changed()
        if heard or self._pace.is_due(state, now):
            self._draw(state, now)
            if self._handle is None:
                self._show(state, now)

    def finish(self, state: RunState, now: float) -> None:
        data = bundle(state, now)
        self._drop_controls()
        if self._handle is not None:
            self._handle.update(data, raw=True)
            self._stay(data["text/html"])
            _keep(self._box)
            return
        put(data)  # it never came to be shown
        if self._box is not None:
            _close(self._box)

    def _stay(self, drawn: str) -> None:
        """Show the summary, which has a frame of its own, in place of the parts."""
        import ipywidgets

        self._box.children = (ipywidgets.HTML(drawn),)
        _close(self._frame)

    def _open(self, state: RunState, now: float) -> None:
        import ipywidgets

        self._parts = [ipywidgets.HTML() for _ in html.parts(state, now)]
        around = {name.replace("-", "_"): value for name, value in html.FRAME.items()}
        self._frame = ipywidgets.VBox(self._parts, layout=around)
        self._box = ipywidgets.VBox([self._frame])
        if self._pump is not None:
            self._controls = Controls(self._stop, self._stacks)
            self._box.children = (self._controls.row, self._controls.panel, self._frame)
            _listening.add(self)

    def _show(self, state: RunState, now: float) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        forms = bundle(state, now)
        self._handle = put({_VIEW: view, **forms, "text/html": forms["text/html"] + _NO_WIDGETS})

    def _draw(self, state: RunState, now: float) -> None:
        look = html.Look() if self._controls is None else self._controls.look
        changed = [
            (part, drawn)
            for part, drawn in zip(self._parts, html.parts(state, now, look), strict=True)
            if drawn != part.value
        ]
        for part, drawn in changed:
            part.value = drawn
        if changed:
            self._pace.spent(wire_size(*(drawn for _, drawn in changed)))
        if self._controls is not None:
            self._controls.follow(state)

    def listen(self) -> None:
        if self._pump is None or self._controls is None:
            return
        if not self._pump.pump(heard()):
            self._pump = None
            self._drop_controls()

    def _drop_controls(self) -> None:
        if self._controls is None:
            return
        _listening.discard(self)
        self._box.children = (self._frame,)
        self._controls.close()
        for control in self._controls.widgets():
            _close(control)
        self._controls = None

    def ids(self) -> set[str]:
        """Return which widgets on the page are this board's."""
        controls = self._controls
        shown = [] if controls is None else [*_with_parts(self._box), *controls.widgets()]
        return {widget.model_id for widget in shown if widget.model_id is not None}


_listening: weakref.WeakSet[WidgetFront] = weakref.WeakSet()


def heard() -> set[str]:
    """Return the widgets of all boards that have controls: a cell may wait for another run."""
    return {name for front in tuple(_listening) for name in front.ids()}


_kept: collections.deque[Any] = collections.deque()


def _keep(box: Any) -> None:
    """Leave a board open in the kernel, and close the oldest beyond `KEEP`."""
    _kept.append(box)
    while len(_kept) > KEEP:
        _close(_kept.popleft())


def _close(widget: Any) -> None:
    for each in _with_parts(widget):
        each.close()


def _with_parts(widget: Any) -> Iterator[Any]:
    """Yield a widget, those in it, and their layouts and styles: each is open on the page."""
    for inner in getattr(widget, "children", ()):
        yield from _with_parts(inner)
    yield from filter(None, (getattr(widget, part, None) for part in ("layout", "style")))
    yield widget
