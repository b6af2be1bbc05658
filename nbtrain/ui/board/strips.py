"""Draws what each rank did as a strip: when it computed, waited, stood still or failed. Pure.

Strips differ in height and pattern as well as in hue, in mid-tones that stand out from any page.
Of many ranks, neighbours share a strip, which shows the worst of them.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import NamedTuple

from ...tracking import limits as tracking_limits
from ...tracking.overview import timeline as of
from ...tracking.state import RunState
from .. import limits
from . import theme

LOOKS = {
    of.UNKNOWN: (theme.GREY, 0.0),
    of.COMPUTE: (theme.BLUE, 1.0),
    of.DATA: (theme.AMBER, 0.7),
    of.PEERS: (theme.GREY, 0.35),
    of.COMPILING: (theme.PURPLE, 1.0),
    of.SAVING: (theme.GREEN, 0.7),
    of.STALLED: (theme.ORANGE, 1.0),
    of.FAILED: (theme.RED, 1.0),
}
"""The colour and the height of what a rank did."""

DASHED = {of.STALLED: "7 2", of.COMPILING: "3 1"}
"""What is a pattern too: neither height nor hue alone tells it from computing, or a failure."""

_ORDER = {ord(letter): str(rank) for rank, letter in enumerate(of.NAMES)}
_LETTERS = {ord(str(rank)): letter for rank, letter in enumerate(of.NAMES)}


class Strips(NamedTuple):
    """The strips of a run: a letter for each column."""

    bands: list[str]
    names: list[int]
    """The rank that each band is of, or begins with."""
    columns: int
    """From the left of the canvas to its right, also where no band has come to yet."""
    seconds: float | None
    """What the columns cover; None where they cover the steps of the canvas."""
    per: int = 1
    """Ranks of a strip."""

    @property
    def pitch(self) -> int:
        rows = len(self.bands)
        return 14 if rows <= 4 else 10 if rows <= 8 else 7 if rows <= 16 else 5 if rows <= 32 else 4

    @property
    def height(self) -> int:
        return len(self.bands) * self.pitch

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The letter and the name of each thing that is drawn."""
        drawn = {letter for band in self.bands for letter in band} - {of.UNKNOWN}
        return [(letter, of.NAMES[letter]) for letter in LOOKS if letter in drawn]


