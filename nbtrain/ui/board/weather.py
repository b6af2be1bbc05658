"""Draws what each rank did over time, one strip each: computing, waiting, saving. Pure.

What a rank did differs in height and pattern as well as in hue, in mid-tones that stand out from
any page; numbers and times are text of the page. Of many ranks, neighbours share a strip, which
shows the worst of them at each moment.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import NamedTuple

from ...tracking.overview import weather
from ...tracking.state import RunState
from .. import labels
from . import theme

ROWS = 64
"""Strips that are drawn at most."""

BINS = 6
"""Bins there must be before there is something to see."""

LIVE_BYTES, BYTES = 4_500, 20_000
"""What the picture may take: of more, its bins are joined."""

_WIDTH, _LEFT, _BOTTOM = 900, 7, 16
"""Of a card: pixels, and (of the left) percent, which lets a picture be of any width."""

_GUTTER, _ROW = 52, 17
"""Pixels of a board's page for the numbers of ranks, and for a row of numbers above and below."""

LOOKS = {
    weather.UNKNOWN: (theme.GREY, 0.0),
    weather.COMPUTE: (theme.BLUE, 1.0),
    weather.DATA: (theme.AMBER, 0.7),
    weather.PEERS: (theme.GREY, 0.35),
    weather.COMPILING: (theme.PURPLE, 1.0),
    weather.SAVING: (theme.GREEN, 0.7),
    weather.STALLED: (theme.ORANGE, 1.0),
    weather.FAILED: (theme.RED, 1.0),
}
"""The colour and the height of what a rank did."""

DASHED = {weather.STALLED: "7 2", weather.COMPILING: "3 1"}
"""What is a pattern too: neither height nor hue alone tells it from computing, or a failure."""

_ORDER = {ord(letter): str(rank) for rank, letter in enumerate(weather.NAMES)}
_LETTERS = {ord(str(rank)): letter for rank, letter in enumerate(weather.NAMES)}


