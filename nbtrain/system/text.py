"""Formats text: numbers with units, shortened texts, short reprs of values. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from html import unescape
from typing import Any

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")

MAX_TIME_S = 1e11
"""A longer duration is written as ∞, and a later time since the epoch is an error (3,000 years)."""


def format_bytes(size: float) -> str:
    """Write a number of bytes in binary units: ``512 B``, ``3 KiB``, ``64 MiB``, ``1.3 GiB``."""
    if size < 1024:
        return f"{size:,.0f} B"
    power = min(4, (max(1, math.ceil(size)).bit_length() - 1) // 10)
    amount = size / (1 << 10 * power)
    return f"{amount:,.{int(power > 2 and amount < 100)}f} {'KMGT'[power - 1]}iB"


def format_bytes_of(used: float, limit: float) -> str:
    """Write a part of a number of bytes: ``2.6 of 64.0 GiB``, ``800 MiB of 64.0 GiB``."""
    part, whole = format_bytes(used), format_bytes(limit)
    same_unit = part.split()[1] == whole.split()[1]
    return f"{part.split()[0] if same_unit else part} of {whole}"


def format_count(count: float) -> str:
    """Write a count by its size: ``1.2 B``, ``86 M``, ``43 k``, ``12``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:  # which is rounded to 1.0
            share = count / unit
            return f"{share:.1f} {name}" if share < 9.95 else f"{share:.0f} {name}"
    return f"{count:g}"


def format_number(value: float | str) -> str:
    """Write a metric: a whole number with commas (``1,234``), another with four significant digits.

    Without decimals from 10,000 on (``12,346``). From 1e6 on and for tiny values with an exponent
    (``1.235e+06``), except an int. A text stays as it is.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):,d}"
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e6 else f"{value:.4g}"


def format_rate(value: float) -> str:
    """Write a rate with three digits, and a large one as an integer: ``12.0``, ``3,072``."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def format_duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``12 s``, ``3:07 min``, ``2:03:07 h``; ``∞`` from 1e11 s on.

    ``∞`` also for NaN.
    """
    if not abs(seconds) < MAX_TIME_S:
        return "∞"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def with_article(noun: str) -> str:
    """Return a noun with its article: ``an int``, ``a str``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def plural(count: int, noun: str) -> str:
    """Write a number of things: ``1 rank``, ``2 ranks``, ``12,000 lines``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten(text: str, width: int) -> str:
    """Return at most `width` characters of a text, with ``…`` at the end if it was cut."""
    return text if len(text) <= width else text[: width - 1] + "…"


def strip_escapes(line: str, width: int = 400) -> str:
    """Return what a terminal shows of a line after all overwrites, without colours.

    It is cut to `width` characters. Other control characters are removed, except tabs.
    """
    text = _ANSI.sub("", line[-16 * width :]).rstrip("\r")
    return shorten(_CONTROL.sub("", text.rsplit("\r", 1)[-1]), width)


def strip_controls(text: str) -> str:
    """Return lines without escapes and control characters except tabs.

    Of a line that was overwritten, such as a progress bar, the last state stays.
    """
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ANSI.sub("", text).split("\n"))
    return "\n".join(_CONTROL.sub("", line) for line in lines)


_MAX_HTML_CHARS = 1 << 14


def text_of_html(html: str) -> str:
    """Return the text at the start of a page, without tags and with a line for each table row."""
    html = html[:_MAX_HTML_CHARS]  # some patterns take quadratic time
    html = re.sub(r"<(style|script)\b.*?(?:</\1\s*>|\Z)|<!--.*?-->", "", html, flags=re.S | re.I)
    html = re.sub(r"\s+", " ", html)
    html = re.sub(r"</(?:tr|p|div|li|h\d)\s*>|<(?:br|p|tr)\b[^<>]*>", "\n", html, flags=re.I)
    html = re.sub(r"</t[dh]\s*>", "  ", html, flags=re.I)
    lines = unescape(re.sub(r"</?[a-z][^<>]*>", "", html, flags=re.I)).split("\n")
    return "\n".join(filter(None, map(str.strip, lines)))


def strip_escapes_by_line(text: str | None) -> str | None:
    """Return a text without escapes, each line cut to 2,000 characters.

    Overwritten parts of a line stay, such as the states of a progress bar.
    """
    lines = (text or "").replace("\r", " ").split("\n")
    return text and "\n".join(strip_escapes(line, 2000) for line in lines)


def short_repr(value: Any) -> str:
    """Return a short text for a value, without reading large values or devices. Never raises."""
    try:
        return _repr(value, width=200, depth=3)
    except Exception:  # a user's `__repr__`, or an integer of 5,000 digits
        return f"<{type(value).__name__}>"


def _repr(value: Any, width: int, depth: int) -> str:
    """Return a short form of a value, `depth` containers deep; an array as its shape.

    Calls `__repr__` only of numbers, texts and keys. Raises what they raise: see `short_repr`.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (bool, int, complex)):
        return shorten(repr(value), width)
    if isinstance(value, str):
        return shorten(repr(value[: width + 1]), width)
    if isinstance(value, (dict, list, tuple)) and depth == 0:
        return "…"
    if isinstance(value, dict) and len(value) > 8 and all(map(_is_array, value.values())):
        return f"<{len(value)} tensors>"
    if isinstance(value, dict):
        items = [f"{k!r}: {_repr(v, 40, depth - 1)}" for k, v in list(value.items())[:8]]
        return shorten(f"{{{', '.join(items)}{', …' if len(value) > 8 else ''}}}", width)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_repr(v, 40, depth - 1) for v in value[:8])
        inner += ", …" if len(value) > 8 else ""
        return shorten(f"[{inner}]" if isinstance(value, list) else f"({inner})", width)
    name = type(value).__name__
    if not _is_array(value):
        return f"<{name}>"
    if not value.shape and str(getattr(value, "device", "cpu")) == "cpu":
        return f"{name}({_repr(value.item(), 40, 1)})"
    return f"{name}{list(value.shape)}"


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple)


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks: ``rank 3``, ``ranks 0, 4–7``."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    spans_text = [str(a) if a == b else f"{a}–{b}" for a, b in spans]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(spans_text)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` if a known name is similar, else ""."""
    by_letters = {re.sub(r"[-_]", "", k).lower(): k for k in known}
    letters = re.sub(r"[-_]", "", name).lower()
    alike = difflib.get_close_matches(letters, by_letters, n=1, cutoff=0.7)
    return f" (did you mean {by_letters[alike[0]]}?)" if alike else ""


_RANK = re.compile(
    r"\s*(?:[\[(<]\s*(?:global[ _-]?)?rank[ _:=#-]*(\d+)(?:\s*/\s*\d+)?\s*[\])>]\s*:?"
    r"|(?:global[ _-]?)?rank[ _=#-]*(\d+)(?:\s*/\s*\d+)?\s*[:|>])\s*",
    re.I,
)
"""``[rank 3]``, ``(rank3/8)`` or ``rank 3:`` at the start of a line."""


def strip_rank(line: str, rank: int) -> str:
    """Return a line without its own rank at the start (``[rank 3] loading``).

    This makes equal lines of several ranks equal. Another rank, and a line with only the rank,
    stay.
    """
    if "ank" not in line[:24] and "ANK" not in line[:24]:
        return line
    name = _RANK.match(line)
    if name is None or name.end() == len(line) or int(name[1] or name[2]) != rank:
        return line
    return line[name.end() :]
