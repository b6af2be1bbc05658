"""Shows the board with its controls: widgets during the run, static HTML afterwards."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...tracking import limits as tracking_limits
from ...tracking.state import RunState
from .. import limits, run_texts
from ..board import board
from .html_display import Display, Pace, bundle, show
from .kernel_comms import Pump
from .widget_controls import Controls, PanelButton, RunButton

_VIEW = "application/vnd.jupyter.widget-view+json"

_NO_WIDGETS = (
    '<div style="opacity:.7;font-size:12px">This board shows how the run began, because this '
    "page shows no widgets. <code>--view html</code> updates the board without widgets.</div>"
)
"""Added to the HTML, which only a page that cannot show widgets displays."""


class WidgetDisplay(Display):
    """The parts of the board with controls beside the title. Static HTML replaces them at the end.

    Each part is a widget, so that a new number in the table does not clear text that a user has
    selected in the log. `pump` handles the controls while the cell runs. Without it, there are no
    controls.

    A page that was reloaded during the run gets no update through a display id. It shows the widget
    that was saved with the notebook, or "Error displaying widget" if the kernel has closed that. So
    the last boards stay open as widgets, with the final drawing and without buttons.
    """

    def __init__(
        self,
        pump: Pump | None,
        stop: Callable[[], None],
        stacks: Callable[[], object],
        buttons: Callable[[], Sequence[RunButton | PanelButton]] = tuple,
    ) -> None:
        self._pump = pump
        self._stop, self._stacks, self._buttons = stop, stacks, buttons
        self._parts: list[Any] = []
        self._frame: Any = None
        self._title_row: Any = None
        self._status_html: Any = None
        self._last_status = "", 0.0
        self._controls: Controls | None = None
        self._box: Any = None
        self._handle: Any = None
        self._pace = Pace()

    def update(self, state: RunState, now: float) -> None:
        """Draw the board if that is due or the user chose something, and show it the first time."""
        if self._box is None:
            self._open(state, now)
        has_choice = self._controls is not None and self._controls.has_changed()
        if has_choice or self._pace.claim_drawing(state, now):
            self._draw(state, now)
            if self._handle is None:
                view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
                forms = bundle(state, now)
                html = forms["text/html"] + _NO_WIDGETS
                self._handle = show({_VIEW: view, **forms, "text/html": html})

    def finish(self, state: RunState, now: float) -> None:
        """Replace the widgets by the final board, which a saved notebook keeps.

        Closes the controls, and waits for the thread that collects stacks. One widget with the
        final board stays open, for a page that was reloaded.
        """
        data = bundle(state, now)
        self._drop_controls()
        if self._handle is not None:
            import ipywidgets

            self._handle.update(data, raw=True)
            # This HTML has a frame of its own.
            self._box.children = (ipywidgets.HTML(data["text/html"]),)
            _close(self._frame)
            _keep_open(self._box)
            return
        show(data)  # the run ended before it was drawn
        if self._box is not None:
            _close(self._box)

    def _open(self, state: RunState, now: float) -> None:
        """Make the widgets of the board, with controls if there is a pump. Does not show them."""
        import ipywidgets

        self._parts = [ipywidgets.HTML() for _ in board.parts(state, now)]
        self._status_html = ipywidgets.HTML()
        self._parts[0].layout.flex, self._parts[0].layout.min_width = "1 1 240px", "0"
        around = {name.replace("-", "_"): value for name, value in board.FRAME.items()}
        self._title_row = ipywidgets.HBox(self._parts[:1], layout={"flex_flow": "row wrap"})
        body = [self._title_row, *self._parts[1:], self._status_html]
        if self._pump is not None:
            self._controls = Controls(self._stop, self._stacks, self._buttons())
            self._title_row.children = (*self._parts[:1], self._controls.row)
            body[1:1] = [self._controls.more, self._controls.panel]
        self._frame = ipywidgets.VBox(body, layout=around)
        self._box = ipywidgets.VBox([self._frame])
        if self._controls is not None:
            # The last step, since the thread of another run may read the ids at any time.
            _listening.add(self)

    def _draw(self, state: RunState, now: float) -> None:
        """Draw each part of the board and the menus, and at times a text for a screen reader."""
        choices = board.ViewChoices() if self._controls is None else self._controls.choices
        for part, drawn in zip(self._parts, board.parts(state, now, choices), strict=True):
            part.value = drawn  # which sends nothing to the page if it is the same
        if self._controls is not None:
            self._controls.follow(state, now)
        self._update_status(state, now)

    def _update_status(self, state: RunState, now: float) -> None:
        """Have a screen reader read the status when it changes, and every REPORT_INTERVAL_S."""
        status = run_texts.status(state)
        if status != self._last_status[0] or now - self._last_status[1] >= limits.REPORT_INTERVAL_S:
            self._last_status = status, now
            self._status_html.value = board.draw_screen_reader_status(state, now)

    def listen(self) -> None:
        """Handle the clicks on all boards. If that fails, remove this board's controls.

        Does nothing without controls.
        """
        if self._pump is None or self._controls is None:
            return
        if not self._pump(listening_ids()):
            self._pump = None
            self._drop_controls()

    def _drop_controls(self) -> None:
        """Remove the buttons and menus from the board, and close them, if it has any.

        Waits for the thread that collects stacks.
        """
        if self._controls is None:
            return
        _listening.discard(self)
        dropped = self._controls.more, self._controls.panel
        self._title_row.children = self._parts[:1]
        self._frame.children = [child for child in self._frame.children if child not in dropped]
        self._controls.close()
        for control in self._controls.widgets():
            _close(control)
        self._controls = None

    def widget_ids(self) -> set[str]:
        """Return the ids of this board's widgets; empty without controls."""
        controls = self._controls
        shown = [] if controls is None else [*_list_widgets(self._box), *controls.widgets()]
        return {widget.model_id for widget in shown if widget.model_id is not None}


_listening: weakref.WeakSet[WidgetDisplay] = weakref.WeakSet()


def listening_ids() -> set[str]:
    """Return the ids of the widgets of all boards with controls.

    A cell may wait for another run than the one whose button is clicked.
    """
    return {name for display in tuple(_listening) for name in display.widget_ids()}


_open_boxes: collections.deque[Any] = collections.deque()


def _keep_open(box: Any) -> None:
    """Keep a board's widgets open in the kernel. Closes the oldest ones above MAX_RUNS boards."""
    _open_boxes.append(box)
    while len(_open_boxes) > tracking_limits.MAX_RUNS:
        _close(_open_boxes.popleft())


def _close(widget: Any) -> None:
    for part in _list_widgets(widget):
        part.close()


def _list_widgets(widget: Any) -> Iterator[Any]:
    """Yield a widget and its children, each with its layout and style, which are widgets, too."""
    for inner in getattr(widget, "children", ()):
        yield from _list_widgets(inner)
    yield from filter(None, (getattr(widget, part, None) for part in ("layout", "style")))
    yield widget
