"""Draws a profile as a static page and as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from ...part_api import RIGHT, format_bytes, html_table, plural, text_table
from ...ui.board import axes, theme
from ...ui.board.canvas import CANVAS, Label, draw_on_page, draw_rule, label_tick
from .reading.advice import Advice
from .reading.comparison import Comparison
from .reading.intervals import Interval, intersect, subtract
from .reading.texts import format_share, format_time, name_file, name_operation
from .reading.trace import KINDS, LANE_BINS, LANE_KINDS, RankProfile, Step

_LOOKS = {
    "data": (theme.ORANGE, 0.7),
    "forward": (theme.BLUE, 1.0),
    "backward": (theme.PURPLE, 0.85),
    "optimizer": (theme.GREEN, 0.7),
    "communication": (theme.RED, 0.45),
    "python": (theme.GREY, 0.2),
    "waits": (theme.RED, 0.45),
}
"""The colour and the height of each kind in a lane, so that colour is not the only difference."""

_WAITS = "waits"
"""The part of `communication` that is spent on waiting for others. It is drawn hollow."""

_LANE_PX, _GAP_PX, _LEFT_PX = 22, 8, 62
_MAX_LANES = 32
_NOTHING = "Nothing stands out: no single cause takes much of a step."


def name_kind(kind: str, has_gpu: bool) -> str:
    """Return how a kind is called: on a GPU, Python between operations leaves it idle."""
    if kind == "python":
        return "GPU idle" if has_gpu else "only Python"
    return "waits for other ranks" if kind == _WAITS else kind


def draw_page(
    title: str, compared: Comparison, advice: Advice | None, names: Mapping[str, str]
) -> str:
    """Draw a profile as HTML; `names` are the names of cells by their files."""
    text, remedy = (_NOTHING, "") if advice is None else (advice.evidence, advice.remedy)
    tables = "".join(
        f'<div style="margin-top:10px;font-weight:600">{escape(head)}</div>'
        f'<div style="overflow-x:auto">{html_table(rows, styles, head=True)}</div>'
        for head, rows, styles in (
            ("Each rank", list_ranks(compared), ["", *[RIGHT] * (len(KINDS) + 2)]),
            ("Operations", list_operations(compared, names), ["", RIGHT, RIGHT, RIGHT, "", ""]),
            ("Communication", list_traffic(compared), ["", RIGHT, RIGHT, RIGHT, RIGHT]),
        )
        if len(rows) > 1
    )
    return (
        f'<div style="{theme.FONT}"><div style="font-weight:600">{escape(title)}</div>'
        f'<div style="margin:4px 0 8px">{theme.format_code(text)} '
        f"<strong>{theme.format_code(remedy)}</strong></div>"
        f"{_draw_legend(compared)}{draw_lanes(compared, advice)}{_describe_clocks(compared)}"
        f"{theme.draw_folded('Figures', tables)}</div>"
    )


def _draw_legend(compared: Comparison) -> str:
    """Draw the kinds that some rank has spent time on."""
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    lanes = "".join(rank.steps[compared.typical].lane for rank in compared.ranks)
    kinds = [kind for sign, kind in LANE_KINDS.items() if sign in lanes]
    kinds += [_WAITS] if any(compared.waits_s) else []
    drawn = ""
    for kind in kinds:
        colour, height = _LOOKS[kind]
        fill = f"border:1px solid {colour}" if kind == _WAITS else f"background:{colour}"
        drawn += (
            '<span style="margin-right:14px;white-space:nowrap"><span aria-hidden="true" style='
            f'"display:inline-block;width:10px;height:{10 * height:.0f}px;{fill};'
            f'margin-right:5px"></span>{escape(name_kind(kind, has_gpu))}</span>'
        )
    return f'<div style="font-size:12px">{drawn}</div>'


def draw_lanes(compared: Comparison, advice: Advice | None) -> str:
    """Draw what each rank did in the typical step, a lane each."""
    at, width = compared.typical, CANVAS.width_units
    shown = list(enumerate(compared.ranks))[:_MAX_LANES]
    first = min(rank.steps[at].begin - compared.offsets_ns[i] for i, rank in shown)
    last = max(rank.steps[at].end - compared.offsets_ns[i] for i, rank in shown)
    length = max(1, last - first)
    marks, labels, top = "", list[Label](), 4.0
    for index, rank in shown:
        waits, step = compared.find_waits(index), rank.steps[at]
        for kind, span in _spans(step):
            waiting = intersect([span], waits) if kind == "communication" else []
            for part in subtract([span], waiting):
                marks += _draw_part(kind, part, compared.offsets_ns[index] + first, length, top)
            for part in waiting:
                marks += _draw_part(_WAITS, part, compared.offsets_ns[index] + first, length, top)
        is_named = advice is not None and advice.rank == rank.rank
        labels.append(Label(0, top + _LANE_PX / 2, f"rank {rank.rank}", "left", is_named))
        top += _LANE_PX + _GAP_PX
    marks += draw_rule(f"M0 {top - 3:.0f}H{width}", 0.5)
    scale = axes.value_scale(0.0, length / 1e9, 5)
    labels += [
        label_tick(1e9 * tick / length, top + 8, format_time(tick))
        for tick in scale.ticks
        if tick <= length / 1e9
    ]
    kinds = ", ".join(f"rank {r.rank}: {_describe(compared, r)}" for _, r in shown)
    text = f"One step of each rank. {kinds}"
    return draw_on_page(marks, labels, (width, round(top) + 18), _LEFT_PX, text, True)


def _spans(step: Step) -> Iterator[tuple[str, Interval]]:
    """Yield the kinds of a step's lane, each with its time."""
    at, width = 0, (step.end - step.begin) / LANE_BINS
    for sign, group in groupby(step.lane):
        end = at + sum(1 for _ in group)
        yield LANE_KINDS[sign], (step.begin + round(at * width), step.begin + round(end * width))
        at = end


