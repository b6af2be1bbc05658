"""A run as one piece of HTML. Pure: a state and a time in, a string out.

Styles are inline and colours are mid-tones or inherited: that is what survives an untrusted
notebook, GitHub and both themes. No script, no link, no font from elsewhere.
"""

from __future__ import annotations

from html import escape

from ..pace import Bar
from ..state import RankState, RunState
from . import wording

MAX_ROWS = 32
_LIVE_LINES = 8
_KEPT_LINES = 60

_AMBER = "#c98a00"
_COLOURS = {
    "starting": "#8a8f98",
    "running": "#3b82c4",
    "stopping": _AMBER,
    "failing": "#d64545",
    "done": "#2e9e5b",
    "succeeded": "#2e9e5b",
    "failed": "#d64545",
    "stopped": "#8a8f98",
    "interrupted": _AMBER,
    "timed out": _AMBER,
}
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:middle;white-space:nowrap"
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px"
_SOFT = "opacity:.7"


def render(state: RunState, now: float) -> str:
    """Draw the board: live while the run goes on, a static summary once it is over."""
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;'
        "border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 12px;"
        'max-width:1100px;font-variant-numeric:tabular-nums">'
        f"{_notes(state)}{_header(state, now)}{_ranks(state)}{_results(state)}{_log(state)}</div>"
    )


def _header(state: RunState, now: float) -> str:
    message = (
        f'<div style="margin-top:2px;{_SOFT}">{escape(state.message)}</div>'
        if state.message
        else ""
    )
    return (
        f'<div style="margin-bottom:4px">{_badge(state.status)}'
        f'<b style="margin:0 10px;{_MONO};font-weight:600">{escape(state.name)}</b>'
        f'<span style="{_SOFT}">{escape(wording.facts(state, now))}</span>{message}</div>'
    )


def _notes(state: RunState) -> str:
    """Draw what was seen before the run: amber, above everything, to be read once."""
    lines = "".join(f"<div>{escape(note)}</div>" for note in wording.notes(state))
    style = (
        f"margin-bottom:6px;padding:2px 8px;border-left:3px solid {_AMBER};"
        "background:rgba(201,138,0,.12);overflow-wrap:anywhere"
    )
    return f'<div style="{style}">{lines}</div>' if lines else ""


def _badge(status: str) -> str:
    colour = _COLOURS.get(status, "#8a8f98")
    return (
        f'<span style="display:inline-block;min-width:68px;white-space:nowrap">'
        f'<span style="display:inline-block;width:8px;height:8px;border-radius:4px;'
        f'margin-right:6px;background:{colour}"></span>'
        f'<span style="color:{colour};font-weight:600">{escape(status)}</span></span>'
    )


def _ranks(state: RunState) -> str:
    shown = wording.shown(state, MAX_ROWS)
    rows = "".join(_row(rank, state) for rank in shown)
    left = state.world_size - len(shown)
    more = f'<div style="{_SOFT}">… and {left} more ranks</div>' if left else ""
    return (
        '<table style="border-collapse:collapse;border:none;margin:0;background:none">'
        f"<tbody>{rows}</tbody></table>{more}"
    )


def _row(rank: RankState, state: RunState) -> str:
    bar, trouble = rank.bar, wording.trouble(rank, state)
    shade = _SOFT if wording.is_only_echo(rank, state) else f"color:{_COLOURS['failed']}"
    said = [
        f'<span style="{_SOFT}">{escape(wording.position(rank))}</span>' if bar else "",
        _metrics(rank),
        f'<span style="{shade}">{escape(trouble)}</span>' if trouble else "",
    ]
    cells = [
        f'<span style="{_SOFT}">rank {rank.rank}</span>',
        _badge(rank.status),
        _bar(bar, rank),
        "&ensp; ".join(filter(None, said)),
    ]
    wraps = ["", "", "", ";white-space:normal"]
    inner = "".join(
        f'<td style="{_CELL};border:none{wrap}">{cell}</td>'
        for cell, wrap in zip(cells, wraps, strict=True)
    )
    return f'<tr style="background:none">{inner}</tr>'


def _metrics(rank: RankState) -> str:
    if not rank.metrics:
        return ""
    step = f'<span style="{_SOFT}">step {rank.step}: </span>' if rank.step is not None else ""
    return f'{step}<span style="{_MONO}">{escape(wording.metrics(rank))}</span>'


def _bar(bar: Bar | None, rank: RankState) -> str:
    if bar is None or bar.fraction is None:
        return ""
    percent = f"{100 * bar.fraction:.1f}"
    colour = _COLOURS["failed" if rank.status == "failed" else "running"]
    if bar.closed and bar.fraction == 1:
        colour = _COLOURS["done"]
    return (
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent}" aria-label="rank {rank.rank}" '
        'style="display:inline-block;vertical-align:middle;width:140px;height:8px;'
        'border-radius:4px;background:rgba(128,128,128,.25);overflow:hidden">'
        f'<div style="width:{percent}%;height:100%;background:{colour}"></div></div>'
        f'<span style="display:inline-block;width:50px;text-align:right;{_SOFT}">'
        f"{100 * bar.fraction:.0f}&nbsp;%</span>"
    )


def _results(state: RunState) -> str:
    rows = "".join(
        f'<div><span style="{_SOFT}">{escape(who)} →</span> '
        f'<span style="{_MONO}">{escape(result)}</span></div>'
        for who, result in wording.results(state)[:MAX_ROWS]
    )
    return f'<div style="margin-top:4px">{rows}</div>' if rows else ""


def _log(state: RunState) -> str:
    count = sum(rank.log_count for rank in state.ranks)
    if not count:
        return ""
    lines = wording.folded_log(state, _KEPT_LINES if state.is_over else _LIVE_LINES)
    width = max(len(who) for who, _ in lines)
    text = "\n".join(f"{who:<{width}} │ {line}" for who, line in lines)
    shown = (
        f'<pre style="{_MONO};margin:4px 0 0;padding:0;background:none;border:none;'
        f'white-space:pre-wrap;max-height:320px;overflow:auto">{escape(text)}</pre>'
    )
    if not state.is_over:
        return shown
    title = f"Log: {wording.counted(count, 'line')}"
    return (
        f'<details style="margin-top:4px"><summary style="cursor:pointer;{_SOFT}">'
        f"{title}</summary>{shown}</details>"
    )
