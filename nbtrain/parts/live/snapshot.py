"""Remembers the values of the notebook's variables when the ranks got them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Snapshot:
    """The variables, without keeping them alive: plain values by value, others by identity."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._marks = {name: _mark(value) for name, value in list(namespace.items())}

    def take(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Take a new snapshot of the variables."""
        self._marks.update({name: _mark(namespace[name]) for name in names if name in namespace})

    def is_same(self, name: str, value: Any) -> bool:
        """Whether the ranks got this very object under this name."""
        kind, mark = self._marks.get(name, ("unknown", None))
        return mark() is value if kind == "weak" else kind == "id" and mark == id(value)

    def differs(self, name: str, value: Any) -> bool:
        """Whether a variable was assigned something else since; not if the ranks made it."""
        kind, mark = self._marks.get(name, ("unknown", None))
        if kind == "plain":
            is_nan = value != value and mark != mark  # which differs from itself
            return type(value) is not type(mark) or bool(value != mark and not is_nan)
        if kind == "weak":
            return mark() is not value
        return kind == "id" and mark != id(value)


def _mark(value: Any) -> tuple[str, Any]:
    """Return what a value is recognised by: the value, a weak reference, or its id."""
    if type(value) in _PLAIN:
        return "plain", value
    try:
        return "weak", weakref.ref(value)
    except TypeError:
        return "id", id(value)
