"""Sliders below the title of a live board, which change settings of the training.

A slider that the user moves makes a request, as `Run.turn` does. The board moves it, too: to the
present value. In a background run it does so in another thread than the clicks, so each slider
remembers the value that it was moved to last: another one comes from the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...part_api import NbtrainError, RunFolder, RunState, strip_escapes
from ...part_api import events as ev
from . import limits, requests
from .orders import Action, Setting


def settings_of(state: RunState) -> tuple[ev.SettingRow, ...]:
    """Return the settings that sliders can change; empty before the first step."""
    return next((rank.settings for rank in state.ranks if rank.settings), ())


class SettingsPanel:
    """One slider for each setting, and why the last request was called off."""

    def __init__(self, folder: RunFolder) -> None:
        import ipywidgets

        self._folder = folder
        self._sliders: dict[tuple[Any, ...], _Slider] = {}
        self._answer = ipywidgets.Label()
        self.widget = ipywidgets.VBox((), layout={"width": "100%"})

    def follow(self, state: RunState, now: float) -> None:
        """Show the present settings, and what became of requests. `now` is in seconds."""
        hidden = set(self._sliders)
        for optimizer, label, name, value, low, high, is_turned, is_mixed in settings_of(state):
            key = label, isinstance(value, int), low is None
            if key not in self._sliders and (low is not None or value > 0):
                self._sliders[key] = _Slider(strip_escapes(label, 40), value, low, high)
            if slider := self._sliders.get(key):
                slider.turn = partial(self._turn, optimizer, name)
                slider.is_mixed, slider.back.disabled = is_mixed, not is_turned
                self._take_answer(slider, state, now)
                slider.follow(value, low, high, now)
                hidden.discard(key)
        for key, slider in self._sliders.items():
            slider.row.layout.display = "none" if key in hidden else None
        shown = [slider.row for slider in self._sliders.values()]
        shown += [self._answer] if self._answer.value else []
        if shown != list(self.widget.children):
            self.widget.children = shown

    def _turn(self, optimizer: int, name: str, value: Setting) -> str:
        """Request a new value, and return the token of the request; show why it is impossible."""
        which = None if optimizer < 0 else optimizer
        action = Action("turn", settings={name: value}, optimizer=which)
        try:
            return requests.write(self._folder, action, "by a slider")
        except (NbtrainError, OSError) as error:
            self._answer.value = str(error)
            return ""

    def _take_answer(self, slider: _Slider, state: RunState, now: float) -> None:
        """Release a slider whose request is decided; show why a request was called off."""
        answer = next((s for s in state.steered if s.token == slider.token), None)
        if slider.token and answer is not None and answer.status != "pending":
            is_applied = answer.status == "applied"
            self._answer.value = "" if is_applied else answer.text
            slider.token, slider.rests_until = "", now + is_applied * limits.SLIDER_REST_S


class _Slider:
    """A slider with a button that gives the setting back to the code.

    Without bounds the scale is logarithmic.
    """

    def __init__(self, label: str, value: float, low: float | None, high: float | None) -> None:
        import ipywidgets

        self.turn: Callable[[Setting], str] = lambda _: ""
        self.token, self.rests_until = "", 0.0
        self.is_mixed = False
        self._now = 0.0
        common: dict[str, Any] = {
            "description": label,
            "continuous_update": False,
            "style": {"description_width": "160px"},
            "layout": {"flex": "1 1 300px", "max_width": "460px"},
        }
        if low is None or high is None:
            middle = round(math.log10(value))
            common |= {"min": middle - 2, "max": middle + 2, "step": 0.05}
            self._slider = ipywidgets.FloatLogSlider(value, **common)
        elif isinstance(value, int):
            self._slider = ipywidgets.IntSlider(value, **common, min=low, max=high)
        else:
            common |= {"min": low, "max": high, "step": (high - low) / 100}
            self._slider = ipywidgets.FloatSlider(value, readout_format=".3g", **common)
        self._moved_to = self._slider.value
        self._slider.observe(self._on_move, "value")
        tip = "Give this setting back to the training code"
        self.back = ipywidgets.Button(
            description="back", tooltip=tip, disabled=True, layout={"width": "auto"}
        )
        self.back.on_click(lambda _: self._request(None))
        layout = {"flex_flow": "row wrap"}
        self.row = ipywidgets.HBox((self._slider, self.back), layout=layout)

    def follow(self, value: float, low: float | None, high: float | None, now: float) -> None:
        """Move to the present value, unless the user moved the slider, or it moved just now."""
        self._now = now
        if self.token or now < self.rests_until or (low is None and value <= 0):
            return
        slider = self._slider
        if low is None or high is None:
            low = min(slider.min, math.floor(math.log10(value)))
            high = max(slider.max, math.ceil(math.log10(value)))
            value = min(max(value, slider.base**low), slider.base**high)
        else:
            value = min(max(value, low), high)
        if (value, low, high) != (self._moved_to, slider.min, slider.max):
            self._moved_to, self.rests_until = value, now + limits.SLIDER_REST_S
            with slider.hold_sync(), slider.hold_trait_notifications():
                slider.min, slider.max, slider.value = low, high, value

    def _on_move(self, change: Any) -> None:
        """Request the value that the user has moved the slider to.

        Groups with different values keep their ratios.
        """
        before, value = self._moved_to, change["new"]
        if value == before:
            return
        self._moved_to = value
        number = value if isinstance(value, int) else float(f"{value:.4g}")
        self._request(f"*{value / before:.4g}" if self.is_mixed else number)

    def _request(self, value: Setting) -> None:
        self.rests_until = self._now + limits.SLIDER_REST_S
        self.token = self.turn(value)
