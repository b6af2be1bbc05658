"""What an event changes in the picture of its rank: a function a kind, on a draft of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from . import events as ev
from . import taken
from .pace import Bar, after, number, whole
from .plain import plain, plain_lines
from .series import CurvesDraft

LOG_LINES = 200
"""How many of a rank's last lines the picture keeps; the log file keeps all."""

METRICS = 32
"""How many metrics of a rank keep their last value in the picture, the first that come."""

SAVED = 1000
"""How many of the things that a rank left for the notebook are kept, the last that come."""

OPEN_BARS = 16
"""How many bars of a rank are kept; a loop that never closes its bars makes ever more."""

Draft = dict[str, Any]
"""The fields of a `RankState` that is being changed, within one fold."""


def listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _metrics(draft: Draft, event: ev.Metrics, curves: CurvesDraft) -> None:
    said = event.values if isinstance(event.values, Mapping) else {}
    values = {k: v for k, v in said.items() if isinstance(v, (int, float, str))}
    step = event.step if type(event.step) is int and abs(event.step) < 1 << 53 else None
    kept = dict(draft["metrics"])
    for key, value in values.items():
        name = _name(key)
        curves.add_logged(event.rank, step, name, value)
        if name in kept or len(kept) < METRICS:
            kept[name] = plain(value) if isinstance(value, str) else value
    draft["metrics"], draft["step"] = MappingProxyType(kept), step


def _name(key: str) -> str:
    return _short_name(key) if len(key) < 200 else plain(key, 80)


@lru_cache(4096)
def _short_name(key: str) -> str:
    return plain(key, 80)


def _training(draft: Draft, event: ev.Training, curves: CurvesDraft) -> None:
    trained = after(draft["trained"], event)
    if trained is None:
        return
    draft["trained"] = trained
    seen = {"loss": event.loss, "lr": trained.lr}
    rates = {"steps/s": trained.step_rate, "samples/s": trained.sample_rate}
    for name, value in {**seen, **rates}.items():
        if type(value) is float or type(value) is int:
            curves.add_seen(event.rank, trained.steps, name, value)


def _resources(draft: Draft, event: ev.Resources, _curves: CurvesDraft) -> None:
    draft["taken"] = taken.seen(draft["taken"], event)


def _held(draft: Draft, event: ev.Held, _curves: CurvesDraft) -> None:
    draft["taken"] = taken.counted(draft["taken"], event)


def _progress(draft: Draft, event: ev.Progress, _curves: CurvesDraft) -> None:
    if None not in map(number, (event.n, event.total or 0, event.elapsed)):
        draft["bars"] = MappingProxyType(_bars(draft["bars"], event))


def _output(draft: Draft, event: ev.Output, _curves: CurvesDraft) -> None:
    lines = tuple(plain(line) for line in event.lines[-LOG_LINES:])
    draft["log"] = (draft["log"] + lines)[-LOG_LINES:]
    draft["log_count"] += event.passed + len(event.lines)


def _phase(draft: Draft, event: ev.Phase, _curves: CurvesDraft) -> None:
    draft["phase"] = plain(str(event.phase), 20)


def _compiled(draft: Draft, event: ev.Compiled, _curves: CurvesDraft) -> None:
    programs, seconds = whole(event.programs), number(event.seconds)
    draft["compiled"] = None if programs is None or seconds is None else (programs, seconds)


def _spawned(draft: Draft, event: ev.Spawned, _curves: CurvesDraft) -> None:
    draft.update(pid=event.pid, node=plain(str(event.node), 80))


def _started(draft: Draft, event: ev.Started, _curves: CurvesDraft) -> None:
    draft.update(status="running", pid=event.pid, started=event.time)


def _failing(draft: Draft, event: ev.Failing, _curves: CurvesDraft) -> None:
    draft.update(status="failing", error=plain_lines(event.error))


def _ended(draft: Draft, event: ev.Ended, _curves: CurvesDraft) -> None:
    status = "done" if event.error is None else "failing"
    error, result = map(plain_lines, (event.error, event.result))
    draft.update(status=status, error=error, result=result, ended=event.time)
    draft["evidence"] = _said(event.evidence)


def _saved(draft: Draft, event: ev.Saved, _curves: CurvesDraft) -> None:
    new = replace(event, name=plain(event.name, 80), trouble=plain(event.trouble, 1000))
    others = [old for old in draft["saved"] if old.name != new.name]
    draft["saved"] = (*others[1 - SAVED :], new)


def _exited(draft: Draft, event: ev.Exited, _curves: CurvesDraft) -> None:
    draft.update(
        status=event.verdict,
        ended=draft["ended"] or event.time,
        returncode=event.returncode,
        cause=plain(str(event.cause)),
        evidence=(*draft["evidence"], *_said(event.evidence)),
    )
    if event.verdict == "done":
        draft["error"] = None


def _said(lines: Any) -> tuple[str, ...]:
    return tuple(plain(str(line)) for line in listed(lines)[:16])


def ignored(_draft: Draft, _event: ev.Event, _curves: CurvesDraft) -> None:
    pass


FOLDS: Mapping[str, Callable[[Draft, Any, CurvesDraft], None]] = {
    ev.Metrics.kind: _metrics,
    ev.Training.kind: _training,
    ev.Resources.kind: _resources,
    ev.Held.kind: _held,
    ev.Progress.kind: _progress,
    ev.Output.kind: _output,
    ev.Phase.kind: _phase,
    ev.Compiled.kind: _compiled,
    ev.Spawned.kind: _spawned,
    ev.Started.kind: _started,
    ev.Failing.kind: _failing,
    ev.Ended.kind: _ended,
    ev.Saved.kind: _saved,
    ev.Exited.kind: _exited,
}


def _bars(bars: Mapping[int, Bar], event: ev.Progress) -> dict[int, Bar]:
    new = dict(bars)
    if event.closed:
        new.pop(event.bar, None)  # finished last, shown last
        if not event.kept:
            return new
    new[event.bar] = Bar(
        event.n,
        event.total,
        event.elapsed,
        plain(event.description),
        plain(event.unit),
        event.closed,
        event.time,
    )
    if len(new) > OPEN_BARS:
        del new[list(new)[1]]  # never closed, most likely; the outermost stays
    closed = [key for key, bar in new.items() if bar.closed]
    for key in closed[:-1]:  # a bar an epoch, a hundred epochs: the last finished one tells enough
        if not _ended_with(new[closed[-1]], new[key]):
            del new[key]
    return new


def _ended_with(outer: Bar, inner: Bar) -> bool:
    """Whether a bar was ended, before its end, by what ended the one around it: an exception."""
    are_cut_short = all(b.fraction is not None and b.fraction < 1 for b in (outer, inner))
    is_around = outer.time - outer.elapsed <= inner.time - inner.elapsed
    return are_cut_short and is_around and outer.time - inner.time < 1
