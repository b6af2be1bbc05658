"""Draws a profile as a static page and as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import compress
from statistics import fmean

from ...part_api import LEFT, RIGHT, format_bytes, html_table, plural, text_table
from ...ui.board import axes, theme
from ...ui.board.board import draw_frame
from ...ui.board.canvas import CANVAS, Label, draw_on_page, draw_rule, label_tick
from .reading.advice import Advice
from .reading.comparison import PARTS, WAITS, Comparison
from .reading.lanes import HIDDEN, Part, list_parts, name_kind
from .reading.texts import format_share, format_time, name_line, name_operation
from .reading.trace import LANE_BINS, LANE_KINDS, RankProfile

LOOKS = {
    "data": (theme.ORANGE, 0.7),
    "forward": (theme.BLUE, 1.0),
    "backward": (theme.PURPLE, 0.85),
    "optimizer": (theme.GREEN, 0.7),
    "communication": (theme.RED, 0.45),
    "python": (theme.GREY, 0.3),
    WAITS: (theme.RED, 0.45),
    HIDDEN: (theme.RED, 0.15),
}
"""The colour and the height of each kind in a lane, so that colour is not the only difference."""

Rows = list[tuple[str, ...]]
"""A table, its headings first."""

_LANE_PX, _GAP_PX, _LEFT_PX = 22, 12, 62
_HIDDEN_TOP_PX = 5
MAX_LANES = 32
_LEAST_SHARE = 0.01


def draw_page(
    title: str, compared: Comparison, advice: Advice | None, names: Mapping[str, str]
) -> str:
    """Draw a profile as HTML; `names` are the names of cells by their files."""
    text, remedy = (
        (_describe_health(compared), "") if advice is None else (advice.evidence, advice.remedy)
    )
    of_rank = f"rank {_find_slowest(compared).rank}"
    tables = "".join(
        f'<div style="margin-top:10px;font-weight:600">{escape(head)}</div>'
        f'<div style="overflow-x:auto">{_draw_table(rows)}</div>'
        for head, rows in (
            ("Shares of the mean step", list_ranks(compared)),
            (f"Lines of your code, {of_rank}", list_lines(compared, names)),
            (f"Operations, {of_rank}", list_operations(compared, names)),
            ("Collectives: what each takes after the last rank has come", list_traffic(compared)),
        )
        if len(rows) > 1
    )
    return draw_frame(
        f'<div style="font-weight:600">{escape(title)}</div>'
        f'<div style="margin:4px 0 8px">{theme.format_code(text)} '
        f"<strong>{theme.format_code(remedy)}</strong></div>"
        f"{_draw_legend(compared)}{_name_step(compared)}{draw_lanes(compared, advice)}"
        f"{_describe_clocks(compared)}"
        f"{theme.draw_folded('Figures', tables)}"
    )


def _describe_health(compared: Comparison) -> str:
    """Return what is shown without advice."""
    shares = [compared.shares(rank) for rank in compared.ranks]
    computing = fmean(sum(each[kind] for kind in _COMPUTING) for each in shares)
    text = f"Nothing stands out: the ranks compute during {format_share(computing)} of each step, "
    return text + "and no other cause takes much of it."


_COMPUTING = ("forward", "backward", "optimizer")


def _draw_table(rows: Rows) -> str:
    """Draw a table as HTML."""
    styles = [LEFT if _is_text(at, head) else RIGHT for at, head in enumerate(rows[0])]
    return html_table(rows, styles, head=True)


def _is_text(at: int, head: str) -> bool:
    """Return whether a column has words; the others have figures."""
    return at == 0 or head in ("in", "line")


def _draw_legend(compared: Comparison) -> str:
    """Draw the kinds that some rank has spent time on."""
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    lanes = "".join(rank.steps[compared.typical].lane for rank in compared.ranks)
    kinds = [kind for sign, kind in LANE_KINDS.items() if sign in lanes]
    kinds += [WAITS] if any(compared.mean_s(rank, WAITS) for rank in compared.ranks) else []
    kinds += [HIDDEN] if any(rank.steps[compared.typical].hidden for rank in compared.ranks) else []
    drawn = ""
    for kind in kinds:
        colour, height = LOOKS[kind]
        hollow = f"background:{colour}4d;border:1px solid {colour}"
        fill = hollow if kind == WAITS else f"background:{colour}"
        drawn += (
            '<span style="margin-right:14px;white-space:nowrap"><span aria-hidden="true" style='
            f'"display:inline-block;width:10px;height:{10 * height:.0f}px;{fill};'
            f'margin-right:5px"></span>{escape(name_kind(kind, has_gpu))}</span>'
        )
    return f'<div style="font-size:12px">{drawn}</div>'


def _name_step(compared: Comparison) -> str:
    """Draw which step the lanes show."""
    number = compared.ranks[0].steps[compared.typical].number
    text = f"Step {number:,}, which is nearest to the mean"
    return f'<div style="font-size:12px;margin-top:6px;{theme.SOFT}">{text}</div>'


def draw_lanes(compared: Comparison, advice: Advice | None) -> str:
    """Draw what each rank did in the typical step, a lane each."""
    shown = compared.ranks[:MAX_LANES]
    lanes = [list_parts(compared, index) for index in range(len(shown))]
    length_s = max(1e-9, max(part.end_s for parts in lanes for part in parts))
    marks, labels, top = "", list[Label](), 4.0
    for rank, parts in zip(shown, lanes, strict=True):
        marks += "".join(_draw_part(part, length_s, top) for part in parts)
        is_named = advice is not None and advice.rank == rank.rank
        labels.append(Label(0, top + _LANE_PX / 2, f"rank {rank.rank}", "left", is_named))
        top += _LANE_PX + _GAP_PX
    marks += draw_rule(f"M0 {top - 3:.0f}H{CANVAS.width_units}", 0.5)
    labels += [
        label_tick(tick / length_s, top + 8, format_time(tick) if tick else "0")
        for tick in axes.value_scale(0.0, length_s, 4).ticks
        if tick <= length_s
    ]
    kinds = ", ".join(f"rank {r.rank}: {_describe(compared, r)}" for r in shown)
    text = f"One step of each rank. {kinds}"
    return draw_on_page(marks, labels, (CANVAS.width_units, round(top) + 18), _LEFT_PX, text, True)


def _draw_part(part: Part, length_s: float, top: float) -> str:
    """Draw what a rank did for a time, in a lane that shows `length_s` seconds."""
    colour, height = LOOKS[part.kind]
    ends = part.begin_s / length_s, part.end_s / length_s
    low, high = (round(CANVAS.width_units * end, 1) for end in ends)
    if low == high:  # too short to be seen
        return ""
    tall = _LANE_PX * height
    bottom = top + _LANE_PX + (_HIDDEN_TOP_PX if part.kind == HIDDEN else 0)
    edge = f"M{low:g} {bottom - tall:.1f}H{high:g}v{tall:.1f}H{low:g}z"
    look = f'fill-opacity=".3" stroke="{colour}" {theme.FIXED}' if part.kind == WAITS else ""
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


def _drop_empty_columns(rows: Rows) -> Rows:
    """Return a table without what was not recorded."""
    filled = [any(row[at] for row in rows[1:]) for at in range(len(rows[0]))]
    return [tuple(compress(row, filled)) for row in rows]


def list_ranks(compared: Comparison) -> Rows:
    """Return a table of the ranks with the shares of their steps."""
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    heads = [name_kind(kind, has_gpu) for kind in PARTS]
    rows: Rows = [("rank", "mean step", *heads, f"+ {name_kind(HIDDEN, has_gpu)}")]
    for rank in compared.ranks:
        mean_s = compared.mean_s(rank, *PARTS)
        shares = *compared.shares(rank).values(), compared.hidden_s(rank) / mean_s
        rows.append((str(rank.rank), format_time(mean_s), *map(format_share, shares)))
    return rows


def list_lines(compared: Comparison, names: Mapping[str, str]) -> Rows:
    """Return a table of the lines of code that the slowest rank is in most, from samples."""
    rank = _find_slowest(compared)
    shares = compared.shares(rank)
    shares["communication"] += shares.pop(WAITS)  # samples have both
    found = [
        (shares[kind] * share, line, kind)
        for kind, lines in rank.lines.items()
        for line, share in lines.items()
    ]
    rows: Rows = [(f"line, rank {rank.rank}", "share", "in")]
    for share, line, kind in sorted(found, reverse=True)[:5]:
        if share >= _LEAST_SHARE:
            waits = " and waits" if kind == "communication" else ""
            name = f"{name_kind(kind, rank.has_gpu)}{waits}"
            rows.append((name_line(line, names), format_share(share), name))
    return rows


def _find_slowest(compared: Comparison) -> RankProfile:
    """Return the rank that others wait for; without one, the first."""
    return compared.ranks[compared.late_rank or 0]


def list_operations(compared: Comparison, names: Mapping[str, str]) -> Rows:
    """Return a table of the ten most expensive operations of the slowest rank.

    Calls that only start collectives are left out, and what takes less than 1 % of a step.
    """
    rank = _find_slowest(compared)
    steps = len(rank.steps)
    whole = sum(step.end - step.begin for step in rank.steps)
    heads = "time a step", "share", "calls a step", "memory", "in", "line"
    rows: Rows = [(f"operation, rank {rank.rank}", *heads)]
    least_ns = _LEAST_SHARE * whole
    shown = (op for op in rank.operations if op.self_ns >= least_ns)
    for each in [op for op in shown if not op.name.startswith("c10d::")][:10]:
        row = (
            name_operation(each.name),
            format_time(each.self_ns / steps / 1e9),
            format_share(each.self_ns / whole),
            f"{each.calls / steps:.3g}",
            format_bytes(each.allocated_bytes / steps) if each.allocated_bytes else "",
            each.kind,
            name_line(each.line, names) if each.line else "",
        )
        rows.append(row)
    return _drop_empty_columns(rows)


def list_traffic(compared: Comparison) -> Rows:
    """Return a table of the collectives."""
    rows: Rows = [("collective", "size", "calls a step", "each takes", "rate")]
    for each in compared.traffic[:10]:
        size = format_bytes(each.size_bytes) if each.size_bytes else ""
        rate = f"{format_bytes(each.bytes_per_s)}/s" if each.bytes_per_s else ""
        rows.append((each.name, size, f"{each.per_step:.3g}", format_time(each.transfer_s), rate))
    return _drop_empty_columns(rows)


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
    text = _describe_health(compared) if advice is None else f"{advice.evidence} {advice.remedy}"
    lines = [title, "", text, ""]
    has_gpu = any(rank.has_gpu for rank in compared.ranks)
    for rank in compared.ranks[:MAX_LANES]:
        lane = rank.steps[compared.typical].lane
        bar = "".join(
            _BAR_SIGNS[LANE_KINDS[lane[k * LANE_BINS // _BAR_CHARS]]] for k in range(_BAR_CHARS)
        )
        lines.append(f"rank {rank.rank:<3} {bar}")
    signs = (f"{sign} {name_kind(kind, has_gpu)}" for kind, sign in _BAR_SIGNS.items())
    lines += [f"         {'  '.join(signs)}", ""]
    for rows in (
        list_ranks(compared),
        list_lines(compared, names),
        list_operations(compared, names),
        list_traffic(compared),
    ):
        if len(rows) > 1:
            align = "".join("<" if _is_text(at, head) else ">" for at, head in enumerate(rows[0]))
            lines += [*text_table(rows, align), ""]
    return "\n".join(lines[:-1])


def write_title(compared: Comparison) -> str:
    """Return the title of a profile: the steps and the ranks."""
    steps: Sequence[int] = [step.number for step in compared.ranks[0].steps]
    which = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    ranks = plural(len(compared.ranks), "rank")
    return f"Profile of {which}: {ranks}, {format_time(compared.step_s)} a step"
