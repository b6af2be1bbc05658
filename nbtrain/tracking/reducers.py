"""Applies events to the state of a run: one function per kind of event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ..findings import Finding
from ..system.source_files import strip_launcher_frames
from ..system.text import strip_escapes, strip_escapes_by_line, strip_rank
from . import events as ev
from . import limits
from .curves import CurvesDraft
from .state import (
    EpochRow,
    ProgressBar,
    RankState,
    RunState,
    is_secondary_failure,
    not_finite_loss,
    progress_after,
)

NOT_FINITE = "not-finite"
"""The code of the finding that names a loss."""

Draft = dict[str, Any]
"""All fields of a `RankState` during one fold."""

Changes = dict[str, Any]
"""Some fields of a `RunState` or a `RankState`, with new values."""


def fold(state: RunState, events: Iterable[ev.Event]) -> RunState:
    """Return the state after `events`, in their order. An event of an unknown rank is ignored."""
    events = list(events)
    if not events:
        return state
    size = len(state.ranks)
    drafts: dict[int, Draft] = {}
    curves = CurvesDraft(state.curves)
    for event in events:
        kind = type(event)
        if event.rank < 0:
            if kind in RUN_REDUCERS:
                state, drafts = _apply_drafts(state, drafts), {}
                if kind is ev.Attempt:  # reads the curves
                    state = replace(state, curves=curves.freeze())
                    curves = CurvesDraft(state.curves)
                state = replace(state, **RUN_REDUCERS[kind](state, event))
        elif event.rank < size and kind in RANK_REDUCERS:
            draft = drafts.get(event.rank)
            if draft is None:
                draft = drafts[event.rank] = dict(vars(state.ranks[event.rank]))
            draft.update(RANK_REDUCERS[kind](draft, event))
            _add_to_curves(curves, draft, event)
    state = _apply_drafts(state, drafts)
    if state.status == "starting" and any(r.status != "starting" for r in state.ranks):
        state = replace(state, status="running")
    return replace(state, curves=curves.freeze())


def _apply_drafts(state: RunState, drafts: Mapping[int, Draft]) -> RunState:
    """Return the state with the changed ranks."""
    if not drafts:
        return state
    ranks = list(state.ranks)
    for rank, draft in drafts.items():
        ranks[rank] = RankState(**draft)
    return replace(state, ranks=tuple(ranks))


def end_run(state: RunState, status: str, at: float, message: str) -> RunState:
    """Return the state of a run that has ended, and with it all its ranks."""
    ranks = tuple(r if r.is_over else replace(r, status="stopped") for r in state.ranks)
    return replace(state, ranks=ranks, status=status, ended=at, message=message)


# What an event changes in the state of the run.


def _reduce_hang(state: RunState, event: ev.Hang) -> Changes:
    """Return the state's changes: the role of each rank in the hang, and the text about it."""
    roles = dict.fromkeys(event.waiting, "waiting") | dict.fromkeys(event.stuck, "stuck?")
    ranks = tuple(
        replace(r, hang=role, timeline=r.timeline.add_hang(event.time, role))
        for r in state.ranks
        for role in [roles.get(r.rank, "")]
    )
    return {"ranks": ranks, "hang": _shorten_note(event.text)}


def _reduce_attempt(state: RunState, event: ev.Attempt) -> Changes:
    """Return the state's changes at a new attempt: ranks start again.

    They keep their logs, metrics, epochs and timelines, and the number of steps before.
    """
    steps = max((r.steps_before + r.progress.steps for r in state.ranks if r.progress), default=0)
    steps = max(steps, *(r.steps_before for r in state.ranks))
    ranks = tuple(  # logs and metrics of earlier attempts stay
        RankState(
            r.rank,
            metrics=r.metrics,
            log=r.log,
            log_count=r.log_count,
            epochs=r.epochs,
            timeline=r.timeline,
            steps_before=steps,
        )
        for r in state.ranks
    )
    message = strip_escapes(event.reason)
    new = {"ranks": ranks, "attempt": event.number, "message": message, "status": "starting"}
    ends = (end.x for series in state.curves.all.values() for end in series.ends.values())
    has_trained = any(rank.progress is not None for rank in state.ranks)
    reached = steps if steps or has_trained else max(ends, default=0)
    new["restarts"] = (*state.restarts, (event.time, reached))[-limits.MAX_EVENTS_KEPT :]
    return {**new, "hang": "", "not_finite": None, "flaws": ()}


def _reduce_finished(state: RunState, event: ev.Finished) -> Changes:
    """Return the state's changes at the run's end; ranks that still ran count as stopped."""
    hang = "" if event.status == "succeeded" else state.hang
    message = strip_escapes_by_line(event.message) or ""
    remedy, code = strip_escapes(event.remedy), _shorten_name(event.code)
    over = end_run(state, event.status, event.time, message)
    return {**vars(over), "hang": hang, "remedy": remedy, "code": code}


