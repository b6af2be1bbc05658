"""A short text for a value, whatever it is."""

from __future__ import annotations

from typing import Any


def preview(value: Any) -> str:
    """Return a short text for a result, without reading a large value or a device; never raises."""
    try:
        return _preview(value, width=200, depth=3)
    except Exception:  # a user's __repr__, a property that raises, a number of 5,000 digits
        return f"<{type(value).__name__}>"


def _preview(value: Any, width: int, depth: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (bool, int, complex)):
        return _cut(repr(value), width)
    if isinstance(value, str):
        return _cut(repr(value[: width + 1]), width)
    if isinstance(value, (dict, list, tuple)) and depth == 0:
        return "…"
    if isinstance(value, dict) and len(value) > 8 and all(map(_is_array, value.values())):
        return f"<{len(value)} tensors>"
    if isinstance(value, dict):
        items = [f"{k!r}: {_preview(v, 40, depth - 1)}" for k, v in list(value.items())[:8]]
        return _cut(f"{{{', '.join(items)}{', …' if len(value) > 8 else ''}}}", width)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_preview(v, 40, depth - 1) for v in value[:8])
        inner += ", …" if len(value) > 8 else ""
        return _cut(f"[{inner}]" if isinstance(value, list) else f"({inner})", width)
    name = type(value).__name__
    if not _is_array(value):
        return f"<{name}>"
    if not value.shape and str(getattr(value, "device", "cpu")) == "cpu":
        return f"{name}({_preview(value.item(), 40, 1)})"
    return f"{name}{list(value.shape)}"


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
