"""Draws ranks as rows of a table: ranks that are alike share a row. Pure.

A rank that differs has its own row, with the reason. Columns that are empty for all rows are left
out. Numbers are aligned right, in digits of one width and columns with space for more digits, so
that nothing moves. The most important columns come first: a narrow page shows them without
scrolling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

from ...hangs import verdict
from ...system.text import format_bytes, format_number, format_ranks, shorten
from ...tracking.limits import MAX_SINGLE_RANKS, MIN_SHOWN_SHARE
from ...tracking.state import RankState, RunState
from .. import eta, limits, rank_texts
from ..tables import LEFT, RIGHT, TableCell, html_table
from . import theme


class Row(NamedTuple):
    """Ranks that are alike, and how they differ from the others."""

    ranks: Sequence[RankState]
    reason: str = ""

    @property
    def first(self) -> RankState:
        return self.ranks[0]

    @property
    def sample(self) -> Sequence[RankState]:
        """Up to `MAX_DRAWN_RANKS` of the ranks, evenly chosen."""
        return self.ranks[:: -(-len(self.ranks) // limits.MAX_DRAWN_RANKS)]

    def median_text(self, text: Callable[[RankState], str]) -> str:
        """Return the text that all ranks have in common, else the middle one of them, sorted."""
        texts = [text(rank) for rank in self.sample]
        return texts[0] if len(set(texts)) == 1 else sorted(texts)[len(texts) // 2]

    def percents(self, text: Callable[[RankState], str]) -> str:
        """Return ``93 %``, or the lowest and the highest of several ranks: ``89–96 %``; else "".

        `text` returns a percentage such as ``93 %``, or "" if it is unknown.
        """
        shares = sorted(
            {int(each.removesuffix(" %")) for rank in self.ranks if (each := text(rank))}
        )
        return f"{'–'.join(map(str, dict.fromkeys([shares[0], shares[-1]])))} %" if shares else ""


class Column(NamedTuple):
    """A column. `cell` returns HTML for a row, or an empty string."""

    heading: str
    cell: Callable[[Row], str]
    style: str = LEFT
    width: int = 0

    @property
    def head(self) -> TableCell:
        return TableCell(self.heading, f"min-width:{self.width}px" if self.width else "")


def rows_of(state: RunState, *, each: bool = False) -> list[Row]:
    """Return the rows to draw: ranks that differ first, then groups of ranks that are alike.

    With `each`, and for one or two ranks, every rank has a row.
    """
    if each or state.world_size <= 2:
        reasons = rank_texts.differences(state)
        return [Row((rank,), reasons.get(rank.rank, "")) for rank in state.ranks]
    most = MAX_SINGLE_RANKS // (2 if state.world_size <= MAX_SINGLE_RANKS else 4)
    single = [Row((rank,), reason) for rank, reason in rank_texts.outliers(state, most)]
    named = {row.first.rank for row in single}
    alike: dict[str, list[RankState]] = {}
    for rank in state.ranks:
        if rank.rank not in named:
            alike.setdefault(rank_texts.badge(rank), []).append(rank)
    return [*single, *(Row(ranks) for ranks in alike.values())]


def draw(rows: Sequence[Row], state: RunState) -> str:
    """Draw rows as a table, each with a remark below it if it has one.

    Columns that are empty, or repeat the header of the board, are left out.
    """
    columns = _columns(rows, state)
    filled = [(column, [column.cell(row) for row in rows]) for column in columns]
    drawn = [
        (column, cells)
        for column, cells in filled
        if any(cells) and not _repeats_header(column, rows, cells)
    ]
    lines: list[list[TableCell]] = [[column.head for column, _ in drawn]]
    for i, row in enumerate(rows):
        lines.append([TableCell(cells[i]) for _, cells in drawn])
        if remark := _draw_remark(row, state):
            look = "white-space:normal;overflow-wrap:anywhere;padding-left:24px"
            lines.append([TableCell(remark, look)])
    styles = [column.style for column, _ in drawn]
    table = html_table(lines, styles, head=True, is_wide=True)
    region = 'style="overflow-x:auto" tabindex="0" role="region" aria-label="ranks"'
    return f"<div {region}>{table}</div>"


def _repeats_header(column: Column, rows: Sequence[Row], cells: Sequence[str]) -> bool:
    """Return whether a column repeats a number of the header: only loss, place and rate can.

    The loss does in a table of one row. Place and rate do if all rows show the same, or if the
    ranks step together: these differ a little, since they report at different moments.
    """
    if column.heading == "loss":
        return len(cells) == 1
    return column.heading in ("at", "rate") and (len(set(cells)) == 1 or _are_together(rows))


def _are_together(rows: Sequence[Row]) -> bool:
    """Return whether all ranks run at one pace and are within one second's steps of each other.

    False if any rank has no rate, has ended, or does not move in a hang.
    """
    known = [row.first.progress for row in rows if row.first.status == "running"]
    steps = [each.steps for each in known if each is not None]
    rates = [each.step_rate for each in known if each is not None and each.step_rate]
    is_still = any(row.first.hang in ("stuck?", "waiting") for row in rows)
    if is_still or not len(rows) == len(steps) == len(rates):
        return False
    shares = [share for share in map(_share, rows) if share is not None] or [0.0]
    is_near = (
        max(steps) - min(steps) <= max(2.0, max(rates))
        and max(shares) - min(shares) < MIN_SHOWN_SHARE
    )
    return is_near and max(rates) - min(rates) <= MIN_SHOWN_SHARE * max(rates)


def _draw_remark(row: Row, state: RunState) -> str:
    """Draw what needs the whole width, below the row of a rank: an error, other metrics.

    "" for a row of several ranks. The failure that caused others is drawn apart.
    """
    if len(row.ranks) > 1:
        return ""
    rank, lines = row.first, [escape(row.reason)] if row.reason else []
    drawn = state.curves.all  # a metric with a curve is the run's: often only rank 0 validates
    if state.world_size <= 2 and (others := rank_texts.metrics(rank, 5, but=drawn)):
        lines.append(f'<span style="{theme.SOFT}">{escape(others[:300])}</span>')
    trouble = verdict.describe_trouble(rank, state)
    if (
        trouble
        and not verdict.is_secondary(rank, state)
        and rank is not verdict.find_culprit(state)
    ):
        lines.append(escape(trouble))
    return "&ensp;".join(lines)


def _columns(rows: Sequence[Row], state: RunState) -> list[Column]:
    """Return the columns, the most important first; `draw` leaves out those that are empty.

    Bars are only drawn if they differ: else the run's bar shows the same.
    """
    is_stuck = any(rank.hang == "stuck?" for rank in state.ranks)
    waits_named = any(rank_texts.WAITS in row.reason for row in rows)
    soft_left = f"{LEFT};{theme.SOFT}"
    shares = [share for share in map(_share, rows) if share is not None]
    has_bars = bool(shares) and max(shares) - min(shares) >= MIN_SHOWN_SHARE

    def median_of(text: Callable[[RankState], str]) -> Callable[[Row], str]:
        return lambda row: escape(row.median_text(text))

    columns = [
        Column("rank", lambda row: f"{_name(row)}&ensp;{_draw_status(row.first, state)}", LEFT, 90),
        Column("node", lambda row: escape(_node(row)), soft_left),
        Column("", lambda row: _draw_bar(row, state) if has_bars else "", "min-width:72px"),
        Column("", lambda row: _percent(row) if has_bars else "", RIGHT, 42),
        Column("loss", _draw_loss, RIGHT, 56),
        Column("rate", median_of(rank_texts.pace), RIGHT, 64),
        Column("memory", _draw_memory, RIGHT, 54),
        Column("GPU", lambda row: row.percents(lambda rank: _gpu(rank, state)), RIGHT, 46),
        Column("CPU", lambda row: row.percents(rank_texts.cpu), RIGHT, 46),
        Column("compiled", median_of(rank_texts.compilations), RIGHT),
        Column("data wait", median_of(rank_texts.waiting_share), RIGHT),
        Column("at", _draw_position, soft_left),
    ]
    left_out = {"rate"} if is_stuck else set()
    left_out |= {"data wait"} if waits_named else set()
    return [column for column in columns if column.heading not in left_out]


def _gpu(rank: RankState, state: RunState) -> str:
    """Return how busy a rank's GPU is, ``97 %``; "" if that is unknown or the rank has ended."""
    host = state.hosts.get(rank.node)
    known = {gpu[0]: gpu[4] for gpu in host.gpus} if host is not None and not rank.is_over else {}
    busy = None if rank.usage.gpu is None else known.get(rank.usage.gpu)
    return f"{busy:.0f} %" if isinstance(busy, (int, float)) else ""