class Strips(NamedTuple):
    """The strips of a run, as SVG elements in units of bins and pixels."""

    bands: list[str]
    names: list[str]
    """The rank that each band is of, or begins with."""
    marks: list[tuple[str, float]]
    """Epochs that are over and attempts: where each ended or began, as a share of the strips."""
    seconds: float
    now: str = ""
    """The epoch that goes on, if it is known and others are over."""

    @property
    def height(self) -> int:
        return len(self.bands) * _pitch(len(self.bands))

    @property
    def letters(self) -> set[str]:
        return {letter for band in self.bands for letter in band}

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The name and the colour of each thing that is drawn."""
        drawn = self.letters - {weather.UNKNOWN}
        return [(weather.NAMES[n], look[0]) for n, look in LOOKS.items() if n in drawn]


def draw(state: RunState, now: float) -> str:
    """Draw the strips with their text and legend; empty while there is little to see."""
    strips = strips_of(state, now, BYTES if state.is_over else LIVE_BYTES)
    if strips is None:
        return ""
    size, label = (len(strips.bands[0]), strips.height), "what each rank did over time"
    inner = _strips(strips.bands)
    picture = theme.stretched(inner, size, strips.height, label, as_image=state.is_over)
    return (
        f'<div style="position:relative;margin:{_ROW + 10}px 0 {_ROW + 2}px {_GUTTER}px;'
        f'height:{strips.height}px">{picture}{_text(strips, state.elapsed(now))}</div>'
        f"{_legend(strips.letters)}"
    )


def strips_of(state: RunState, now: float, limit: int = LIVE_BYTES) -> Strips | None:
    """Return the strips, from the launch on; None while there is little to see."""
    at = state.ended if state.ended is not None else now
    strips = [rank.weather if rank.is_over else rank.weather.drawn(at) for rank in state.ranks]
    start, width, rows = weather.aligned(strips, at)
    before = min(weather.BINS, max(0, round((start - state.created) / width)))
    rows = [weather.UNKNOWN * before + row for row in rows]
    start -= before * width
    count = max(map(len, rows), default=0)
    if count < BINS + before or not any(row.strip() for row in rows):
        return None
    per = -(-len(rows) // ROWS)
    bands = [
        _worst([row.ljust(count) for row in rows[i : i + per]]) for i in range(0, len(rows), per)
    ]
    while len(_strips(bands)) > limit and len(bands[0]) > BINS:
        bands = list(map(weather.halved, bands))
    last = len(rows) - 1
    names = [str(i if i + per <= last else last) for i in range(0, len(rows), per)]
    seconds = count * width
    marks = _marks(state, start, seconds)
    is_epoch = bool(marks) and marks[-1][0].isdigit() and not state.is_over
    current = str(int(marks[-1][0]) + 1) if is_epoch and marks[-1][1] < 0.95 else ""
    return Strips(bands, names, marks, seconds, current)


def drawn(state: RunState, now: float, ink: str) -> tuple[str, int, Strips] | None:
    """Draw the strips for a card, with their text in the picture: elements and their height."""
    strips = strips_of(state, now)
    if strips is None:
        return None
    height = strips.height
    # Text keeps its size and the strips take what is left, whatever the width of the picture.
    nested = f'<svg x="{_LEFT}%" width="{100 - _LEFT}%" height="{height + _BOTTOM}"'
    stretched = f'viewBox="0 0 {len(strips.bands[0])} {height}" preserveAspectRatio="none"'
    times = _times(strips.marks, height, state.elapsed(now), ink)
    picture = (
        f'{nested} overflow="visible"><svg width="100%" height="{height}" {stretched}>'
        f"{_strips(strips.bands)}</svg>{times}</svg>{_names(strips.names, height, ink)}"
    )
    return picture, height + _BOTTOM, strips


def _text(strips: Strips, seconds: float) -> str:
    """Draw the numbers of ranks, epochs above, the time below: text of the page."""
    beside = f"position:absolute;left:-{_GUTTER}px;width:{_GUTTER - 8}px;text-align:right"
    pitch, last = _pitch(len(strips.names)), len(strips.names) - 1
    every = 1 if pitch >= 14 else -(-16 // pitch)
    rows = "".join(
        f'<span style="{beside};top:{(i + 0.5) * pitch - 8:.0f}px">'
        f"{'rank ' if not i else ''}{name} </span>"
        for i, name in enumerate(strips.names)
        if i == last or (not i % every and last - i >= every)
    )
    below = strips.height + 3
    row = f"position:absolute;left:0;right:0;height:{_ROW}px;overflow:hidden"
    return (
        f'<div style="{theme.TICKS}">{rows}{_epochs(strips, beside, row)}'
        f'<span style="{beside};top:{below}px">time </span>'
        f'<div style="{row};top:{below}px">{_clock(seconds)}</div></div>'
    )


def _epochs(strips: Strips, beside: str, row: str) -> str:
    """Draw a tick where an epoch ended, and over each its number, where all have room."""
    if not strips.marks:
        return ""
    lines, tick = "", -1.0
    for _, share in strips.marks:
        if share - tick >= 1 / TICKS:
            tick = share
            lines += (
                f'<div style="position:absolute;margin-left:{100 * share:.3g}%;height:100%;'
                f'border-left:1px solid"></div>'
            )
    names, start = "", 0.0
    every = max(1, -(-len(strips.marks) // 20))
    numbered = [*strips.marks, *([(strips.now, 1.0)] if strips.now else [])]
    for i, (name, end) in enumerate(numbered):
        if not name.isdigit():  # an attempt begins where an epoch's number would end
            names += _over(name, 100 * end + 0.5, 0)
            start = end + 0.2
        elif end - start > 0.03 and (not i % every or i == len(strips.marks) - 1):
            names += _over(name, 100 * start, 100 * (end - start))
        start = max(start, end)
    unit = f'<span style="{beside};top:-{_ROW + 3}px">epoch </span>'
    place = f"position:absolute;left:0;right:0;top:-4px;height:{strips.height + 6}px"
    return f'<div style="{place}">{lines}</div>{unit}' + (
        f'<div style="{row};top:-{_ROW + 3}px">{names}</div>'
    )


def _over(name: str, left: float, width: float) -> str:
    """Draw a name over a part of the strips, in percent, or (of no width) from a place on."""
    part = f"width:{width:.4g}%;text-align:center;overflow:hidden" if width > 0 else ""
    return f'<span style="position:absolute;margin-left:{left:.4g}%;{part}">{name} </span>'


def _clock(seconds: float) -> str:
    """Draw a few round times, and the last, which is the run's as the header says it."""
    step = next((s for s in _TIMES if seconds / s <= 5), seconds / 4 or 1.0)
    ticks = [i * step for i in range(int(seconds / step) + 1)]
    drawn = '<span style="position:absolute;left:0">0 s </span>'
    for at in ticks[1:]:
        share = at / seconds
        if share < 0.88:
            drawn += (
                f'<span style="position:absolute;margin-left:{100 * share - 10:.4g}%;width:20%;'
                f'text-align:center">{labels.whole_seconds(at)} </span>'
            )
    end = labels.whole_seconds(seconds)
    return f'{drawn}<span style="position:absolute;right:0">{end}</span>'