def _reduce_run_note(state: RunState, event: ev.RunNote) -> Changes:
    finding = Finding(event.code, _shorten_note(event.text))
    is_known = not finding.text or finding in state.findings  # of another rank, or attempt
    flaws = (*state.flaws, _shorten_name(event.flaw)) if event.flaw else state.flaws
    return {"findings": (*([] if is_known else [finding]), *state.findings), "flaws": flaws}


def _reduce_not_finite(state: RunState, event: ev.NotFinite) -> Changes:
    """Return the state's changes after a loss that is not finite: only the earliest one counts.

    Gradients carry it to all ranks in one step.
    """
    if state.not_finite is not None and state.not_finite.time <= event.time:
        return {}
    finding = Finding(
        NOT_FINITE,
        f"{not_finite_loss(event)}, and such a loss can spoil the weights.",
        "Lower the learning rate, or clip the gradients; "
        "torch.autograd.set_detect_anomaly(True) names the operation that made it",
    )
    others = (finding for finding in state.findings if finding.code != NOT_FINITE)
    return {"not_finite": event, "findings": (finding, *others)}


def _reduce_artifact_loaded(state: RunState, event: ev.ArtifactLoaded) -> Changes:
    """Return the state's changes: a value that the notebook has loaded, or why it could not."""
    name, trouble = (_shorten_name(event.name), _shorten_note(event.trouble))
    loaded = {**state.loaded, name: replace(event, name=name, trouble=trouble)}
    return {"loaded": MappingProxyType(dict(list(loaded.items())[-limits.MAX_ITEMS :]))}


def _reduce_host(state: RunState, event: ev.Host) -> Changes:
    """Return the state's changes: the last measurement of a host."""
    node, whose = (_shorten_name(event.node), _shorten_name(event.whose))
    event = replace(event, node=node, whose=whose)
    return {"hosts": MappingProxyType({**state.hosts, node: event})}


def _reduce_gpu_memory(state: RunState, event: ev.GpuMemory) -> Changes:
    gpus = tuple((index, name[: limits.MAX_NAME_CHARS], used) for index, name, used in event.gpus)
    return {"gpu_memory": (*state.gpu_memory[:1], replace(event, gpus=gpus))}


def _reduce_steered(state: RunState, event: ev.Steered) -> Changes:
    """Return the state's changes: the present status of a request, which is also the message."""
    by, label, text = *map(_shorten_name, (event.by, event.label)), _shorten_note(event.text)
    token = event.token[: limits.MAX_NAME_CHARS]
    event = replace(event, token=token, by=by, label=label, text=text)
    others = [each for each in state.steered if each.request != event.request]
    is_second = event.status == "called off" and any(o.status != "called off" for o in others)
    new: Changes = {"steered": (*others, event)[-limits.MAX_ITEMS :]}
    return new if is_second else {**new, "message": text}


def _reduce_deadline(state: RunState, event: ev.Deadline) -> Changes:
    return {"deadline": replace(event, whose=_shorten_name(event.whose))}


RUN_REDUCERS: Mapping[type[ev.Event], Callable[[RunState, Any], Changes]] = {
    ev.Hang: _reduce_hang,
    ev.Attempt: _reduce_attempt,
    ev.Stopping: lambda _, e: {"status": "stopping", "message": strip_escapes(e.reason)},
    ev.Finished: _reduce_finished,
    ev.Waiting: lambda _, e: {"message": strip_escapes(e.text)},
    ev.RunNote: _reduce_run_note,
    ev.Deadline: _reduce_deadline,
    ev.Steered: _reduce_steered,
    ev.NotFinite: _reduce_not_finite,
    ev.ArtifactLoaded: _reduce_artifact_loaded,
    ev.Host: _reduce_host,
    ev.GpuMemory: _reduce_gpu_memory,
}


# What an event changes in the draft of a rank.


def _reduce_metrics(rank: Draft, event: ev.Metrics) -> Changes:
    """Return the rank's changes: its step, its last metrics, and those of this epoch.

    The step is the event's, also None. Only the first `MAX_METRICS` names are kept.
    """
    metrics = dict(rank["metrics"])
    for key, value in event.values.items():
        name = _shorten_name(key[:400])
        if name in metrics or len(metrics) < limits.MAX_METRICS:
            metrics[name] = strip_escapes(value) if isinstance(value, str) else value
    fresh = rank["fresh"]
    if not fresh.issuperset(map(_shorten_name, event.values)):
        fresh |= metrics.keys() & set(map(_shorten_name, event.values))
    return {"metrics": MappingProxyType(metrics), "step": event.step, "fresh": fresh}


