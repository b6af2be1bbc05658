"""Describes a run: its position, devices, warnings and results, and what to do next. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .. import part
from ..checks.remedies import remedies, remedies_of_rank
from ..hangs import verdict
from ..system.text import (
    MAX_TIME_S,
    format_bytes,
    format_bytes_of,
    format_count,
    format_duration,
    format_number,
    format_ranks,
    plural,
    shorten,
)
from ..tracking import events as ev
from ..tracking.curves import RATES
from ..tracking.events import Host
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.overview import stragglers
from ..tracking.overview.epochs import main_metric
from ..tracking.overview.run_progress import fraction_of_bars, is_epoch_only
from ..tracking.state import RankState, RunState
from . import rank_texts
from .eta import clock, fraction, progress, run_fraction, time_left


def run_position(state: RunState) -> tuple[str, str]:
    """Return the position of the slowest active rank, as (short, detail).

    In known loops, it is ("", the place in each loop). With progress bars, it is (the share of the
    epoch or "", the place of each bar). With neither, it counts batches or steps: (the epoch,
    "40/100 batches"), or ("40/100 batches", "") in an unknown epoch. ("", "") before that.
    """
    ranks = [rank for rank in state.ranks if rank.bar is not None]
    # The slowest active rank: the share that is shown beside this is of that rank, too.
    rank = min(ranks, key=lambda rank: (rank.is_over, fraction(rank) or 0.0), default=None)
    if rank is None or rank.bar is None:
        return "", ""
    bar = rank.bar
    if rank.progress is not None and rank.progress.loops:
        return "", rank_texts.bar_positions(rank)
    if rank.nest:
        share = fraction_of_bars(rank) if is_epoch_only(rank) else None
        return ("" if share is None else f"{int(100 * share)} %"), rank_texts.bar_positions(rank)
    total = "" if bar.total is None else f"/{format_number(bar.total)}"
    amount = f"{format_number(bar.n)}{total}"
    count = bar.total if bar.total is not None else bar.n
    unit = bar.unit if count == 1 else {"batch": "batches"}.get(bar.unit, f"{bar.unit}s")
    return (bar.description, f"{amount} {unit}") if bar.description else (f"{amount} {unit}", "")


def hang(state: RunState) -> str:
    """Return the sentence about a hang; for a run that has ended, that it hung when it ended."""
    return f"when the run ended: {state.hang}" if state.is_over and state.hang else state.hang


def is_stuck(state: RunState) -> bool:
    """Return whether no rank makes progress. A rank that is only slower than others is no hang.

    False once the run stops or has ended.
    """
    return (
        bool(state.hang)
        and not state.is_over
        and state.status != "stopping"
        and not any(rank.hang == "slow?" for rank in state.ranks)
    )


def status(state: RunState) -> str:
    """Return the run's status in a word or two: the outcome, unless it hangs, fails or restarts.

    A run that hangs is 'stuck'; a running one with a failed rank is 'failing'.
    """
    if is_stuck(state):
        return "stuck"
    if state.status == "starting" and state.attempt > 1:
        return "restarting"
    has_failed = any(rank.status in ("failing", "failed") for rank in state.ranks)
    return "failing" if state.status == "running" and has_failed else state.outcome


def tone(state: RunState) -> str:
    """Return the key of the status in `theme.STATUS`: 'flawed' if the result may be wrong."""
    is_flawed = state.status == "succeeded" and bool(state.flaw)
    return "flawed" if is_flawed else status(state)


def headline(state: RunState, now: float) -> tuple[str, str]:
    """Return the key of the status in `theme.STATUS`, and the status in a few words.

    The words add how long a run is stuck, which ranks are slow, or the phase before the first step.
    """
    slow = [rank.rank for rank in state.ranks if rank.hang == "slow?"]
    key, text = tone(state), status(state)
    if key == "stuck":
        text = f"stuck for {clock(progress(state, now).stuck_for or 0.0)}"
    elif key == "running" and slow:
        key, text = "slow", f"running, {shorten(format_ranks(slow), 40)} slow"
    elif key == "running" and not _has_moved(state):
        name, _ = _phases(state)[-1]
        count = f" {_count_joined(state)}/{state.world_size}" if name == ev.JOINING else ""
        text = f"{name}{count}" or text
    return key, text


def sentence(state: RunState, now: float) -> str:
    """Return the status and the progress of the run in a sentence, for a screen reader.

    An ended run has its status only, a stuck one how long.
    """
    if is_stuck(state):
        seconds = clock(progress(state, now).stuck_for or 0.0)
        return f"{state.title} has been stuck for {seconds}"
    parts = [f"{state.title} {status(state)}"]
    if not state.is_over:
        done = run_fraction(state)
        parts += [f"{100 * done:.0f} percent done"] if done is not None else []
        parts += [time_left(state, now)] if status(state) != "failing" else []
        name = main_metric(n for n in state.curves.all if n not in RATES)
        last = None if name is None else state.curves.all[name].last
        parts += [f"loss {format_number(last)}"] if last is not None else []
    return ", ".join(filter(None, parts))


def phase(state: RunState, now: float) -> str:
    """Return the phases of a run before its first step, each with its seconds; after it, "".

    Before all ranks have started, only how many have. Also "" if the run has a message or has no
    active rank; earlier phases under a second are left out.
    """
    ranks = [rank for rank in state.ranks if not rank.is_over]
    is_waiting = state.status in ("starting", "running") and not state.message
    if not is_waiting or not ranks or _has_moved(state):
        return ""
    started = sum(rank.started is not None for rank in ranks)
    if started < len(ranks):
        count = f" {started}/{state.world_size}" if state.world_size > 1 else ""
        return f"starting the ranks{count} · {whole_seconds(state.elapsed(now))}"
    *earlier, (name, began) = phases = _phases(state)
    ends = (begin for _, begin in phases[1:])
    parts = [
        f"{known or 'your code'} · {whole_seconds(end - begin)}"
        for (known, begin), end in zip(earlier, ends, strict=True)
        if end - begin >= 1
    ]
    text = name or "your code, before the first step"
    if name == ev.JOINING:
        all_ranks = plural(state.world_size, "rank")
        text = f"joining the others: {_count_joined(state)} of {all_ranks} there"
    return " › ".join([*parts, f"{text} · {whole_seconds(max(0.0, now - began))}"])


def _has_moved(state: RunState) -> bool:
    """Return whether a rank has made a step, or has a progress bar or metrics."""
    return any(
        rank.bars or rank.metrics or (rank.progress is not None and rank.progress.steps)
        for rank in state.ranks
    )


def _phases(state: RunState) -> list[tuple[str, float]]:
    """Return the phases of the foremost rank before its first step, as (name, start).

    The first is "", the user's code. If the training has requested a batch and no other phase runs,
    the last is "first batch". Starts are in seconds since the epoch, as event times.
    """
    rank = max(state.ranks, key=lambda rank: (bool(rank.phase), len(rank.phases)))
    phases = [("", rank.started or state.created), *rank.phases]
    if rank.progress is not None and not rank.phase:
        phases.append(("first batch", rank.progress.time - rank.progress.elapsed))
    return phases


def _count_joined(state: RunState) -> int:
    return sum(rank.phase == ev.JOINING for rank in state.ranks)


def is_restarted(state: RunState) -> bool:
    """Return whether the run's message is the reason why it was restarted."""
    has_reason = state.status in ("starting", "running") and not state.hang and not state.steered
    return state.attempt > 1 and has_reason