def _draw_part(kind: str, span: Interval, first: int, length: int, top: float) -> str:
    """Draw what a rank did for a time, in a lane that shows `length` nanoseconds from `first`."""
    colour, height = _LOOKS[kind]
    low, high = (round(CANVAS.width_units * (time - first) / length, 1) for time in span)
    if low == high:  # too short to be seen
        return ""
    tall = _LANE_PX * height
    edge = f"M{low:g} {top + _LANE_PX - tall:.1f}H{high:g}v{tall:.1f}H{low:g}z"
    look = f'fill-opacity=".3" stroke="{colour}" {theme.FIXED}' if kind == _WAITS else ""
    return f'<path d="{edge}" fill="{colour}" {look}/>'


def _describe(compared: Comparison, rank: RankProfile) -> str:
    """Return what a rank's time went to, the most first."""
    shares = sorted(compared.shares(rank).items(), key=lambda item: -item[1])
    parts = (
        f"{format_share(s)} {name_kind(kind, rank.has_gpu)}" for kind, s in shares if s > 0.005
    )
    return " ".join(parts)


def _describe_clocks(compared: Comparison) -> str:
    """Draw how exact the lanes of several hosts are compared; "" for one host."""
    error = compared.clock_error_s
    if error is None:
        return ""
    text = (
        f"The hosts' clocks were compared by collectives, to about {format_time(error)}."
        if error < 1
        else "The hosts' clocks could not be compared, so the lanes may be shifted."
    )
    return f'<div style="{theme.SOFT}">{escape(text)}</div>'


def list_ranks(compared: Comparison) -> list[tuple[str, ...]]:
    """Return a table of the ranks with the shares of their steps, its headings first."""
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    heads = [name_kind(kind, has_gpu) for kind in KINDS]
    rows: list[tuple[str, ...]] = [("rank", "step", *heads, "waits for others")]
    for rank, wait in zip(compared.ranks, compared.waits_s, strict=True):
        shares = compared.shares(rank)
        mean_s = compared.mean_s(rank, *KINDS)
        cells = (format_share(shares[kind]) for kind in KINDS)
        rows.append((str(rank.rank), format_time(mean_s), *cells, format_share(wait / mean_s)))
    return rows


def list_operations(compared: Comparison, names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return a table of the ten most expensive operations of the slowest rank."""
    rank = compared.ranks[compared.late_rank or 0]
    steps = len(rank.steps)
    whole = sum(step.end - step.begin for step in rank.steps)
    rows: list[tuple[str, ...]] = [
        (f"of rank {rank.rank}", "a step", "share", "calls", "in", "line")
    ]
    for each in rank.operations[:10]:
        file, _, number = each.line.rpartition(":")
        line = f"{name_file(file, names)}, line {number}" if each.line else ""
        share = format_share(each.self_ns / whole)
        calls = f"{each.calls / steps:.3g}"
        rows.append(
            (
                name_operation(each.name),
                format_time(each.self_ns / steps / 1e9),
                share,
                calls,
                each.kind,
                line,
            )
        )
    return rows


def list_traffic(compared: Comparison) -> list[tuple[str, ...]]:
    """Return a table of the collectives. Sizes are missing where the traces lack them."""
    rows: list[tuple[str, ...]] = [("collective", "size", "a step", "takes", "rate")]
    for each in compared.traffic[:10]:
        size = format_bytes(each.size_bytes) if each.size_bytes else ""
        rate = f"{format_bytes(each.bytes_per_s)}/s" if each.bytes_per_s else ""
        rows.append((each.name, size, f"{each.per_step:.3g}", format_time(each.transfer_s), rate))
    return rows


_BAR_SIGNS = {
    "data": "D",
    "forward": "f",
    "backward": "b",
    "optimizer": "o",
    "communication": "~",
    "python": ".",
}
_BAR_CHARS = 60


def write_text(
    title: str, compared: Comparison, advice: Advice | None, names: Mapping[str, str]
) -> str:
    """Return a profile as text, for a terminal."""
    lines = [title, "", _NOTHING if advice is None else f"{advice.evidence} {advice.remedy}", ""]
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    for rank in compared.ranks[:_MAX_LANES]:
        lane = rank.steps[compared.typical].lane
        bar = "".join(
            _BAR_SIGNS[LANE_KINDS[lane[k * LANE_BINS // _BAR_CHARS]]] for k in range(_BAR_CHARS)
        )
        lines.append(f"rank {rank.rank:<3} {bar}")
    signs = (f"{sign} {name_kind(kind, has_gpu)}" for kind, sign in _BAR_SIGNS.items())
    lines += [f"         {'  '.join(signs)}", ""]
    lines += text_table(list_ranks(compared), "<" + ">" * (len(KINDS) + 2))
    for rows, align in (
        (list_operations(compared, names), "<>>><<"),
        (list_traffic(compared), "<>>>>"),
    ):
        if len(rows) > 1:
            lines += ["", *text_table(rows, align)]
    return "\n".join(lines)


def write_title(run: str, compared: Comparison) -> str:
    """Return the title of a profile: the run, the steps and the ranks."""
    steps: Sequence[int] = [step.number for step in compared.ranks[0].steps]
    which = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    ranks = plural(len(compared.ranks), "rank")
    return f"{run}: {which} of {ranks}, {format_time(compared.step_s)} each"
