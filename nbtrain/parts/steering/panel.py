"""Sliders below the title of a live board, which change settings of the training.

A slider that the user lets go makes a request, as `Run.turn` does. The board moves a slider, too,
once a request was carried out or called off. It does not follow a schedule: the page does not
report that the user drags a slider, and would drop it. A text shows the present value then.

In a background run the board is drawn in another thread than the clicks are handled. So a slider
remembers where it was moved to last: any other value comes from the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...part_api import NbtrainError, RunFolder, RunState, strip_escapes
from ...part_api import events as ev
from . import requests
from .orders import Action, Setting


def settings_of(state: RunState) -> ev.SettingsSeen | None:
    """Return the settings that sliders can change; None before the first step."""
    return next((r.settings for r in state.ranks if r.settings and r.settings.settings), None)


class SettingsPanel:
    """One slider for each setting, and why the last request was called off."""

    def __init__(self, folder: RunFolder) -> None:
        import ipywidgets

        self._folder = folder
        self._sliders: dict[tuple[str, bool, bool], _Slider] = {}
        self._answer = ipywidgets.Label()
        self.widget = ipywidgets.VBox((), layout={"width": "100%"})

    def follow(self, state: RunState, now: float) -> None:
        """Show the present settings, and what became of requests."""
        seen, hidden = settings_of(state), set(self._sliders)
        for row in seen.settings if seen else ():
            optimizer, label, name, value, low, high, is_turned, is_mixed = row
            key = label, isinstance(value, int), low is None
            if key not in self._sliders and (low is not None or value > 0):
                self._sliders[key] = _Slider(strip_escapes(label, 40), value, low, high)
            if seen and (slider := self._sliders.get(key)):
                slider.turn = partial(self._turn, optimizer, name)
                slider.is_mixed, slider.back.disabled = is_mixed, not is_turned
                self._take_answer(slider, state)
                slider.follow(value, low, high, seen.turns)
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

    def _take_answer(self, slider: _Slider, state: RunState) -> None:
        """Release a slider whose request is decided; show why a request was called off."""
        answer = next((s for s in state.steered if s.token == slider.token), None)
        if slider.token and answer is not None and answer.status != "pending":
            slider.token, slider.is_off = "", answer.status == "called off"
            self._answer.value = answer.text if slider.is_off else ""


class _Slider:
    """A slider with a button that gives the setting back to the code.

    Without bounds the scale is logarithmic.
    """

    def __init__(self, label: str, value: float, low: float | None, high: float | None) -> None:
        import ipywidgets

        self.turn: Callable[[Setting], str] = lambda _: ""
        self.token = ""
        """That of the request that is under way."""
        self.is_off = False
        """Whether the slider is where the user moved it, but the request was called off."""
        self.is_mixed = False
        self._present, self._turns = value, -1
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
        layout = {"width": "auto"}
        self.back = ipywidgets.Button(description="back", tooltip=tip, layout=layout)
        self.back.on_click(lambda _: self._request(None))
        self._now = ipywidgets.Label()
        children = self._slider, self.back, self._now
        self.row = ipywidgets.HBox(children, layout={"flex_flow": "row wrap"})

    def follow(self, value: float, low: float | None, high: float | None, turns: int) -> None:
        """Show the present value, after `turns` changes; after a new one, move the slider to it."""
        self._present = value
        if not self.token and (self.is_off or turns != self._turns):
            self.is_off, self._turns = False, turns
            self._move(value, low, high)
        present, there = f"{value:.3g}", f"{self._slider.value:.3g}"
        self._now.value = f"now {present}" if present != there else ""

    def _move(self, value: float, low: float | None, high: float | None) -> None:
        """Move the slider, and extend its scale if necessary."""
        slider = self._slider
        if low is None or high is None:
            if value <= 0:  # which a logarithmic scale does not have
                return
            low = min(slider.min, math.floor(math.log10(value)))
            high = max(slider.max, math.ceil(math.log10(value)))
            value = min(max(value, slider.base**low), slider.base**high)
        else:
            value = min(max(value, low), high)
        self._moved_to = value
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
        if self.is_mixed:
            self._request(f"*{value / (before if self.token else self._present):.4g}")
        else:
            self._request(value if isinstance(value, int) else float(f"{value:.4g}"))

    def _request(self, value: Setting) -> None:
        """Request a value; if that is impossible, the slider goes back."""
        self.token = self.turn(value)
        self.is_off = not self.token