_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
"""Seconds between the times that are drawn."""


def _pitch(rows: int) -> int:
    return 14 if rows <= 8 else 10 if rows <= 16 else 5 if rows <= 32 else 4


def _worst(rows: list[str]) -> str:
    """Return the worst of what several ranks did in each bin."""
    if len(rows) == 1:
        return rows[0]
    return "".join(map(max, *(row.translate(_ORDER) for row in rows))).translate(_LETTERS)


def _strips(bands: list[str]) -> str:
    """Draw the strips, a unit for each bin: all that looks the same is one path."""
    pitch, paths = _pitch(len(bands)), dict.fromkeys(LOOKS, "")
    if pitch <= 5:
        return _barcode(bands, pitch)
    thick = pitch - 2
    for row, band in enumerate(bands):
        at = 0
        for letter, same in groupby(band):
            length = len(list(same))
            if letter in paths and letter != weather.UNKNOWN:
                low = row * pitch + thick - thick * LOOKS[letter][1] / 2
                paths[letter] += f"M{at} {low:g}h{length}"
            at += length
    ground = "".join(f"M0 {r * pitch + thick / 2:g}h{len(bands[0])}" for r in range(len(bands)))
    drawn = f'<path d="{ground}" stroke="#808080" stroke-opacity=".2" stroke-width="{thick}"/>'
    for letter, path in paths.items():
        colour, share = LOOKS[letter]
        if path:
            look = f'stroke="{colour}" stroke-width="{thick * share:g}"'
            if letter in DASHED:
                look += f' stroke-dasharray="{DASHED[letter]}" {theme.FIXED}'
            drawn += f'<path d="{path}" {look}/>'
    return drawn


def _barcode(bands: list[str], pitch: int) -> str:
    """Draw many strips: neighbours that did the same at the same time are one block."""
    paths, begun = dict.fromkeys(LOOKS, ""), dict[tuple[str, int, int], int]()
    for row, band in enumerate([*bands, ""]):
        at, going = 0, dict[tuple[str, int, int], int]()
        for letter, same in groupby(band):
            length = len(list(same))
            going[letter, at, length] = begun.pop((letter, at, length), row)
            at += length
        for (letter, x, length), first in begun.items():
            high = (row - first) * pitch
            paths[letter] += f"M{x} {first * pitch}h{length}v{high}h-{length}z"
        begun = going
    drawn = "".join(
        f'<path d="{path}" fill="{theme.GREY if not LOOKS[n][1] else LOOKS[n][0]}"'
        f"{'' if LOOKS[n][1] else _FAINT}/>"
        for n, path in paths.items()
        if path
    )
    between = "".join(f"M0 {row * pitch - 0.5:g}h{len(bands[0])}" for row in range(1, len(bands)))
    return f'{drawn}<path d="{between}" stroke="#111" stroke-opacity=".3"/>'


