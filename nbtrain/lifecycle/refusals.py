"""Keeps why launches were refused until the cell ends: code that catches the error hides it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..errors import PlanError, PreflightError

_refusals: list[str] = []


@contextlib.contextmanager
def refusals_kept() -> Iterator[None]:
    """Keep why a launch in this block was refused."""
    try:
        yield
    except (PlanError, PreflightError) as error:
        text = f"{type(error).__name__}: {error}"
        is_of_cell = threading.current_thread() is threading.main_thread()
        if is_of_cell and text not in _refusals:  # one launch may come through two doors
            _refusals.append(text)
        raise


def take_refusals() -> list[str]:
    """Return why launches were refused since the last call."""
    taken = _refusals.copy()
    _refusals.clear()
    return taken
