"""The settings of optimizers that can be turned, and which values they can have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...part_api import PlanError
from .orders import Setting

SETTINGS = {"lr": math.inf, "weight_decay": math.inf, "momentum": 1.0, "betas": 1.0}
"""The settings of optimizers that can be turned, and the bound that they must be below."""

Value = float | tuple[float, float]


class TurnError(ValueError):
    """A setting cannot be turned so. The text is for people."""


def check(settings: Mapping[str, Setting]) -> None:
    """Raise `TurnError` for a value that no training can have."""
    if not settings:
        raise TurnError("nothing to turn: give a setting with its new value, such as lr=3e-4")
    for name, value in settings.items():
        if isinstance(value, str) and name != "betas":
            factor(name, value)
        elif value is not None:
            _check_numbers(name, value)


def _check_numbers(name: str, value: Any) -> None:
    """Raise `TurnError` unless a value is a number within the bounds of its setting; betas two."""
    numbers: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    if len(numbers) != (2 if name == "betas" else 1):
        kind = "two numbers" if name == "betas" else "a number"
        raise TurnError(f"{name} must be {kind}, not {value!r}")
    for number in numbers:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number):
            raise TurnError(f"{name} must be a finite number, not {number!r}")
        if name in SETTINGS and not 0 <= number < SETTINGS[name]:
            most = "" if SETTINGS[name] == math.inf else f" and below {SETTINGS[name]:g}"
            raise TurnError(f"{name} must be at least 0{most}, not {number:g}")


def read_setting(name: str, text: str) -> Setting:
    """Return the setting that was typed. Raises `TurnError` for any other text."""
    if text == "back":
        return None
    if text[:1] in ("*", "/"):
        return text
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        raise TurnError(f"{name}={text}: the value must be a number, such as {name}=0.1") from None
    return (numbers[0], numbers[1]) if len(numbers) == 2 else numbers[0]


def read_settings(given: Mapping[str, Setting] | Iterable[str]) -> dict[str, Setting]:
    """Return the settings for the first step on, also from texts such as ``lr=/3``.

    Raises `PlanError` for a name or a value that is impossible.
    """
    try:
        if isinstance(given, str):
            given = given.split()
        if not isinstance(given, Mapping):
            pairs = [str(each).partition("=") for each in given]
            given = {name: read_setting(name, text) for name, _, text in pairs}
        for name, value in given.items():
            if name not in SETTINGS or value is None:
                known = ", ".join(SETTINGS)
                raise TurnError(f"turn: {name!r} must be one of {known}, with a value")
        check(given)
    except TurnError as error:
        raise PlanError(str(error)) from None
    return dict(given)


def factor(name: str, text: str) -> float:
    """Return the factor of ``*0.5`` or ``/3``. Raises `TurnError`."""
    try:
        number = float(text[1:])
        if text[:1] in ("*", "/") and math.isfinite(number) and number > 0:
            return number if text[0] == "*" else 1 / number
    except ValueError:
        pass
    raise TurnError(f"{name} must be a number, or a factor such as '*0.5' or '/3', not {text!r}")