def has_ended_badly(state: RunState) -> bool:
    """Return whether a run ended badly, with a message, though no rank caused that."""
    is_bad = state.status in ("failed", "lost", "timed out")
    return is_bad and bool(state.message) and verdict.find_culprit(state) is None


def trouble(state: RunState) -> str:
    """Return the problem of a run as a whole, in a sentence; "" without one.

    The reason for a restart, else how it ended, else a hang. The failure of the rank that caused it
    is described apart.
    """
    if is_restarted(state):
        return f"attempt {state.attempt - 1} ended: {state.message}"
    if not has_ended_badly(state):
        return hang(state)
    # The last sentence of the message after a timeout is the advice, which is drawn apart.
    return verdict.describe_timeout(state) if state.status == "timed out" else state.message


def facts(state: RunState, now: float, *, brief: bool = False) -> str:
    """Return the run in one line: ``2 ranks · fork · cpu · 12 s · about 3 min left``.

    With `brief`, leaves out the time left and gives whole seconds while the run lasts: a board
    sends each change to the page. The time left is also left out during a hang, but not for a slow
    rank.
    """
    parts = [plural(state.world_size, "rank"), state.engine, devices(state)]
    if state.is_queued:  # its job decides about ranks and devices
        parts = [state.engine]
    if state.precision != "no":
        parts.append(state.precision)
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt} of {state.attempts}")
    passed = state.elapsed(now)
    parts.append(whole_seconds(passed) if brief and not state.is_over else format_duration(passed))
    is_slow = any(rank.hang == "slow?" for rank in state.ranks)
    left = "" if brief or (state.hang and not is_slow) else time_left(state, now)
    return " · ".join(filter(None, [*parts, left, describe_deadline(state, now)]))