def strips_of(state: RunState, now: float, last: float | None, limit: int) -> Strips | None:
    """Return strips that take `limit` bytes; None while there is little to see.

    `last`: the step at the right of the canvas; None: the strips are over seconds.
    """
    at = state.ended if state.ended is not None else now
    ranks = [r.timeline if r.is_over else r.timeline.extend_to(at) for r in state.ranks]
    rows = of.align_timelines(ranks, at)
    count = max((len(row.letters) for row in rows), default=0)
    seen = {letter for row in rows for letter in row.letters} - {of.UNKNOWN}
    # Of a short run, a bin holds many steps and the saving after them: only how it ended is sure.
    least = (
        limits.MIN_STRIP_COLUMNS if seen & {of.FAILED, of.STALLED} else 2 * limits.MIN_STRIP_COLUMNS
    )
    if count < least or not seen:
        return None
    per = -(-len(rows) // limits.MAX_DRAWN_RANKS)
    starts = range(0, len(rows), per)
    merged = [_worst([row.letters.ljust(count) for row in rows[i : i + per]]) for i in starts]
    seconds = count * rows[0].width if last is None else None
    steps = [max(rows[i : i + per], key=lambda row: len(row.letters)).steps for i in starts]
    most = tracking_limits.MAX_TIMELINE_BINS
    columns = count if last is None else most if len(merged) <= 32 else most // 2
    while True:
        bands = merged
        if last is not None:
            lines = zip(merged, steps, strict=True)
            bands = [of.letters_by_step(_timeline(*line), last, columns) for line in lines]
        bands = _with_peers(list(map(_legible, bands)), state)
        strips = Strips(bands, list(starts), columns, seconds, per)
        if len(_drawn(strips.bands, strips.pitch)) <= limit or columns <= limits.MIN_STRIP_COLUMNS:
            return strips
        columns = -(-columns // 2)
        merged = (
            [of.halve_letters(band.ljust(2 * columns)) for band in merged]
            if last is None
            else merged
        )


def _timeline(letters: str, steps: tuple[int, ...]) -> of.Timeline:
    letters = letters.rstrip()
    steps += (steps[-1:] or (0,)) * (len(letters) - len(steps))
    return of.Timeline(letters, steps[: len(letters)])


def _legible(band: str) -> str:
    """Return a strip in which how a rank ended, or stands still, is wide enough to be seen."""
    last = band[-1:]
    if last not in (of.FAILED, of.STALLED, of.PEERS) or len(band) < 3:
        return band
    return band[: min(len(band.rstrip(last)), len(band) - 3)].ljust(len(band), last)


def _with_peers(bands: list[str], state: RunState) -> list[str]:
    """Show that ranks wait for one that is short of data: those that step together, at its pace.

    They do if all have made as many steps. A rank is short of data where it alone waits, in more
    columns than chance has.
    """
    steps = [rank.steps_before + rank.progress.steps for rank in state.ranks if rank.progress]
    if len(steps) < 2 or max(steps) - min(steps) > max(3, 0.02 * max(steps)):
        return bands
    alone = [_alone(bands, row) for row in range(len(bands))]
    waits = {at for row in alone if len(row) >= limits.MIN_STRIP_COLUMNS for at in row}
    if not waits:
        return bands
    return [
        "".join(
            of.PEERS if letter == of.COMPUTE and at in waits else letter
            for at, letter in enumerate(band)
        )
        for band in bands
    ]


def _alone(bands: list[str], row: int) -> list[int]:
    """Return the columns in which a strip waits for data, and hardly another one does."""
    others = [band for at, band in enumerate(bands) if at != row]
    return [
        at
        for at, letter in enumerate(bands[row])
        if letter == of.DATA
        and 4 * sum(band[at : at + 1] == of.DATA for band in others) <= len(others)
    ]


def waits_alone(strips: Strips, rank: int) -> tuple[float, float] | None:
    """Return from where to where, as shares of the canvas, a rank waits for data and others don't.

    None where strips are of several ranks, or too few columns tell.
    """
    if strips.names != list(range(len(strips.names))) or rank >= len(strips.names):
        return None
    alone = _alone(strips.bands, rank)
    if len(alone) < 3:
        return None
    return alone[0] / strips.columns, (alone[-1] + 1) / strips.columns


def draw(strips: Strips, top: int, width: int) -> str:
    """Draw strips below `top` as SVG elements, `width` units wide."""
    scale = f"translate(0 {top}) scale({width / strips.columns:.5g} 1)"
    return f'<g transform="{scale}">{_drawn(strips.bands, strips.pitch)}</g>'


def legend(strips: Strips, band: str = "") -> str:
    """Name what is drawn, each behind a piece of its strip; and the `band` around a curve."""
    pieces = []
    ground = f"display:inline-flex;align-items:flex-end;height:8px;background:{theme.TRACK}"
    for letter, name in strips.legend:
        colour, share = LOOKS[letter]
        box = f"width:14px;height:{8 * share:.0f}px;background:{colour}"
        if letter in DASHED:
            solid, gap = (int(n) for n in DASHED[letter].split())
            box = f"width:14px;height:8px;border-left:{solid}px solid {colour};"
            box += f"border-right:{solid}px solid {colour};margin-right:{-gap}px"
        pieces.append(
            f'<span style="white-space:nowrap;margin-right:16px"><span style="{ground};'
            f'margin-right:6px"><span style="{box}"></span></span>'
            f'<span style="{theme.SOFT}">{escape(name)}</span></span> '
        )
    rest = [f"a strip for {strips.per} ranks: the worst of them"] if strips.per > 1 else []
    rest += [band] if band else []
    return f'{"".join(pieces)}<span style="{theme.SOFT}">{" · ".join(rest)}</span>'


def _worst(rows: list[str]) -> str:
    """Return the worst of what several ranks did in each bin."""
    if len(rows) == 1:
        return rows[0]
    return "".join(map(max, *(row.translate(_ORDER) for row in rows))).translate(_LETTERS)


def _drawn(bands: list[str], pitch: int) -> str:
    """Draw a unit for each column: all that looks the same is one path."""
    if pitch <= 5:
        return _blocks(bands, pitch)
    paths, thick = dict.fromkeys(LOOKS, ""), pitch - 2
    for row, band in enumerate(bands):
        at = 0
        for letter, same in groupby(band):
            length = len(list(same))
            low = row * pitch + thick - thick * LOOKS[letter][1] / 2
            paths[letter] += f"M{at} {low:g}h{length}"
            at += length
    drawn = ""
    for letter, path in paths.items():
        colour, share = LOOKS[letter]
        if path and share:
            dashes = f' stroke-dasharray="{DASHED[letter]}"' if letter in DASHED else ""
            dashes += f" {theme.FIXED}" if dashes else ""
            drawn += (
                f'<path d="{path}" stroke="{colour}" stroke-width="{thick * share:g}"{dashes}/>'
            )
    return drawn


def _blocks(bands: list[str], pitch: int) -> str:
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
        f'<path d="{path}" fill="{LOOKS[letter][0]}"/>'
        for letter, path in paths.items()
        if path and LOOKS[letter][1]
    )
    width = max(map(len, bands))
    between = "".join(f"M0 {row * pitch - 0.5:g}h{width}" for row in range(1, len(bands)))
    return f'{drawn}<path d="{between}" stroke="#111" stroke-opacity=".3"/>'
