"""What each rank did over time, a strip each: computing, waiting, saving, stalled. Pure.

A strip brings its ground along, and what a rank did differs in height and lightness as well as in
hue. Of many ranks, neighbours share a strip, which shows the worst of them at each moment.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from ...system.text import format_duration
from ...tracking.overview import weather
from ...tracking.state import RunState
from . import theme

ROWS = 64
"""Strips that are drawn at most."""

BINS = 6
"""Bins there must be before there is something to see."""

LIVE_BYTES, BYTES = 5_000, 20_000
"""What the picture may take: of more, its bins are joined."""

_WIDTH, _LEFT, _BOTTOM = 900, 60, 18

_LOOKS = {
    weather.COMPUTE: ("#2f88d0", 1.0),
    weather.DATA: (theme.WARN.fill, 0.7),
    weather.PEERS: ("#9a9a9a", 0.35),
    weather.COMPILING: ("#5b3a8e", 1.0),
    weather.SAVING: (theme.GOOD.fill, 1.0),
    weather.STALLED: (theme.WARN.ink, 0.85),
    weather.FAILED: (theme.BAD.fill, 1.0),
}
"""The colour and the height of what a rank did."""

_ORDER = {ord(letter): str(rank) for rank, letter in enumerate(weather.NAMES)}
_LETTERS = {ord(str(rank)): letter for rank, letter in enumerate(weather.NAMES)}


def draw(state: RunState, now: float) -> str:
    """Draw the strips with their legend; empty while there is little to see."""
    at = state.ended if state.ended is not None else now
    strips = [rank.weather if rank.is_over else rank.weather.drawn(at) for rank in state.ranks]
    _, width, rows = weather.aligned(strips, at)
    count = max(map(len, rows), default=0)
    if count < BINS or not any(row.strip() for row in rows):
        return ""
    per = -(-len(rows) // ROWS)
    bands = [
        _worst([row.ljust(count) for row in rows[i : i + per]]) for i in range(0, len(rows), per)
    ]
    limit = BYTES if state.is_over else LIVE_BYTES
    while len(inner := _strips(bands)) > limit and len(bands[0]) > BINS:
        bands = [_halved(band) for band in bands]
    names = [
        str(i) if per == 1 else f"{i}–{min(i + per, len(rows)) - 1}"
        for i in range(0, len(rows), per)
    ]
    height = len(bands) * _pitch(len(bands))
    inner += _labels(names, height, count * width, is_over=state.is_over)
    label = "what each rank did over time"
    drawn = theme.picture(
        inner, (_WIDTH, height + _BOTTOM), label, margin="6px 0 0", as_image=state.is_over
    )
    return drawn + _legend({letter for band in bands for letter in band})


def _pitch(rows: int) -> int:
    return 14 if rows <= 8 else 10 if rows <= 16 else 3


def _worst(rows: list[str]) -> str:
    """Return the worst of what several ranks did in each bin."""
    if len(rows) == 1:
        return rows[0]
    return "".join(map(max, *(row.translate(_ORDER) for row in rows))).translate(_LETTERS)


def _halved(band: str) -> str:
    return _worst([band[::2], band[1::2].ljust(len(band[::2]))])


def _strips(bands: list[str]) -> str:
    """Draw the strips: all that looks the same is one path."""
    pitch, paths = _pitch(len(bands)), dict.fromkeys(_LOOKS, "")
    thick = pitch - 2 if pitch > 3 else pitch  # many are a barcode
    per = (_WIDTH - _LEFT) / len(bands[0])
    for row, band in enumerate(bands):
        at = 0
        for letter, same in groupby(band):
            length = len(list(same))
            if letter in paths:
                share = _LOOKS[letter][1] if pitch > 3 else 1.0
                low = row * pitch + thick - thick * share / 2
                paths[letter] += f"M{_LEFT + at * per:.0f} {low:g}h{max(1, length * per):.0f}"
            at += length
    ground = "".join(f"M{_LEFT} {r * pitch + thick / 2:g}H{_WIDTH}" for r in range(len(bands)))
    drawn = f'<path d="{ground}" stroke="{theme.CALM.fill}" stroke-width="{thick}"/>'
    for letter, path in paths.items():
        colour, share = _LOOKS[letter]
        share = share if pitch > 3 else 1.0
        if path:
            drawn += f'<path d="{path}" stroke="{colour}" stroke-width="{thick * share:g}"/>'
    return drawn


def _labels(names: list[str], height: int, seconds: float, *, is_over: bool) -> str:
    """Draw the numbers of ranks, of many the first and the last, and the time below."""
    ink = f'fill="{theme.GREY}"' if is_over else 'fill="currentColor" fill-opacity=".75"'
    pitch, every = height / len(names), len(names) <= 16
    rows = "".join(
        f'<text x="{_LEFT - 6}" y="{max(9, (i + 0.5) * pitch + 3):g}" text-anchor="end">'
        f"{name}</text>"
        for i, name in enumerate(names)
        if every or i in (0, len(names) - 1)
    )
    below = height + 12
    times = f'<text x="{_LEFT}" y="{below}">0 s</text>'
    end = format_duration(float(round(seconds)) if seconds >= 10 else seconds)
    times += f'<text x="{_WIDTH}" y="{below}" text-anchor="end">{end}</text>'
    rank = f'<text x="0" y="{below}">rank</text>'
    return f'<g font-family="system-ui,sans-serif" font-size="10.5" {ink}>{rows}{rank}{times}</g>'


def _legend(letters: set[str]) -> str:
    """Name what is drawn, each behind a piece of its strip."""
    pieces = []
    for letter, (colour, share) in _LOOKS.items():
        if letter in letters:
            box = f"width:18px;height:{10 * share:.0f}px;background:{colour}"
            ground = (
                f"display:inline-flex;align-items:flex-end;height:10px;background:{theme.CALM.fill}"
            )
            name = escape(weather.NAMES[letter])
            pieces.append(
                f'<span style="white-space:nowrap;margin-right:14px"><span style="{ground};'
                f'margin-right:5px"><span style="{box}"></span></span>{name}</span>'
            )
    return f'<div style="font-size:11px;{theme.SOFT}">{"".join(pieces)}</div>'