def describe_deadline(state: RunState, now: float) -> str:
    """Return when something else ends the run: ``the Slurm job 12 ends in 2 h 5 min``.

    "" without such a limit, and after the run.
    """
    if state.deadline is None or state.is_over:
        return ""
    hours, minutes = divmod(max(0, int(state.deadline.ends - now)) // 60, 60)
    left = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{state.deadline.whose} ends in {left}"


def whole_seconds(seconds: float) -> str:
    """Return a duration without fractions of a second, so that it changes at most once a second."""
    return f"{int(seconds)} s" if seconds < 60 else format_duration(int(min(seconds, MAX_TIME_S)))


def notes(state: RunState, limit: int = 6) -> list[str]:
    """Return the warnings of a run, one line each, and the number of those beyond `limit`.

    That number is a line of its own. Empty without warnings.
    """
    more = len(state.notes) - limit
    shown = [f"⚠ {note}" for note in state.notes[:limit]]
    return [*shown, *([f"… and {plural(more, 'more note')}"] if more > 0 else [])]


def devices(state: RunState) -> str:
    """Return what the ranks train on: ``cpu``, ``TPU``, ``2 × NVIDIA H200``.

    On several nodes, the kind and the number of nodes; on one, the GPUs that ranks use, or all if
    that is unknown.
    """
    if other := part.devices().get(state.device):
        return other.label
    if len(nodes(state)) > 1:
        return f"{state.device} on {len(nodes(state))} nodes"
    if state.device == "cpu" or state.host is None or not state.host.gpus:
        return state.device
    used = {r.usage.gpu for r in state.ranks if r.usage.gpu is not None}
    names = [str(g[1])[:40] for g in state.host.gpus if not used or g[0] in used]
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in kinds.items()) or "gpu"


def nodes(state: RunState) -> list[str]:
    """Return the names of the nodes that ranks run on; an empty list on the launcher's host."""
    return list(dict.fromkeys(rank.node for rank in state.ranks if rank.node))


def lines(state: RunState) -> list[str]:
    """Return the use of the host as one line, or of the nodes with their ranks as a line each.

    A last line counts the nodes beyond MAX_SINGLE_RANKS. A node has a line also if its use is
    unknown. Empty if the use of the host is unknown and no rank runs on a named node.
    """
    if state.host is not None:
        return [host(state.host)]
    lines = []
    for name in (every := nodes(state))[:MAX_SINGLE_RANKS]:
        ranks = format_ranks([rank.rank for rank in state.ranks if rank.node == name])
        known = state.hosts.get(name)
        lines.append(f"{name}: {ranks}" + (f" · {host(known)}" if known is not None else ""))
    more = len(every) - len(lines)
    return [*lines, *([f"… and {plural(more, 'more node')}"] if more else [])]


