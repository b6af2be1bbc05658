"""Draws what each rank did as a strip: when it computed, waited, was stuck or failed. Pure.

Activities differ in height and pattern as well as in colour, and mid-tones are visible on any page.
With many ranks, neighbours share a strip, which shows the worst of what they did.
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
"""The colour and the height (0 to 1) of each activity of a rank."""

DASHED = {of.STALLED: "7 2", of.COMPILING: "3 1"}
"""Activities with a pattern, since their height and colour are like those of others."""

_SEVERITIES = {ord(letter): str(rank) for rank, letter in enumerate(of.NAMES)}
_LETTERS = {ord(str(rank)): letter for rank, letter in enumerate(of.NAMES)}


class Strips(NamedTuple):
    """The strips of a run."""

    bands: list[str]
    """Each strip as text, one letter per column."""
    names: list[int]
    """The rank of each band, or the first of its ranks."""
    columns: int
    """Columns over the whole width of the canvas, also those that no band has reached yet."""
    seconds: float | None
    """The time that the columns cover; None if they cover the steps of the canvas."""
    per: int = 1
    """Ranks that share a strip."""

    @property
    def pitch(self) -> int:
        rows = len(self.bands)
        return 14 if rows <= 4 else 10 if rows <= 8 else 7 if rows <= 16 else 5 if rows <= 32 else 4

    @property
    def height(self) -> int:
        return len(self.bands) * self.pitch

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The letter and the name of each activity that is drawn."""
        drawn = {letter for band in self.bands for letter in band} - {of.UNKNOWN}
        return [(letter, of.NAMES[letter]) for letter in LOOKS if letter in drawn]


def strips_of(state: RunState, now: float, last: float | None) -> Strips | None:
    """Return the strips of a run, each with the worst of several ranks if there are many.

    None while there is little to see: a short run has strips only after a failure or in a hang.
    `last` is the step at the right of the canvas. Without it, the strips cover seconds.
    """
    at = state.ended if state.ended is not None else now
    ranks = [r.timeline if r.is_over else r.timeline.extend_to(at) for r in state.ranks]
    rows = of.align_timelines(ranks, at)
    count = max((len(row.letters) for row in rows), default=0)
    seen = {letter for row in rows for letter in row.letters} - {of.UNKNOWN}
    # A bin of a short run mixes many steps and the saving after them. Only its end is certain.
    is_short = bool(rows) and count * rows[0].width < tracking_limits.RATE_WINDOW_S
    if not seen or (is_short and not seen & {of.FAILED, of.STALLED}):
        return None
    per = -(-len(rows) // limits.MAX_DRAWN_RANKS)
    groups = [rows[i : i + per] for i in range(0, len(rows), per)]
    bands = [_merge_worst([row.letters.ljust(count) for row in group]) for group in groups]
    columns = count
    if last is not None:
        most = tracking_limits.MAX_BINS
        columns = most if len(bands) <= 32 else most // 2
        steps = [max(group, key=lambda row: len(row.letters)).steps for group in groups]
        lines = zip(bands, steps, strict=True)
        bands = [of.letters_by_step(_timeline_of(*line), last, columns) for line in lines]
    bands = _mark_waits_for_peers(list(map(_widen_ending, bands)), state)
    seconds = count * rows[0].width if last is None else None
    return Strips(bands, list(range(0, len(rows), per)), columns, seconds, per)


def _timeline_of(letters: str, steps: tuple[int, ...]) -> of.Timeline:
    """Return a timeline of letters without the spaces at their end, and a step for each letter."""
    letters = letters.rstrip()
    steps += (steps[-1:] or (0,)) * (len(letters) - len(steps))
    return of.Timeline(letters, steps[: len(letters)])


def _widen_ending(band: str) -> str:
    """Widen a failure, a hang or a wait for peers at the end of a strip to three columns.

    So it is visible. Another strip, or one under three columns, is returned as it is.
    """
    last = band[-1:]
    if last not in (of.FAILED, of.STALLED, of.PEERS) or len(band) < 3:
        return band
    return band[: min(len(band.rstrip(last)), len(band) - 3)].ljust(len(band), last)


def _mark_waits_for_peers(bands: list[str], state: RunState) -> list[str]:
    """Return the strips with waits for peers where one rank alone waits for data.

    This is only known of ranks that step together, so have made the same number of steps, and of
    waits in more columns than by chance; else `bands` is returned as it is.
    """
    steps = [rank.steps_before + rank.progress.steps for rank in state.ranks if rank.progress]
    if len(steps) < 2 or max(steps) - min(steps) > max(3, 0.02 * max(steps)):
        return bands
    alone = [_lone_waits(bands, row) for row in range(len(bands))]
    waits = {at for row in alone for at in row}
    if not waits:
        return bands
    return [
        "".join(
            of.PEERS if letter == of.COMPUTE and at in waits else letter
            for at, letter in enumerate(band)
        )
        for band in bands
    ]


def _lone_waits(bands: list[str], row: int) -> list[int]:
    """Return the columns where a strip waits for data and at most a quarter of the others do.

    A few columns may be chance: below 6, the list is empty.
    """
    others = [band for at, band in enumerate(bands) if at != row]
    waits = [
        at
        for at, letter in enumerate(bands[row])
        if letter == of.DATA
        and 4 * sum(band[at : at + 1] == of.DATA for band in others) <= len(others)
    ]
    return waits if len(waits) >= 6 else []


def find_lone_wait(strips: Strips, rank: int) -> tuple[float, float] | None:
    """Return the begin and the end of the time when only this rank waits for data.

    Both are shares of the canvas' width. Return None if ranks share strips, or if the rank waits in
    too few columns.
    """
    if strips.names != list(range(len(strips.names))) or rank >= len(strips.names):
        return None
    alone = _lone_waits(strips.bands, rank)
    return (alone[0] / strips.columns, (alone[-1] + 1) / strips.columns) if alone else None


def draw(strips: Strips, top: int, width: int) -> str:
    """Draw strips as SVG elements, `width` units wide, which begin at `top`."""
    scale = f"translate(0 {top}) scale({width / strips.columns:.5g} 1)"
    return f'<g transform="{scale}">{_draw_bands(strips.bands, strips.pitch)}</g>'


def draw_legend(strips: Strips, band: str = "") -> str:
    """Draw the name of each activity beside a piece of its strip, and the text `band` after them.

    A remark explains strips that several ranks share.
    """
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


def _merge_worst(rows: list[str]) -> str:
    """Return one strip with the worst activity of several ranks in each column."""
    if len(rows) == 1:
        return rows[0]
    return "".join(map(max, *(row.translate(_SEVERITIES) for row in rows))).translate(_LETTERS)


def _draw_bands(bands: list[str], pitch: int) -> str:
    """Draw bands as SVG with one unit per column. Everything that has one colour is one path."""
    if pitch <= 5:
        return _draw_thin_bands(bands, pitch)
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


def _draw_thin_bands(bands: list[str], pitch: int) -> str:
    """Draw many bands. Neighbours with the same activity at the same time are one block."""
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