def _name(row: Row) -> str:
    """Return the rank's number, or those of several ranks; if that is long, how many."""
    if len(row.ranks) == 1:
        return str(row.first.rank)
    numbers = format_ranks([rank.rank for rank in row.ranks]).removeprefix("ranks ")
    return numbers if len(numbers) <= 20 else f"{len(row.ranks):,} ranks"


def _node(row: Row) -> str:
    nodes = list(dict.fromkeys(rank.node for rank in row.ranks if rank.node))
    return nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else ""


def _draw_loss(row: Row) -> str:
    """Draw the loss of a row: the mean over its ranks, with the span as a tooltip.

    "" if no rank has a loss; one that is not finite is bold.
    """
    losses = [rank.loss for rank in row.ranks if rank.loss is not None]
    if not losses:
        return ""
    loss = losses[0] if len(losses) == 1 else sum(losses) / len(losses)
    has_digits = 1e-3 <= abs(loss) < 1e3  # equally many digits in all rows align below each other
    text = f"{loss:#.4g}" if has_digits else format_number(loss)
    text = text if math.isfinite(loss) else f"<b>{text}</b>"
    if len(losses) == 1 or min(losses) == max(losses):
        return text
    span = f"{format_number(min(losses))}–{format_number(max(losses))}"
    return f'<span title="mean; {span}">{text}</span>'