def host(status: Host) -> str:
    """Return a host's use: ``memory 41.2 of 64.0 GiB · GPU 60.2 of 141 GiB · 97 % busy``.

    Of several GPUs, the memory of the fullest, and the lowest and highest share. Parts that are
    unknown are left out.
    """
    source = f" ({status.whose})" if status.whose else ""
    parts = [f"memory {format_bytes_of(status.used, status.limit)}{source}"] if status.limit else []
    if status.gpus:
        fullest = max(status.gpus, key=lambda gpu: gpu[2])
        busy = [gpu[4] for gpu in status.gpus if isinstance(gpu[4], (int, float))]
        shares = sorted({f"{share:.0f}" for share in busy}, key=float)
        name = "GPU" if len(status.gpus) == 1 else "fullest GPU"
        parts.append(f"{name} {format_bytes_of(fullest[2], fullest[3])}")
        if shares:
            parts.append(f"{'–'.join(dict.fromkeys([shares[0], shares[-1]]))} % busy")
    return " · ".join(parts)


# What ranks returned and saved


class Result(NamedTuple):
    """A result, and the ranks that returned it."""

    ranks: str
    """``rank 0``, ``ranks 0, 4–7``; empty in the last row if that counts further results."""
    text: str

    def __str__(self) -> str:
        return f"{self.arrow}{self.text}"

    @property
    def arrow(self) -> str:
        """The ranks and an arrow, to stand before the result."""
        return f"{self.ranks} → " if self.ranks else ""


def results(state: RunState) -> list[Result]:
    """Return what ranks returned, equal results in one row; empty if all returned None.

    At most MAX_SINGLE_RANKS rows; a further row, without ranks, counts the others.
    """
    by_result: dict[tuple[str, str], list[int]] = {}
    for rank in state.ranks:
        if rank.result is not None:
            by_result.setdefault((rank.result, rank.checksum), []).append(rank.rank)
    if {text for text, _ in by_result} <= {"None"}:
        return []
    rows = [Result(name_ranks(ranks, state), text) for (text, _), ranks in by_result.items()]
    more = len(rows) - MAX_SINGLE_RANKS
    others = [Result("", plural(more, "more result"))] if more > 0 else []
    return [*rows[:MAX_SINGLE_RANKS], *others]


def name_ranks(ranks: Collection[int], state: RunState) -> str:
    """Return the name of some ranks: ``all ranks``, ``rank 3``, ``ranks 0, 4–7``."""
    return "all ranks" if len(ranks) == state.world_size > 1 else format_ranks(ranks)


def artifact_lines(state: RunState) -> list[str]:
    """Return one line for each value that ranks saved for the notebook, and whether it arrived.

    For example ``model: 86 M parameters updated from rank 0 (328 MiB)``. At most MAX_SINGLE_RANKS
    lines; a value that did not change has no line, nor has a variable of a run that failed.
    """
    by_name: dict[str, list[tuple[int, ev.ArtifactSaved]]] = {}
    for rank in state.ranks:
        for saved in rank.saved:
            by_name.setdefault(saved.name, []).append((rank.rank, saved))
    lines = []
    for name, sent in by_name.items():
        saved = sent[0][1]
        loaded = state.loaded.get(name)
        last = loaded if loaded is not None and loaded.trouble else saved
        if last.trouble:
            lines.append(f"⚠ {ev.describe_failed_update(last)}")
            continue
        if loaded is not None and loaded.code == ev.SAME:
            continue
        is_value = saved.what == "value"
        ranks, size = format_ranks([r for r, _ in sent]), format_bytes(sum(s.size for _, s in sent))
        content = "value" if is_value else "state"
        if saved.parameters:
            content = f"{format_count(saved.parameters)} parameters"
        label = f"{name}: {content}"
        if loaded is not None:
            if saved.adapters:
                label = label.replace(": ", f": PEFT's adapter {saved.adapters} added, ", 1)
            line = f"{label}{'' if is_value else ' updated'} from {ranks} ({size})"
            if loaded.code == ev.OTHER_VARIABLE:
                line += (
                    f", in the model that was passed. The notebook's `{name}` is another model: "
                    f"run.load({name}, {name!r}) loads the weights into it"
                )
            lines.append(line)
        elif state.status == "succeeded":
            call = "run.wait()" if is_value else "run.wait(), or run.load(model)"
            lines.append(f"{label} of {ranks} ({size}), not in the notebook yet: call {call}")
        elif not is_value and state.is_over:
            part = f"state ({size})"
            if saved.what == "model":
                part = f"weights ({format_count(saved.parameters)} parameters, {size})"
            load = "nbtrain.last_run().load() copies it to the notebook"
            lines.append(f"{name}: {ranks} saved its {part}; {load}")
    return lines[:MAX_SINGLE_RANKS]


