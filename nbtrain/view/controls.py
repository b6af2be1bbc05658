"""What a user can do on a live board: stop the run, ask where it is, choose what is shown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..state import RunState
from . import html

_TOOLTIP = "End all ranks of this run, as ■ does: they have 2 s to save what they need"
_WHERE = "Where each rank is now, line by line: press it when nothing moves"
_AUTOMATIC, _EVERY = "automatic", "all ranks"
_AXES = {_AUTOMATIC: None, "linear": False, "logarithmic": True}
MENU = 64
"""Entries of a menu, at most: of more ranks or metrics, the first."""


class Controls:
    """Buttons, and a menu for each choice that there is.

    `row` is the widget that has them, `panel` shows the stacks of the ranks once somebody asked.
    What was chosen is in `look`.
    """

    def __init__(self, stop: Callable[[], None], stacks: Callable[[], object]) -> None:
        import ipywidgets

        self._stop = stop
        self._stacks = stacks
        self._asking: threading.Thread | None = None
        self._changed = self._stopping = False
        self._button = ipywidgets.Button(
            description="Stop", icon="stop", tooltip=_TOOLTIP, layout={"width": "110px"}
        )
        self._button.on_click(self._on_click)
        self._where = ipywidgets.Button(
            description="Stacks", icon="search", tooltip=_WHERE, layout={"width": "110px"}
        )
        self._where.on_click(self._on_where)
        self.panel = ipywidgets.HTML()
        self._chart = self._menu("chart", _AUTOMATIC)
        self._axis = self._menu("axis", *_AXES)
        self._log = self._menu("log", _EVERY)
        self.row = ipywidgets.HBox([self._button, self._where], layout={"flex_flow": "row wrap"})

    def _menu(self, what: str, *options: str) -> Any:
        import ipywidgets

        style = {"description_width": "initial"}
        menu = ipywidgets.Dropdown(
            options=options, description=f"{what}:", style=style, layout={"width": "170px"}
        )
        menu.observe(self._on_choice, "value")
        return menu

    @property
    def look(self) -> html.Look:
        """What the user chose to see."""
        metric, log = self._chart.value, self._log.value
        return html.Look(
            metric=None if metric == _AUTOMATIC else metric,
            rank=None if log == _EVERY else int(log.removeprefix("rank ")),
            log=_AXES[self._axis.value],
        )

    def has_changed(self) -> bool:
        """Whether the user did anything since this was last asked."""
        changed, self._changed = self._changed, False
        return changed

    def follow(self, state: RunState) -> None:
        """Offer what there is to choose by now, and say when the run is stopping."""
        talkers = [f"rank {rank.rank}" for rank in state.ranks if rank.log]
        _offer(self._chart, [_AUTOMATIC, *list(state.curves.all)[:MENU]])
        _offer(self._log, [_EVERY, *talkers[:MENU]])
        menus = (
            (self._chart, len(self._chart.options) > 2),
            (self._axis, bool(state.curves.all)),
            (self._log, len(self._log.options) > 2),
        )
        wanted = [self._button, self._where, *(menu for menu, has_choice in menus if has_choice)]
        if wanted != list(self.row.children):
            self.row.children = wanted
        stopping = self._stopping or state.status == "stopping"
        if stopping and not self._button.disabled:
            self._button.description, self._button.disabled = "stopping…", True

    def widgets(self) -> list[Any]:
        """Return the widgets, also those that are not shown yet."""
        return [self.row, self._button, self._where, self._chart, self._axis, self._log, self.panel]

    def _on_click(self, _button: Any) -> None:
        """Hear a click, from whatever thread."""
        if not self._stopping:
            self._stop()
            self._stopping = self._changed = True

    def _on_where(self, _button: Any) -> None:
        """Show or hide where the ranks are; asking takes a moment, which nobody waits for."""
        if self.panel.value:
            self.panel.value = ""
        elif self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._show_stacks, daemon=True)
            self._asking.start()

    def _show_stacks(self) -> None:
        try:
            told = str(self._stacks())
        except Exception as error:  # the folder is gone, a process list cannot be read
            told = f"{type(error).__name__}: {error}"
        self.panel.value = html.preformatted(told)

    def close(self) -> None:
        """Take them off the page."""
        if self._asking is not None:
            self._asking.join()

    def _on_choice(self, _change: Any) -> None:
        self._changed = True


def _offer(menu: Any, options: list[str]) -> None:
    """Change what a menu offers, and keep what is chosen in it."""
    if list(menu.options) != options and menu.value in options:
        chosen = menu.value
        with menu.hold_sync():
            menu.options = options
            menu.value = chosen