def _reduce_epoch_end(rank: Draft, event: ev.EpochEnd) -> Changes:
    metrics = {name: value for name, value in rank["metrics"].items() if name in rank["fresh"]}
    values = event.loss, MappingProxyType(metrics), event.time
    row = EpochRow(event.epoch, event.steps, event.seconds, *values, event.training)
    return {"epochs": (*rank["epochs"], row)[-limits.MAX_ITEMS :], "fresh": frozenset()}


def _reduce_training(rank: Draft, event: ev.TrainingUpdate) -> Changes:
    """Return the rank's changes: its counts, rates and timeline after a report."""
    old = rank["progress"]
    waited = event.waited - (old.waited if old else 0.0)
    seconds = event.elapsed - (old.elapsed if old else 0.0)
    step = event.steps + rank["steps_before"]
    return {
        "progress": progress_after(old, event),
        "timeline": rank["timeline"].add_training(event.time, waited, seconds, step),
    }


@lru_cache(4096)
def _shorten_name(name: str) -> str:
    return strip_escapes(name, limits.MAX_NAME_CHARS)


def _shorten_note(text: str) -> str:
    return strip_escapes(text, limits.MAX_NOTE_CHARS)


def _reduce_phase(rank: Draft, event: ev.Phase) -> Changes:
    """Return the rank's changes: its phase, its timeline and, before its first step, its phases."""
    phase, trained = strip_escapes(event.phase, 20), rank["progress"]
    new = {"phase": phase, "timeline": rank["timeline"].add_phase(event.time, event.phase)}
    if trained is None or not trained.steps:
        new["phases"] = (*rank["phases"], (phase, event.time))[-limits.MAX_EVENTS_KEPT :]
    return new


def _reduce_output(rank: Draft, event: ev.Output) -> Changes:
    """Return the rank's changes: its last lines, without launchers' frames, and their number."""
    number = event.rank
    shown = [*strip_launcher_frames(event.lines)]
    lines = tuple(strip_rank(strip_escapes(ln), number) for ln in shown[-limits.MAX_LOG_LINES :])
    count = rank["log_count"] + event.passed + len(shown)
    return {"log": (rank["log"] + lines)[-limits.MAX_LOG_LINES :], "log_count": count}


def _reduce_ended(rank: Draft, event: ev.Ended) -> Changes:
    """Return the fields that a rank's last event changes: status, result or error, evidence.

    The status is "done", or "failing" after an error, until the launcher has seen the process end.
    """
    return {
        "status": "done" if event.error is None else "failing",
        "error": strip_escapes_by_line(event.error),
        "error_type": _error_type(event),
        "result": strip_escapes_by_line(event.result),
        "checksum": event.checksum,
        "ended": event.time,
        "evidence": _evidence(event),
        "collectives": event.collectives,
        "timeline": rank["timeline"].add_end(
            event.time,
            has_failed=event.error is not None,
            has_lost_peers=is_secondary_failure(_error_type(event), event.error or ""),
        ),
    }


def _error_type(event: ev.Failing | ev.Ended) -> str:
    """Return the type of an error. Up to version 0.2, only the text had it."""
    text = (event.error or "").partition(":")[0].partition("(")[0]
    known = SystemExit.__name__ if text == "sys.exit" else text
    return _shorten_name(event.error_type or known)


def _reduce_artifact_saved(rank: Draft, event: ev.ArtifactSaved) -> Changes:
    """Return the rank's changes: a value that it saved for the notebook, or why it could not."""
    name, trouble = (_shorten_name(event.name), _shorten_note(event.trouble))
    bad = _shorten_name(event.not_finite)
    others = [old for old in rank["saved"] if old.name != name]
    return {
        "saved": (
            *others[1 - limits.MAX_ITEMS :],
            replace(event, name=name, trouble=trouble, not_finite=bad),
        )
    }


def _reduce_exited(rank: Draft, event: ev.Exited) -> Changes:
    """Return the rank's changes at the end of its process, by the launcher's verdict."""
    return {
        "status": event.verdict,
        "ended": rank["ended"] or event.time,
        "returncode": event.returncode,
        "cause": strip_escapes(event.cause),
        "cause_code": _shorten_name(event.code),
        "timeline": rank["timeline"].add_end(event.time, has_failed=event.verdict == "failed"),
        "evidence": (*rank["evidence"], *_evidence(event)),
        "error": None if event.verdict == "done" else rank["error"],
    }


def _evidence(event: ev.Ended | ev.Exited) -> tuple[Finding, ...]:
    known = event.evidence[:16]
    return tuple(Finding(_shorten_name(code), strip_escapes(text)) for code, text in known)


