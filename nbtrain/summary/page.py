"""A run's numbers as text and as HTML, in the board's style. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..outcome import ranks_text
from ..view import colours, wording
from ..view.html import FONT, FRAME, cut
from ..view.table import badge
from .figures import Part, Summary

METRICS = 8
"""How many are shown; all are in `Summary.metrics`."""

_SOFT = "opacity:.7"


def text(summary: Summary) -> str:
    """Return it as lines."""
    lines = [f"{summary.name[:200]}: {summary.status} · {_facts(summary)}"]
    lines += [f"  {label:<9} {words}" for label, words in rows(summary)]
    parts = [(part.name, wording.size(part.bytes), _who(part, summary)) for part in _parts(summary)]
    widths = [max((len(part[i]) for part in parts), default=0) for i in (0, 1)]
    lines[_after_memory(lines) :] = [
        *(f"            {n:<{widths[0]}}  {s:>{widths[1]}}  {w}".rstrip() for n, s, w in parts),
        *lines[_after_memory(lines) :],
    ]
    return "\n".join(lines)


def _after_memory(lines: list[str]) -> int:
    return next((i + 1 for i, line in enumerate(lines) if line.startswith("  memory ")), len(lines))


def html(summary: Summary) -> str:
    """Draw it; what it says survives an untrusted notebook."""
    cell = "padding:1px 12px 1px 0;border:0;text-align:left;vertical-align:top"
    drawn = ""
    for label, words in rows(summary):
        colour = f";color:{colours.RED}" if label == "failed" else ""
        drawn += (
            f'<tr style="background:none"><td style="{cell};{_SOFT}">{label}</td>'
            f'<td style="{cell};white-space:normal;overflow-wrap:anywhere{colour}">'
            f"{cut(words, 600)}{_table(summary) if label == 'memory' else ''}</td></tr>"
        )
    frame = ";".join(f"{name}:{value}" for name, value in FRAME.items())
    return (
        f'<div class="tex2jax_ignore mathjax_ignore" style="{FONT};{frame};border-radius:6px">'
        f'<div>{badge(summary.status)}<b style="margin:0 10px">{cut(summary.name, 120)}</b>'
        f'<span style="{_SOFT}">{escape(_facts(summary))}</span></div>'
        '<table style="border-collapse:collapse;border:none;margin:4px 0 0;background:none;'
        f'font-size:13px">{drawn}</table></div>'
    )


def _table(summary: Summary) -> str:
    """Draw the parts of the memory, each with its share of the whole."""
    cell = "padding:0 10px 0 0;border:0;text-align"
    whole = max(sum(part.bytes for part in summary.memory_parts), 1)
    lines = "".join(
        f'<tr style="background:none"><td style="{cell}:left">{escape(part.name)}</td>'
        f'<td style="{cell}:right">{wording.size(part.bytes)}</td>'
        f'<td style="{cell}:left">{_bar(part.bytes / whole)}</td>'
        f'<td style="{cell}:left;{_SOFT}">{escape(_who(part, summary))}</td></tr>'
        for part in _parts(summary)
    )
    style = "border-collapse:collapse;border:none;margin:0;background:none;font-size:13px"
    return f'<table style="{style}"><tbody>{lines}</tbody></table>' if lines else ""


def _bar(share: float) -> str:
    return (
        f'<div style="width:140px;height:7px;border-radius:4px;background:{colours.TRACK};'
        f'overflow:hidden"><div style="width:{100 * share:.1f}%;height:100%;'
        f'background:{colours.BLUE}"></div></div>'
    )


def rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield what there is to tell, each with a word for it."""
    s = summary
    if s.error:
        yield "failed", s.error
    elif s.message:
        yield "because", s.message
    words = [wording.duration(s.seconds)]
    if s.seconds_to_first_step is not None:
        words.append(f"{wording.duration(s.seconds_to_first_step)} until the first step")
    if s.seconds_training:
        words.append(f"{wording.duration(s.seconds_training)} of training")
    yield "time", " · ".join(words)
    yield from _pace(s)
    shown = [f"{name} {wording.number(value)}" for name, value in list(s.metrics.items())[:METRICS]]
    if len(s.metrics) > METRICS:
        shown.append(f"{len(s.metrics) - METRICS} more")
    if shown:
        yield "at last", " · ".join(shown)
    if s.memory_bytes:
        yield (
            "memory",
            ", ".join(
                filter(None, [f"{wording.size(s.memory_bytes)} at most", _of(s.memory_ranks, s)])
            ),
        )
    if s.host_used_bytes is not None and s.host_limit_bytes:
        used, limit = map(wording.size, (s.host_used_bytes, s.host_limit_bytes))
        yield "host", f"{used} of {limit} in use when last seen"
    yield from _cards(s)


def _pace(s: Summary) -> Iterator[tuple[str, str]]:
    """Yield how far and how fast it went."""
    if s.steps:
        words = [f"{s.steps:,}"]
        words += [f"{_rate(s.steps_per_second)} a second"] if s.steps_per_second else []
        words += [f"{_rate(s.samples_per_second)} samples a second"] if s.samples_per_second else []
        yield "steps", " · ".join(words)
    if s.waiting_share is not None:
        yield "data", f"{100 * s.waiting_share:.0f} % of the training was waiting for it"


def _cards(s: Summary) -> Iterator[tuple[str, str]]:
    """Yield whether what GPUs held is given back, those of which the same is to be said as one."""
    same: dict[str, list[int]] = {}
    for card in s.cards:
        sizes = (card.bytes_before, card.bytes_after)
        before, after = ("?" if n is None else wording.size(n) for n in sizes)
        words = f"{before} before the run"
        if card.is_given_back is not None:
            more = (card.bytes_after or 0) - (card.bytes_before or 0)
            told = "given back" if card.is_given_back else f"{wording.size(more)} more than before"
            words += f", {after} after it: {told}"
        same.setdefault(words, []).append(card.index)
    for words, which in same.items():
        yield ranks_text(which).replace("rank", "GPU"), words


def _facts(s: Summary) -> str:
    words = [wording.counted(s.ranks, "rank"), s.engine, s.device]
    words += [s.mixed_precision] if s.mixed_precision != "no" else []
    words += [f"attempt {s.attempt}"] if s.attempt > 1 else []
    return " · ".join(words)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _parts(s: Summary) -> tuple[Part, ...]:
    return s.memory_parts if s.memory_bytes else ()


def _who(part: Part, s: Summary) -> str:
    """Name who has most of a part, where not all have as much."""
    return "" if len(part.ranks) == s.ranks else _of(part.ranks, s)


def _of(ranks: tuple[int, ...], s: Summary) -> str:
    if s.ranks == 1 or not ranks:
        return ""
    return "on all ranks" if len(ranks) == s.ranks else f"on {ranks_text(ranks)}"
