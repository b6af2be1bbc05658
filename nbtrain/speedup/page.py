"""A scaling report as text and as HTML: a picture, a table, what it does not say. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ..view import colours, scale
from ..view.wording import counted, number

if TYPE_CHECKING:
    from .report import ScalingReport, Size

PARTS = {
    "efficiency": ("efficiency", colours.BLUE),
    "data": ("data", colours.AMBER),
    "communication": ("communication", colours.GREEN),
    "imbalance": ("imbalance", colours.RED),
    "slower": ("slower compute", colours.GREY),
}
"""What a step goes to: how each is called and drawn."""

_UNKNOWN = "not told apart"

FAR = 1.25
"""How much faster one repeat may be than another before the numbers are doubted."""

_KINDS = {
    "weak": "weak scaling: each rank keeps its batch",
    "strong": "strong scaling: the ranks share a batch",
    "mixed": "a rank's batch changes with the ranks, in a way of its own",
    "unknown": "taken as weak scaling: no batches were seen",
}
_HEADS = ("ranks", "step", "samples/s", "speed-up", "efficiency", "lost to data", "communication")
_WIDTH, _HEIGHT, _TOP, _FLOOR = 680, 236, 24, 180


def parts(size: Size) -> dict[str, float | None]:
    """Return the shares of a step by name: together 1."""
    return {"efficiency": size.efficiency, **(vars(size.lost) if size.lost else {})}


def legend(sizes: Sequence[Size]) -> dict[str, tuple[str, str]]:
    """Return how the parts are called and drawn, without those that nobody could tell."""
    unknown = {name for size in sizes for name, share in parts(size).items() if share is None}
    named = {name: of for name, of in PARTS.items() if name not in unknown}
    return named | ({"slower": (_UNKNOWN, colours.GREY)} if unknown else {})


def title(report: ScalingReport) -> str:
    """Word what was measured, and on what."""
    words = [report.name]
    if len(report.measured) > 1:
        words.append(_KINDS[report.kind])
    if report.device == "cpu":
        words.append(f"CPU, {counted(report.cores, 'core')}")
    else:
        words.append(report.device)
    words.append(f"{counted(report.threads, 'thread')} a rank")
    if report.repeats > 1:
        words.append(f"median of {report.repeats} repeats")
    return " · ".join(words)


def rows(report: ScalingReport) -> list[tuple[str, ...]]:
    """Return the table, its head first; a size that failed has its error alone."""
    found: list[tuple[str, ...]] = [(*_HEADS, "imbalance", legend(report.measured)["slower"][0])]
    for size in report.sizes:
        if size.speedup is None or size.lost is None:
            found.append((str(size.ranks), size.error))
            continue
        apart = size.high is not None and size.low is not None and report.repeats > 1
        speed = f"{size.speedup:.2f}×" + (f" ({size.low:.2f}–{size.high:.2f})" if apart else "")
        lost = (
            "–" if share is None else f"{round(100 * share)} %"
            for share in vars(size.lost).values()
        )
        found.append(
            (
                str(size.ranks) + (" *" if size.shares_cores else ""),
                f"{1000 * (size.step or 0):.3g} ms",
                "–" if size.rate is None else number(float(f"{size.rate:.3g}")),
                speed,
                f"{100 * (size.efficiency or 0):.0f} %",
                *("" if size is report.measured[0] else share for share in lost),
            )
        )
    return found


def remarks(report: ScalingReport) -> list[str]:
    """Return what the numbers do not say."""
    crowded = [size for size in report.measured if size.shares_cores]
    found = []
    if crowded:
        found.append(
            f"* more ranks than the {counted(report.cores, 'core')} here carry at "
            f"{counted(report.threads, 'thread')} each: what they lose to sharing them says "
            "nothing about GPUs or more machines, and shows as imbalance and communication, too"
        )
    if report.device == "cuda":
        found.append("data: what the host waited, also where the GPU still had work")
    if report.repeats == 1 and len(report.measured) > 1:
        found.append("each size ran once: --repeat 3 (repeat=3) tells how far it varies")
    elif any((s.high or 0.0) > FAR * (s.low or 0.0) for s in report.measured):
        found.append("the repeats lie far apart: the host had other things to do, too")
    return [*found, *report.notes]


def text(report: ScalingReport) -> str:
    """Return the report as lines."""
    table = rows(report)
    widths = [max(len(r[i]) for r in table if len(r) > 2) for i in range(len(table[0]))]
    lines = [
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=False))
        if len(row) > 2
        else f"{row[0].rjust(widths[0])}  {row[1]}"
        for row in table
    ]
    return "\n".join([title(report), *(f"  {line}" for line in lines), *remarks(report)])


def html(report: ScalingReport) -> str:
    """Draw the report; the picture is an image, which survives an untrusted notebook."""
    cell, drawn = "padding:1px 12px 1px 0;border:0;white-space:nowrap;text-align:", []
    table = rows(report)
    for index, row in enumerate(table):
        style = f"{cell}right{';opacity:.7' if not index else ''}"
        cells = "".join(f'<td style="{style}">{escape(word)}</td>' for word in row)
        if len(row) == 2:
            told = f'<td colspan="{len(table[0]) - 1}" style="{cell}left;color:{colours.RED}">'
            cells = f'<td style="{style}">{row[0]}</td>{told}{escape(row[1])}</td>'
        drawn.append(f'<tr style="background:none">{cells}</tr>')
    notes = "".join(f'<div style="opacity:.8">{escape(note)}</div>' for note in remarks(report))
    picture = ""
    if len(report.measured) > 1:
        data = base64.b64encode(svg(report).encode()).decode()
        said = escape("; ".join(" ".join(row[:4:3]) for row in table[1:]), quote=True)
        picture = (
            f'<img src="data:image/svg+xml;base64,{data}" alt="ranks and speed-up: {said}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" '
            'style="display:block;max-width:100%;height:auto;margin:4px 0">'
        )
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;'
        f'font-variant-numeric:tabular-nums">{escape(title(report))}{picture}'
        f'<table style="border-collapse:collapse;margin:4px 0">{"".join(drawn)}</table>'
        f"{notes}</div>"
    )


def svg(report: ScalingReport) -> str:
    """Draw the speed-up against the ideal line, and where each step went."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="{colours.GREY}">'
        f"{_speedups(report.measured, 44, 300)}{_shares(report.measured, 390, 280)}</svg>"
    )