_FAINT = ' fill-opacity=".2"'
"""What nothing is known of."""


def _marks(state: RunState, start: float, seconds: float) -> list[tuple[str, float]]:
    """Return the epochs that are over and the attempts, each with its place among the strips."""
    rows = max((rank.epochs for rank in state.ranks), key=len)
    ends = [(str(row.epoch), (row.ended - start) / seconds) for row in rows]
    ends += [
        (f"attempt {n}", (at - start) / seconds) for n, (at, _) in enumerate(state.restarts, 2)
    ]
    return sorted(((n, share) for n, share in ends if 0 < share <= 1), key=lambda mark: mark[1])


def _times(marks: list[tuple[str, float]], height: int, seconds: float, ink: str) -> str:
    """Draw a tick where an epoch ended, its name below where there is room, and the time."""
    below, lines, names, last, tick = height + 12, "", "", 0.08, -1.0
    for number, share in marks:
        name = f"epoch {number}" if number.isdigit() else number
        place = f'{100 * share:.1f}%"'
        if share - tick >= 1 / TICKS:
            lines += f'<line x1="{place} x2="{place} y1="0" y2="{height + 3}"/>'
            tick = share
        if share - last > 0.12 and share < 0.88:
            names += f'<text x="{place} y="{below}" text-anchor="middle">{name}</text>'
            last = share
    ticks = f'<g stroke="#111" stroke-opacity=".75" stroke-width="1.5">{lines}</g>' if lines else ""
    end = labels.whole_seconds(seconds)
    times = f'<text x="6" y="{below}">0 s</text>'
    times += f'<text x="100%" y="{below}" text-anchor="end">{end}</text>'
    return f"{ticks}<g {_TEXT} {ink}>{times}{names}</g>"


def _names(names: list[str], height: int, ink: str) -> str:
    """Draw the numbers of ranks, of many each eighth and the last."""
    pitch, last = height / len(names), len(names) - 1
    every = 1 if last < 8 else 5 if last < 16 else 8
    rows = "".join(
        f'<text x="{_LEFT - 0.7:g}%" y="{max(9, (i + 0.5) * pitch + 3):g}" text-anchor="end">'
        f"{name}</text>"
        for i, name in enumerate(names)
        if i == last or (not i % every and last - i >= every / 2)
    )
    return f'<g {_TEXT} {ink}>{rows}<text y="{height + 12}">rank</text></g>'


TICKS = 100
"""Ends of epochs that are drawn, at most: more would be a wall, and a board of many bytes."""

_TEXT = 'font-family="system-ui,sans-serif" font-size="10.5"'


def _legend(letters: set[str]) -> str:
    """Name what is drawn, each behind a piece of its strip."""
    pieces = []
    ground = f"display:inline-flex;align-items:flex-end;height:10px;background:{theme.TRACK}"
    for letter, (colour, share) in LOOKS.items():
        if letter in letters:
            box = f"width:18px;height:{10 * share:.0f}px;background:{colour}"
            if letter in DASHED:
                solid, gap = (int(n) for n in DASHED[letter].split())
                box = f"width:18px;height:10px;border-left:{solid + 2}px solid {colour};"
                box += f"border-right:{solid + 2}px solid {colour};margin-right:{-gap}px"
            name = escape(weather.NAMES[letter])
            pieces.append(
                f'<span style="white-space:nowrap;margin-right:16px"><span style="{ground};'
                f'margin-right:6px"><span style="{box}"></span></span>'
                f'<span style="{theme.SOFT}">{name}</span></span> '
            )
    return f'<div style="font-size:11px;margin-left:{_GUTTER}px">{"".join(pieces)}</div>'