# What to do next


_STUCK = (
    "if that should not take so long, press Stop, correct it and run the cell again. Stacks shows "
    "the line of each rank (`%nbtrain stacks` and `%nbtrain stop` in another notebook)."
)
_SAME_COLLECTIVES = (
    "let every rank call the same collectives in the same order, then run the cell again; "
    "`--on-hang report` lets a run wait."
)
_OF_KIND = {
    "cuda out of memory": (
        "`%nbtrain memory` estimates the memory of a training, by part; use a smaller batch, "
        "gradient checkpointing or `-p bf16`."
    ),
    "out of memory": (
        "use a smaller batch, fewer ranks (`-n`) or fewer workers of the DataLoader; "
        "`%nbtrain memory` shows what a rank takes."
    ),
    "data loader worker": "try `num_workers=0`: the error then shows in the rank itself.",
    "disk full": "free space, or set `NBTRAIN_HOME` to a folder with more room; then run it again.",
    "fork refused": "close other programs, or start fewer ranks (`-n`).",
    "communication": "let every rank call the same collectives, with tensors of the same sizes.",
    "segfault": (
        "the library that the log names last failed in native code: update it, or try "
        "`--engine spawn`."
    ),
    "signal": (
        "run the cell again; `--max-restarts 1` starts the ranks again by itself, from their "
        "last `nbtrain.checkpoint`."
    ),
    "exit": "to end a rank early, return from the function; then run the cell again.",
}
_LOST = (
    "`nbtrain.last_run().load()` copies what the ranks saved to the notebook; run the cell again "
    "for the rest."
)
_LONGER = "raise `--timeout`, or save with `nbtrain.checkpoint` and run the cell again from there."
_READ = "do what the warning says, then run the cell again."
_FASTER = (
    "look at what {} {} (the shard, the disk, the DataLoader's workers), or raise `num_workers`."
)


def next_step(state: RunState) -> str:
    """Return what to do next, in a sentence; "" if there is no problem or no known remedy.

    It may have code in backticks. Only one remedy is returned: for a hang before a failure.
    """
    culprit = verdict.find_culprit(state)
    if is_stuck(state):
        return _STUCK
    if culprit is not None:
        return _advise_after_failure(culprit, state)
    if state.status == "lost":
        return _LOST
    if state.status == "timed out":
        hung = state.code in (verdict.HANG.code, verdict.DEADLOCK.code)
        return _SAME_COLLECTIVES if hung else _LONGER
    if state.remedy:
        return state.remedy
    if state.status == "failed":
        kind = state.code or verdict.diagnose(state.message, died=False)[0]
        return _OF_KIND.get(kind, "")
    if state.is_over:
        return _READ if state.flaw and state.notes else ""
    if not stragglers.are_short_of_data(state):
        return ""
    slow = [rank.rank for rank in state.ranks if rank.hang == "slow?"]
    return _FASTER.format(format_ranks(slow), "loads" if len(slow) == 1 else "load")


def _advise_after_failure(rank: RankState, state: RunState) -> str:
    """Return the remedy for a known error, else for its kind, else to correct the line.

    Never "".
    """
    kind, line = verdict.classify_rank_failure(rank, state)
    known = remedies(f"{line}\n{rank.error or ''}") or remedies_of_rank(rank, state)
    if known:
        return known[0]
    if text := _OF_KIND.get(kind):
        return text
    place = verdict.line_of_failure(rank) or f"the line that the log of rank {rank.rank} names"
    return (
        f"correct {place}, or the data that it uses, then run it again; `%%distributed --debug` "
        "opens the debugger where it fails."
    )