def _reduce_displayed(rank: Draft, event: ev.Displayed) -> Changes:
    before = () if event.clears else rank["displayed"]
    if event.name and event.name in (each.name for each in before):
        return {"displayed": tuple(event if e.name == event.name else e for e in before)}
    return {"displayed": (*before, event)}


RANK_REDUCERS: Mapping[type[ev.Event], Callable[[Draft, Any], Changes]] = {
    ev.Spawned: lambda _, e: {"pid": e.pid, "node": _shorten_name(e.node)},
    ev.Started: lambda rank, e: {
        "status": "running",
        "pid": e.pid,
        "started": e.time,
        "timeline": rank["timeline"].begin(e.time),
    },
    ev.Metrics: _reduce_metrics,
    ev.TrainingUpdate: _reduce_training,
    ev.EpochEnd: _reduce_epoch_end,
    ev.Resources: lambda rank, e: {"usage": rank["usage"].after_measuring(e)},
    ev.TensorMemory: lambda rank, e: {"usage": rank["usage"].after_counting(e)},
    ev.Progress: lambda rank, e: {"bars": MappingProxyType(_update_bars(rank["bars"], e))},
    ev.Output: _reduce_output,
    ev.Phase: _reduce_phase,
    ev.Debugger: lambda _, e: {
        "phase": f"debugger at {strip_escapes(e.place, 60)}" if e.address else "",
        "debugger": e.address,
    },
    ev.Compiled: lambda _, e: {"compiled": (e.programs, e.seconds)},
    ev.Failing: lambda _, e: {
        "status": "failing",
        "error": strip_escapes_by_line(e.error),
        "error_type": _error_type(e),
    },
    ev.Ended: _reduce_ended,
    ev.ArtifactSaved: _reduce_artifact_saved,
    ev.Displayed: _reduce_displayed,
    ev.Exited: _reduce_exited,
    ev.StepBoundary: lambda _, e: {"boundary": e},
    ev.SettingsSeen: lambda _, e: {"settings": e},
}


def _add_to_curves(curves: CurvesDraft, rank: Draft, event: ev.Event) -> None:
    """Add the numbers of an event to the curves, after the steps of earlier attempts."""
    before = rank["steps_before"]
    if isinstance(event, ev.Metrics):
        step = event.at + before if event.at or before else event.step
        for key, value in event.values.items():
            curves.add_logged(event.rank, step, _shorten_name(key[:400]), value)
    elif isinstance(event, ev.TrainingUpdate):
        progress = rank["progress"]
        for step, mean, name, count, low, high in event.all_losses():
            key = _shorten_name(name) or "loss"
            size = min(max(1, count), limits.MAX_LOSSES_IN_BIN)
            curves.add_automatic(event.rank, before + step, key, mean, size, (low, high))
        # The last report of a rank has its last loss, which may have been reported before.
        is_known = event.losses or curves.has_end(
            event.rank, "loss", before + progress.steps, event.loss
        )
        values = {"loss": None if is_known else event.loss, "lr": event.lr}
        rates = {"steps/s": progress.step_rate, "samples/s": progress.sample_rate}
        moving = {name: rate for name, rate in rates.items() if rate}
        for name, value in {**values, **moving}.items():
            if value is not None:
                curves.add_automatic(event.rank, before + progress.steps, name, value)


def _update_bars(bars: Mapping[int, ProgressBar], event: ev.Progress) -> dict[int, ProgressBar]:
    """Return a rank's progress bars after an event: all open ones, and the last that was closed."""
    new = dict(bars)
    if event.closed:
        new.pop(event.bar, None)  # the bar that ended last is shown last
        if not event.kept:
            return new
    texts = strip_escapes(event.description), strip_escapes(event.unit)
    new[event.bar] = ProgressBar(
        event.n, event.total, event.elapsed, *texts, event.closed, event.time
    )
    if len(new) > limits.MAX_EVENTS_KEPT:
        del new[list(new)[1]]  # probably never closed; the outermost bar stays
    closed = [key for key, bar in new.items() if bar.closed]
    for key in closed[:-1]:  # of one bar per epoch, only the last closed one stays
        if not _was_cut_with(new[closed[-1]], new[key]):
            del new[key]
    return new


def _was_cut_with(outer: ProgressBar, inner: ProgressBar) -> bool:
    """Whether an exception ended a bar and the bar around it, both before they were full."""
    are_cut_short = all(b.fraction is not None and b.fraction < 1 for b in (outer, inner))
    is_around = outer.time - outer.elapsed <= inner.time - inner.elapsed
    return are_cut_short and is_around and outer.time - inner.time < 1