def _speedups(sizes: tuple[Size, ...], left: int, width: int) -> str:
    most, base = sizes[-1].ranks, sizes[0].ranks
    axis = scale.of_values(0.0, max(most / base, *(s.high or 0.0 for s in sizes)), 4)

    def at(ranks: float, speedup: float) -> tuple[float, float]:
        height = _FLOOR - _TOP
        x = left + width * ranks / (most * 1.06)
        return round(x, 1), round(_FLOOR - height * axis.place(speedup), 1)

    parts = [f'<text x="{left}" y="12">speed-up</text>']
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        y = at(0, tick)[1]
        parts.append(f'<path d="M{left} {y}h{width}" stroke="#888" stroke-opacity=".28"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    (x0, y0), (x1, y1) = at(base, 1), at(most, most / base)
    parts.append(
        f'<path d="M{x0} {y0}L{x1} {y1}" stroke="{colours.GREY}" stroke-dasharray="5 4"/>'
        f'<text x="{x1 - 8}" y="{y1 + 4}" text-anchor="end">ideal</text>'
    )
    points = [at(s.ranks, s.speedup or 0.0) for s in sizes]
    line = "L".join(f"{x} {y}" for x, y in points)
    parts.append(f'<path d="M{line}" fill="none" stroke="{colours.BLUE}" stroke-width="2"/>')
    for size, (x, y) in zip(sizes, points, strict=True):
        low, high = at(0, size.low or 0.0)[1], at(0, size.high or 0.0)[1]
        inside = "#fff" if size.shares_cores else colours.BLUE
        parts.append(
            f'<path d="M{x} {low}V{high}" stroke="{colours.BLUE}" stroke-opacity=".6"/>'
            f'<circle cx="{x}" cy="{y}" r="4" fill="{inside}" stroke="{colours.BLUE}"/>'
            f'<text x="{x}" y="{_FLOOR + 16}" text-anchor="middle">{size.ranks}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{_FLOOR + 34}" text-anchor="middle">ranks</text>'
    )
    if any(size.shares_cores for size in sizes):
        parts.append(f'<text x="{left}" y="{_HEIGHT - 4}">○ more ranks than cores</text>')
    return "".join(parts)


def _shares(sizes: tuple[Size, ...], left: int, width: int) -> str:
    """Draw a bar a size; a part below nothing (a gain) is not drawn, the table has it."""
    drawn = [f'<text x="{left}" y="12">where a step went</text>']
    each = width / len(sizes)
    for i, size in enumerate(sizes):
        x, y = left + each * (i + 0.15), float(_FLOOR)
        shares = {name: max(0.0, share or 0.0) for name, share in parts(size).items()}
        whole = max(1e-9, sum(shares.values()))
        for name, share in shares.items():
            height = (_FLOOR - _TOP) * share / whole
            y -= height
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each * 0.7:.1f}" height="{height:.1f}" '
                f'fill="{PARTS[name][1]}"/>'
            )
        middle = x + each * 0.35
        drawn.append(
            f'<text x="{middle:.1f}" y="{_FLOOR + 16}" text-anchor="middle">{size.ranks}</text>'
        )
    x = float(left)
    for name, (word, colour) in legend(sizes).items():
        y = _HEIGHT - 22 if name in ("efficiency", "data", "communication") else _HEIGHT - 4
        x = float(left) if name == "imbalance" else x
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="9" height="9" fill="{colour}"/>'
            f'<text x="{x + 13}" y="{y}">{word}</text>'
        )
        x += 30 + 6.2 * len(word)
    return "".join(drawn)