def _draw_position(row: Row) -> str:
    """Draw the row's position in its loops or bars, cut with a tooltip if it is long."""
    position = row.median_text(rank_texts.bar_positions)
    short = escape(shorten(position, 64))
    too_long = len(position) > 64
    return f'<span title="{escape(position[:400])}">{short}</span>' if too_long else short


def _draw_memory(row: Row) -> str:
    """Draw the memory that a rank uses, with its parts as a tooltip; of several ranks, the span.

    "" if it is unknown.
    """
    rank = row.first
    if len(row.ranks) > 1:
        taken = [rank_texts.memory_bytes(rank) for rank in row.ranks]
        known = [size for size in taken if size is not None]
        if not known:
            return ""
        low, high = format_bytes(min(known)), format_bytes(max(known))
        device = "GPU " if rank.usage.gpu is not None else ""
        return f"{device}{high}" if low == high else f"{device}{low} – {high}"
    text = rank_texts.memory_use(rank)
    parts = memory_parts(rank)
    return f'<span title="{parts}">{text}</span>' if text and parts else text


def memory_parts(rank: RankState) -> str:
    """Return a rank's memory by part: ``weights 1.3 GiB · gradients 1.3 GiB``; empty if unknown."""
    if not rank.usage.tensor_bytes:
        return ""
    sizes = rank.bytes_by_part()
    parts = (f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _draw_status(rank: RankState, state: RunState) -> str:
    """Draw the status of a rank, with its sign.

    A rank that only lost its peers is shown as stopped, with a text that explains it.
    """
    is_echo = verdict.is_secondary(rank, state)
    status = "stopped" if is_echo else rank_texts.badge(rank)
    text = verdict.describe_trouble(rank, state) if is_echo else status
    return f"{theme.sign(status)}&nbsp;{escape(text)}"


def _share(row: Row) -> float | None:
    """Return the median share that a row's ranks have done, 0 to 1; None if it is unknown."""
    shares = [eta.fraction(rank) for rank in row.sample if rank.bar is not None]
    known = [share for share in shares if share is not None]
    return median(known) if known else None


def _percent(row: Row) -> str:
    done = _share(row)
    return "" if done is None else f"{int(100 * done)} %"


def _draw_bar(row: Row, state: RunState) -> str:
    """Draw the bar of a row; "" if the share that is done is unknown."""
    done, rank = _share(row), row.first
    if done is None:
        return ""
    quiet = rank.status == "stopped" or verdict.is_secondary(rank, state)
    fills = {"running": theme.BLUE, "done": theme.GREEN if state.is_over else theme.BLUE}
    colour = theme.GREY if quiet else fills.get(rank.status, theme.GREY)
    name = shorten(format_ranks([each.rank for each in row.ranks]), 40)
    role = f'role="progressbar" aria-valuenow="{100 * done:.1f}" aria-label="{name}" '
    return theme.bar(done, 72, colour, role)
