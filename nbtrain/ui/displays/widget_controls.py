"""The controls of a live board: stop the run, show the stacks, choose what is drawn."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...errors import NbtrainError
from ...tracking.launch_log import attempt
from ...tracking.limits import MAX_SINGLE_RANKS
from ...tracking.state import RunState
from .. import card, limits
from ..board import board, theme

_STOP_TIP = "End all ranks of this run, as ■ does; they have 2 s to save what they need"
_STACKS_TIP = "Show the line that each rank is at; press this when nothing moves"
_MORE_TIP = "Choose the large chart, its axis, whose log is shown, and whether ranks are folded"
_IMAGE_TIP = "Show the run as a picture, to copy it into a chat; press again to hide it"
_AUTOMATIC, _LAST, _EVERY = "automatic", "last lines", "all ranks"
_AXES = {_AUTOMATIC: None, "linear": False, "logarithmic": True}
_ALIKE = "alike in a row"
_RANKS = {_ALIKE: False, "each": True}


@dataclass(frozen=True)
class RunButton:
    """A button of a part, beside Stop."""

    label: str
    icon: str
    """The name of an icon of Font Awesome 4."""
    tip: str
    busy_label: str
    """The label while it cannot be pressed."""
    press: Callable[[], str | None]
    """Returns what the user should see, if anything."""
    is_busy: Callable[[RunState], object]
    """Whether the run does already what the button is for."""


class PanelView(Protocol):
    """What a `PanelButton` shows: `widget`, with all that it shows among its children."""

    widget: Any

    def follow(self, state: RunState, now: float) -> None:
        """Update the widget. Called at each drawing while it is shown; `now` is in seconds."""


@dataclass(frozen=True)
class PanelButton:
    """A button of a part, beside Stop, that shows a panel below the title and hides it again."""

    label: str
    icon: str
    """As in `RunButton`."""
    tip: str
    early_tip: str
    """The tip while the panel has nothing to show."""
    is_ready: Callable[[RunState], object]
    """Whether the panel has something to show."""
    make: Callable[[], PanelView]
    """Makes the panel. Called when the button is pressed for the first time."""


class Controls:
    """Buttons, and menus that the button ⋯ shows.

    `row` is the widget of the buttons, `more` that of the menus. `panel` shows the stacks of the
    ranks or the run as a picture.
    """

    def __init__(
        self,
        stop: Callable[[], None],
        stacks: Callable[[], object],
        buttons: Sequence[RunButton | PanelButton] = (),
    ) -> None:
        import ipywidgets

        self._stop = stop
        self._stacks = stacks
        self._stacks_thread: threading.Thread | None = None
        self._changed = self._stopping = False
        self._attempt = 1
        width = {"width": "auto", "margin": "0 0 0 6px"}
        new = partial(ipywidgets.Button, layout=width)
        self._button = new(description="Stop", icon="stop", tooltip=_STOP_TIP)
        self._button.layout.border = f"1px solid {theme.RED}"
        self._button.on_click(self._on_click)
        self._stacks_button = new(description="Stacks", icon="search", tooltip=_STACKS_TIP)
        self._stacks_button.on_click(self._on_stacks)
        self.panel = ipywidgets.HTML()
        self._menus: dict[str, Any] = {}  # made when ⋯ is pressed, since most boards need no menu
        self._dots = ipywidgets.ToggleButton(description="⋯", tooltip=_MORE_TIP, layout=width)
        self._dots.observe(self._on_dots, "value")
        self._image_button = new(description="Copy as image", tooltip=_IMAGE_TIP)
        self._image_button.on_click(self._on_image)
        self._drawn: tuple[RunState, float] | None = None
        self._of_parts = [
            (each, new(description=each.label, icon=each.icon, tooltip=each.tip))
            for each in buttons
            if isinstance(each, RunButton)
        ]
        self._pressed: dict[str, float] = {}  # when, by label
        for each, button in self._of_parts:
            button.on_click(partial(self._on_part, each))
        new = partial(ipywidgets.ToggleButton, disabled=True, layout=width)
        self._panels = [
            (each, new(description=each.label, icon=each.icon, tooltip=each.early_tip))
            for each in buttons
            if isinstance(each, PanelButton)
        ]
        self._views: dict[str, PanelView] = {}  # by label
        for _, button in self._panels:
            button.observe(self._on_choice, "value")
        of_parts = [button for _, button in (*self._of_parts, *self._panels)]
        row = [self._button, *of_parts, self._stacks_button, self._dots]
        layout = {"flex": "0 1 auto", "flex_flow": "row wrap", "align_self": "flex-start"}
        self.row = ipywidgets.HBox(row, layout=layout)
        self.more = ipywidgets.HBox((), layout={"flex_flow": "row wrap"})

    def _make_menu(self, name: str, *options: str) -> Any:
        """Make a menu of options; a choice marks the controls as changed. Does not show it."""
        import ipywidgets

        style = {"description_width": "initial"}
        menu = ipywidgets.Dropdown(
            options=options, description=f"{name}:", style=style, layout={"width": "170px"}
        )
        menu.observe(self._on_choice, "value")
        return menu

    def _chosen(self, name: str, default: str) -> str:
        return str(self._menus[name].value) if name in self._menus else default

    @property
    def choices(self) -> board.ViewChoices:
        """Return what the user chose in the menus; the defaults before they were opened."""
        metric, log = self._chosen("chart", _AUTOMATIC), self._chosen("log", _LAST)
        return board.ViewChoices(
            metric=None if metric == _AUTOMATIC else metric,
            rank=int(log.removeprefix("rank ")) if log not in (_LAST, _EVERY) else None,
            has_log=log != _LAST,
            log=_AXES[self._chosen("axis", _AUTOMATIC)],
            each=_RANKS[self._chosen("ranks", _ALIKE)],
        )

    def has_changed(self) -> bool:
        """Return whether the user changed anything since the last call, and clear that mark."""
        changed, self._changed = self._changed, False
        return changed

    def follow(self, state: RunState, now: float) -> None:
        """Update the menus, and show whether the run is stopping.

        A new attempt can be stopped again. Remembers `state` and `now` for the picture.
        """
        self._drawn = state, now
        if self._dots.value or self._menus:
            self._update_menus(state)
        menus = [*self._menus.values(), self._image_button] if self._dots.value else []
        below = [*menus, *self._follow_panels(state, now)]
        if below != list(self.more.children):
            self.more.children = below
        # The attempt before was stopped; this one can be stopped, too.
        if state.attempt != self._attempt:
            self._attempt, self._stopping = state.attempt, False
            self._button.description, self._button.disabled = "Stop", False
        stopping = self._stopping or state.status == "stopping"
        if stopping and not self._button.disabled:
            self._button.description, self._button.disabled = "stopping…", True
        for each, button in self._of_parts:
            is_new = now - self._pressed.get(each.label, 0.0) < limits.MAX_DRAW_INTERVAL_S
            is_busy = bool(each.is_busy(state)) or is_new  # the state may not show it yet
            button.description = each.busy_label if is_busy else each.label
            button.disabled = is_busy or stopping

    def _update_menus(self, state: RunState) -> None:
        """Offer the present choices. A menu with a single choice is not made."""
        talkers = [f"rank {rank.rank}" for rank in state.ranks if rank.log]
        offered = {
            "chart": [_AUTOMATIC, *list(state.curves.all)[: limits.MAX_DRAWN_RANKS]],
            "axis": list(_AXES) if state.curves.all else [],
            "log": [_LAST, _EVERY, *talkers[: limits.MAX_DRAWN_RANKS]] if talkers else [],
            "ranks": list(_RANKS) if 2 < state.world_size <= MAX_SINGLE_RANKS else [],
        }
        for name, options in offered.items():
            if len(options) < 2 + (name == "chart"):
                continue
            if name not in self._menus:
                self._menus[name] = self._make_menu(name, *options)
            _set_options(self._menus[name], options)

    def _follow_panels(self, state: RunState, now: float) -> list[Any]:
        """Update the buttons of panels and the open panels; return the widgets of the latter.

        A panel of a part that fails is not shown.
        """
        found = (
            attempt("a panel of a part", partial(self._follow_panel, *each, state, now), None)
            for each in self._panels
        )
        return [widget for widget in found if widget is not None]

    def _follow_panel(self, panel: PanelButton, button: Any, state: RunState, now: float) -> Any:
        """Update a panel and its button; return the panel's widget, or None if it is hidden."""
        is_ready = bool(panel.is_ready(state))
        button.disabled = not (is_ready or button.value)
        button.tooltip = panel.tip if is_ready else panel.early_tip
        if not button.value:
            return None
        view = self._views.get(panel.label) or panel.make()
        self._views[panel.label] = view
        view.follow(state, now)
        return view.widget

    def widgets(self) -> list[Any]:
        """Return all widgets, also those that are not shown yet."""
        return [
            self.row,
            *self.row.children,
            self.more,
            *self._menus.values(),
            *(view.widget for view in self._views.values()),
            self._image_button,
            self.panel,
        ]

    def _on_click(self, _button: Any) -> None:
        """Stop the run, once. May be called on any thread."""
        if not self._stopping:
            self._stop()
            self._stopping = self._changed = True

    def _on_part(self, button: RunButton, widget: Any) -> None:
        """Do what a part's button is for, once; show why, if that is impossible.

        The button is disabled while it is done, which may take seconds.
        """
        if widget.disabled:  # a second click was under way
            return
        self._pressed[button.label] = math.inf
        widget.description, widget.disabled = button.busy_label, True
        pressed = 0.0
        try:
            if text := button.press():
                self.panel.value = board.draw_preformatted(text)
            pressed = self._drawn[1] if self._drawn is not None else 0.0
        except (NbtrainError, OSError) as error:
            self.panel.value = board.draw_preformatted(str(error))
            widget.description, widget.disabled = button.label, False
        finally:  # after an interrupt, the next drawing enables the button
            self._pressed[button.label] = pressed
            self._changed = True

    def _on_image(self, _button: Any) -> None:
        """Hide what the panel shows; if it is empty, show the run as a picture to copy."""
        if self.panel.value or self._drawn is None:
            self.panel.value = ""
        else:
            self.panel.value = card.image(card.card(*self._drawn))

    def _on_stacks(self, _button: Any) -> None:
        """Hide what the panel shows; if it is empty, show the stacks.

        A thread collects them, since that takes a moment.
        """
        if self.panel.value:
            self.panel.value = ""
        elif self._stacks_thread is None or not self._stacks_thread.is_alive():
            self._stacks_thread = threading.Thread(target=self._show_stacks, daemon=True)
            self._stacks_thread.start()

    def _show_stacks(self) -> None:
        """Show the stacks of all ranks below the board, or why they cannot be read."""
        try:
            text = str(self._stacks())
        except Exception as error:  # a removed folder, or a process list that cannot be read
            text = f"{type(error).__name__}: {error}"
        self.panel.value = board.draw_preformatted(text)

    def close(self) -> None:
        """Wait for the thread that collects stacks."""
        if self._stacks_thread is not None:
            self._stacks_thread.join()

    def _on_dots(self, _change: Any) -> None:
        """Request a drawing, which shows or hides the menus."""
        self._changed = True

    def _on_choice(self, _change: Any) -> None:
        self._changed = True


def _set_options(menu: Any, options: list[str]) -> None:
    """Change the options of a menu and keep the choice, without a message to the page in between.

    Does nothing if the options are the same, or the choice is no longer among them.
    """
    if list(menu.options) != options and menu.value in options:
        chosen = menu.value
        with menu.hold_sync():
            menu.options = options
            menu.value = chosen
