"""Explains why a run failed: which rank, which kind of failure, a headline, and the evidence.

Pure: everything comes from the run's state and the ranks' files, so a reopened run shows the same.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import part
from ..checks.remedies import remedies, remedies_of_rank
from ..findings import Finding
from ..system.source_files import is_library, strip_launcher_frames
from ..system.text import format_bytes, format_bytes_of, format_duration, format_ranks, shorten
from ..tracking import events as ev
from ..tracking.state import RankState, RunState
from ..transport.exceptions import CapturedException, TracebackFrame
from .collectives import SAME_ORDER_ADVICE
from .failures import (
    DISK_FULL,
    FORK_REFUSED,
    FRESH_WORKER,
    LOADER_WORKER,
    NO_GRADIENT,
    Failure,
    describe_returncode,
    find_cause,
    find_causes,
)
from .mismatch import describe_others, explain_mismatch

HANG = Finding("hang", "a hang (--on-hang stop)")
DEADLOCK = Finding("deadlock", "a deadlock")
"""Why nbtrain stopped a run that hung."""

_MISMATCH = "collective mismatch"
_KINDS = {
    "cuda out of memory": r"^(torch\.)?OutOfMemoryError|CUDA (error: )?out of memory|hipErrorOutOf",
    LOADER_WORKER: r"DataLoader worker \(pid",
    DISK_FULL: r"o space left on |Errno 28\]|Disk quota exceeded",
    "out of memory": r"^MemoryError|an't allocate memory"
    r"|std::bad_alloc|Cannot allocate memory|not enough memory: you tried",
    "communication": r"collective mismatch|Watchdog caught collective|NCCL communicator was aborted"
    r"|^(Dist\w+Error|RuntimeError): .*([Tt]imed out|Timeout|NCCL error)",
}
"""The first kind whose pattern matches a line of a failure's texts is the failure's kind."""
_KINDS_BY_CODE = frozenset({LOADER_WORKER, DISK_FULL, FORK_REFUSED, ev.OUT_OF_MEMORY})
"""Codes of evidence and causes that are kinds, too."""
_NAMED_BY_EVIDENCE = (LOADER_WORKER, DISK_FULL, FORK_REFUSED)
_STACK_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_ADVICE = {
    LOADER_WORKER: (
        "Try num_workers=0: the rank then loads the data, and shows its error. Fewer workers "
        "or smaller batches use less /dev/shm.",
    ),
    FRESH_WORKER: (
        "A worker that is not forked has none of the notebook's variables. Call "
        "multiprocessing.set_start_method('fork', force=True) before the loader is used (or leave "
        "out its multiprocessing_context), or define the data set in a .py file.",
    ),
}

_LOAD_ONCE = (
    "If memory ran out because each rank loads a model, load the model once, in a cell above, and "
    "give it to the function as a parameter: all ranks then share its memory"
)


@dataclass(frozen=True)
class FailureReport:
    """Why a run failed: `run.failure`. Print it to read it."""

    kind: str
    """One of: exception, exit, signal, segfault, out of memory, cuda out of memory, communication,
    data loader worker, disk full, fork refused, results lost, timeout, launch."""
    rank: int
    """The rank that caused the failure; -1 if no rank did."""
    headline: str
    """What happened, in one line."""
    evidence: tuple[str, ...] = ()
    """The facts about the cause, one per line."""
    others: str = ""
    """How the other ranks ended."""
    advice: tuple[str, ...] = ()
    """The next steps, if any are known."""
    memory: str = ""
    """Which rank used how much memory for what, if memory ran out."""

    def __str__(self) -> str:
        label = f"rank {self.rank}: " if self.rank >= 0 else ""
        rest = [f"  · {line}" for line in (*self.evidence, self.others) if line]
        return "\n".join([f"{label}{self.headline}  [{self.kind}]", *rest])

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def explain_failure(state: RunState, failures: Sequence[Failure]) -> FailureReport | None:
    """Return why a run failed; None if it did not fail, or was interrupted."""
    if state.status == "interrupted":
        return None
    if state.status == "timed out":
        endings = [(rank.rank, _describe_late_end(rank, state)) for rank in state.ranks]
        evidence = tuple(f"rank {rank} {ending}" for rank, ending in endings if ending)
        return FailureReport("timeout", -1, describe_timeout(state), evidence)
    if failures:
        return _explain_rank_failure(find_cause(failures), failures, state)
    if state.status == "succeeded" or not state.is_over:
        return None
    kind, text = diagnose(state.message, died=False)
    kind = state.code or ("launch" if kind == "exception" else kind)
    advice = tuple(filter(None, [state.remedy]))
    return FailureReport(kind, -1, text, evidence=advice, advice=advice)


def describe_timeout(state: RunState) -> str:
    """Describe why a run timed out: nbtrain stopped it because it hung, or it had a timeout."""
    if state.code in (HANG.code, DEADLOCK.code):
        return f"was stopped because of {state.message}"
    return f"took longer than its timeout: {state.message}"


def _describe_late_end(rank: RankState, state: RunState) -> str:
    """Describe how a rank ended that did not stop at the interrupt; "" if it stopped."""
    if rank.status == "failed":
        return describe_rank_failure(rank, state)
    return "had to be killed" if rank.returncode == -signal.SIGKILL else ""


def _explain_rank_failure(
    cause: Failure, failures: Sequence[Failure], state: RunState
) -> FailureReport:
    """Return why the run failed; `cause` is the one of `failures` that caused the others."""
    rank = state.ranks[cause.rank]
    # If native code ended a rank, only its log shows the reason.
    native_log = cause.log if (cause.returncode or 0) < 0 else ""
    details = _texts(cause.error) if cause.error is not None else native_log
    died = cause.error is None and (not rank.error or rank.has_called_exit)
    kind, text = diagnose(
        cause.summary,
        details,
        rank.returncode,
        rank.evidence,
        died=died,
        has_left=rank.has_called_exit,
        code=rank.cause_code,
    )
    frames = reversed(cause.error.frames) if cause.error is not None else ()
    stack = [f'  File "{f.filename}", line {f.line} in {f.function}' for f in frames]
    known = remedies("\n".join((cause.summary, details, *stack)))
    known += remedies_of_rank(rank, state)
    if mismatch := explain_mismatch(rank, state, line_of_failure):
        kind, text, known = "communication", mismatch, (*known, SAME_ORDER_ADVICE)
    elif died and kind == "communication":
        where = describe_others(rank, state, line_of_failure)
        text = f"{text}; {where}" if where else text
        known = (*known, SAME_ORDER_ADVICE)
    elif cause.is_secondary:
        kind, text = "communication", describe_lost_peers(state, text)
    memory = _describe_gpu_memory(rank, state) if kind == "cuda out of memory" else ""
    if kind != "cuda out of memory" and "memory" in kind + cause.summary:
        memory = _describe_memory_growth(rank, state)
    evidence = [
        *_list_evidence(cause, rank, kind, memory),
        *(seen.text for seen in rank.evidence if not text.startswith(seen.text)),
        *(_gpu_shares(rank, state) if kind == "cuda out of memory" else ()),
        *(advice := (*known, *_advise(kind, rank, state))),
    ]
    others = describe_other_ranks(cause, failures, state)
    lines = tuple(dict.fromkeys(evidence))
    return FailureReport(kind, cause.rank, text, lines, others, advice, memory)


def _advise(kind: str, rank: RankState, state: RunState) -> tuple[str, ...]:
    """Return the advice for a kind of failure; empty if there is no advice.

    A host without memory kills ranks by SIGKILL, and those on some devices by SIGSEGV.
    """
    killed = rank.returncode == -signal.SIGKILL and not rank.error
    killed = killed and rank.cause_code != ev.NOT_MEMORY
    killed = killed or kind == "out of memory"
    device = part.devices().get(state.device)
    may_lack_memory = device is not None and device.segfaults_without_memory
    killed = killed or (kind == "segfault" and may_lack_memory)
    is_fresh = any(seen.code == FRESH_WORKER for seen in rank.evidence)
    return (
        *_ADVICE.get(FRESH_WORKER if is_fresh else kind, ()),
        *((_LOAD_ONCE,) if killed and state.world_size > 1 else ()),
    )


def diagnose(
    summary: str,
    details: str = "",
    returncode: int | None = None,
    seen: Sequence[Finding] = (),
    *,
    died: bool,
    has_left: bool = False,
    code: str = "",
) -> tuple[str, str]:
    """Return the kind of a failure (as in `FailureReport.kind`) and its headline.

    `summary` is the failure in one line, `details` its whole text, `seen` the rank's evidence, and
    `code` the cause that its host knows. `died`: the rank reported no exception, and `returncode`
    is how it ended. `has_left`: it called an exit function.
    """
    text = "\n".join((summary, details))
    known = [code, *(finding.code for finding in seen)]
    kind = next((each for each in known if each in _KINDS_BY_CODE), "") or next(
        (kind for kind, sign in _KINDS.items() if re.search(sign, text, re.M)), ""
    )
    if kind == "communication" and _MISMATCH in text:
        place = _crash_place(details) if died else ""
        return (
            kind,
            f"{summary}{place}: ranks called different collectives, or with different sizes",
        )
    if kind in _NAMED_BY_EVIDENCE:
        better = (each.text for each in seen if each.code == kind and each.text not in summary)
        return kind, next((f"{line} ({summary})" for line in better), summary)
    if kind == "cuda out of memory":
        return kind, ". ".join(summary.split(". ")[:2])
    if unused := next((each.text for each in seen if each.code == NO_GRADIENT), ""):
        return kind or "exception", f"{unused} ({summary})"  # torch's long text names nothing
    if kind or not died:
        return kind or "exception", summary
    if returncode is None or returncode >= 0 or has_left:
        return "exit", summary
    kind = "segfault" if returncode == -signal.SIGSEGV else "signal"
    return kind, f"{summary}{_crash_place(details)}"


def _crash_place(details: str) -> str:
    """Return the innermost of the user's lines in a crash: ``, in f at line 5``; "" if none."""
    for frame in _parse_stack(details):
        if not frame.is_own and not frame.is_library:
            return f", in {frame.function} at {_place(frame)}"
    return ""


def describe_lost_peers(state: RunState, summary: str) -> str:
    """Add to the summary of a rank that lost its peers which of them had returned early."""
    done = [r.rank for r in state.ranks if r.status == "done"]
    return f"lost {format_ranks(done)}, whose function had returned: {summary}" if done else summary


def describe_endings(ended: str, state: RunState) -> str:
    """Describe how ranks ended; "" for a run that succeeded or failed."""
    if ended in ("succeeded", "failed"):
        return ""
    groups: dict[str, list[int]] = {}
    for rank in state.ranks:
        never = "not started again" if state.restarts else "not started"
        status = never if rank.status == "starting" else rank.status
        groups.setdefault(status, []).append(rank.rank)
    return ", ".join(f"{format_ranks(ranks)} {status}" for status, ranks in groups.items())


def describe_rank_failure(rank: RankState, state: RunState) -> str:
    """Return the headline of one rank's failure, from the state alone."""
    return classify_rank_failure(rank, state)[1]


def classify_rank_failure(rank: RankState, state: RunState) -> tuple[str, str]:
    """Return the kind and the headline of one rank's failure, from the state alone."""
    if mismatch := explain_mismatch(rank, state, line_of_failure):
        return "communication", mismatch
    raised = bool(rank.error) and not rank.has_called_exit and (rank.returncode or 0) >= 0
    if raised or not rank.is_over:
        return diagnose(rank.error or "", "", None, rank.evidence, died=False)
    log = "\n".join(rank.log[-60:]) if (rank.returncode or 0) < 0 else ""
    return diagnose(
        describe_death(rank),
        log,
        rank.returncode,
        rank.evidence,
        died=True,
        has_left=rank.has_called_exit,
        code=rank.cause_code,
    )


def describe_death(rank: RankState) -> str:
    """Describe how a rank ended that reported no exception."""
    if rank.cause:
        return rank.cause
    ending = describe_returncode(rank.returncode)
    if not rank.error:
        return ending
    if (rank.returncode or 0) < 0:  # the launcher killed it after a timeout
        return f"failed with {rank.error}; its process then did not exit and was killed"
    if rank.has_called_exit:
        return f"{ending} ({rank.error})"
    return f"failed with {rank.error}; its report could not be written"


def _texts(error: CapturedException | None) -> str:
    """Return the texts of an exception and of its causes."""
    texts: list[str] = []
    while error is not None and len(texts) < 20:
        texts.append(f"{error.type_name}: {error.text}")
        error = error.cause or (None if error.suppress_context else error.context)
    return "\n".join(texts)


def _describe_gpu_memory(rank: RankState, state: RunState) -> str:
    """Describe what the rank last used its GPU's memory for; "" if that is unknown."""
    parts, reported = rank.bytes_by_part(), rank.progress
    if rank.usage.on == "cpu" or not parts or reported is None:
        return ""
    listed = "; ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    whole = format_bytes(sum(parts.values()))
    age = max(0.0, (rank.ended or state.ended or reported.time) - reported.time)
    when = f"last measured {format_duration(age)} before it ended"
    return f"rank {rank.rank} held {whole} of its GPU's memory ({listed}; {when})"


def _describe_memory_growth(dead: RankState, state: RunState) -> str:
    """Describe which rank's memory grew most, what it holds, and the age of the measurement.

    The age is relative to the end of `dead`. "" if no rank's memory was measured.
    """
    measured = [r for r in state.ranks if r.usage.memory and r.usage.measured]
    if not measured:
        return ""
    grown = {r.rank: (r.usage.memory or 0) - (r.usage.first_memory or 0) for r in measured}
    rank = max(measured, key=lambda r: (grown[r.rank], r.usage.memory or 0))
    usage, rest = rank.usage, [r.usage.memory or 0 for r in measured if r is not rank]
    first, last = format_bytes(usage.first_memory or 0), format_bytes(usage.memory or 0)
    verb = f"grew most, from {first} to {last}" if first != last else f"held {last}"
    others = f", the others held at most {format_bytes(max(rest))}" if rest else ""
    sizes = rank.bytes_by_part().items()
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes)
    counted = parts or "no weights, gradients or optimizer states were counted in it"
    ended = dead.ended or state.ended
    age = max(0.0, ended - (usage.measured or 0.0)) if ended else 0.0
    when = f"; last measured {format_duration(age)} before rank {dead.rank} ended"
    return f"rank {rank.rank} {verb}{others} ({counted}{when})"


def _list_evidence(cause: Failure, rank: RankState, kind: str, memory: str) -> list[str]:
    """Return the place, exit code, memory and last step of a failure, one line each, if known.

    Does not include `rank.evidence`. `memory` is a line that is passed on; "" for none.
    """
    lines: list[str] = []
    if cause.error is not None and (frames := cause.error.frames):
        at = next((f for f in reversed(frames) if not f.is_library), frames[-1])
        lines.append(f"at {_place(at)} in {at.function}")
    if cause.error is not None and kind == "cuda out of memory":
        lines += [part.rstrip(".") for part in cause.error.text.split(". ")[2:]]
    code = cause.returncode if cause.error is None else None
    if code is not None:
        lines.append(f"exit code {code}" if code >= 0 else f"signal {-code}")
    if code is not None and code < 0:
        lines += [
            f"at {_place(f)} in {f.function}" for f in _parse_stack(cause.log) if not f.is_own
        ]
    if memory:
        lines.append(memory)
    steps = rank.step if rank.step is not None else rank.progress.steps if rank.progress else None
    return [*lines, *([f"the last step that it reported was {steps}"] if steps else [])]


def _parse_stack(log: str) -> Iterator[TracebackFrame]:
    for match in filter(None, map(_STACK_LINE.match, log.splitlines())):
        number = int(match["line"])
        yield TracebackFrame(match["file"], number, match["function"], number, number)


def _place(frame: TracebackFrame) -> str:
    """Return the file and line, or the line alone in a cell, whose file name means nothing."""
    is_cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")
    return f"line {frame.line}" if is_cell else f"{Path(frame.filename).name}:{frame.line}"


def _gpu_shares(rank: RankState, state: RunState) -> list[str]:
    """Return one line on how much of the rank's GPU each rank used in the last measurement.

    Returns a list, which is empty without a measurement of that GPU.
    """
    gpus = state.host.gpus if state.host is not None else ()
    for index, name, used, total, *_ in gpus:
        if index == rank.usage.gpu:
            held = {r.rank: r.usage.gpu_memory or 0 for r in state.ranks if r.usage.gpu == index}
            rest = max(0, used - sum(held.values()))
            parts = [f"rank {r} {format_bytes(size)}" for r, size in held.items()]
            shares = ", ".join([*parts, f"others {format_bytes(rest)}"])
            whole = format_bytes_of(used, total)
            return [f"GPU {index} ({name}), when last seen, held {whole}: {shares}"]
    return []


def describe_other_ranks(cause: Failure, failures: Sequence[Failure], state: RunState) -> str:
    """Describe in one line how the other ranks ended."""
    by_ending: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.rank != cause.rank and rank.status != "failed":
            ended = {"done": "had finished", "stopped": "stopped"}.get(rank.status, "still there")
            by_ending.setdefault(ended, []).append(rank.rank)
    for other in failures:
        if other is not cause:
            kind = other.error.type_name if other.error else other.summary
            echo = other.is_secondary and not cause.is_secondary
            ended = "failed because of it" if echo else f"failed too ({kind})"
            by_ending.setdefault(ended, []).append(other.rank)
    verbs = {"still there": ("is ", "are "), "stopped": ("was ", "were ")}
    return "; ".join(
        f"{format_ranks(ranks)} {verbs.get(end, ('', ''))[len(ranks) > 1]}{end}"
        for end, ranks in by_ending.items()
    )


def final_lines(lines: list[str], count: int = 12) -> list[str]:
    """Return the lines of a log that show how a process died, about `count` of them.

    After a crash, they are the stack that faulthandler wrote, from the thread that crashed on,
    always with the innermost of the user's lines. Otherwise they are the last `count` lines.
    """
    crash = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not crash:
        return lines[-count:]
    stacks = [*strip_launcher_frames(lines[crash[-1] + 1 :])]
    stacks = [line for line in stacks if not line.startswith("Extension modules: ")]
    own = [i for i, line in enumerate(stacks) if line.startswith("Current thread ")]
    shown = [*lines[max(0, crash[-1] - 4) : crash[-1] + 1], *stacks[own[0] if own else 0 :]]
    files = [re.match(r'  File "(.*)", line \d+ in ', line) for line in shown]
    users = next((i for i, file in enumerate(files) if file and not is_library(file[1])), 0)
    if users < 2 * count:
        return shown[: max(count, users + 1)]
    return [*shown[: count - 2], "  …", shown[users]]


def exception_note(cause: Failure, state: RunState, report: FailureReport) -> str:
    """Return the note of an exception: its rank, the other ranks, and facts that it lacks."""
    others = f"; {report.others}" if report.others else ""
    origin = f"nbtrain: this is from rank {cause.rank} of {state.world_size}{others}."
    text = f"{origin} What rank {cause.rank} printed: nbtrain.last_run().logs({cause.rank})"
    is_in_exception = (
        cause.error is None or report.kind == "exception" or report.headline == cause.summary
    )
    seen = state.ranks[cause.rank].evidence
    unused = [each.text for each in seen if each.code == NO_GRADIENT]
    named = [f"nbtrain: {line}" for line in filter(None, [*unused, report.memory])]
    is_mismatch = bool(explain_mismatch(state.ranks[cause.rank], state, line_of_failure))
    subject = f"rank {cause.rank} " if is_mismatch else ""
    headline = [] if is_in_exception else [f"nbtrain: {subject}{report.headline}"]
    return "\n".join([text, *named, *headline, *report.advice])


_CELL_LINE = re.compile(r'^  File "([^"]*ipykernel_\d+/[^"]*|<(?:ipython|cell)[^>]*>)", line (\d+)')
_FILE_LINE = re.compile(r'^  File "([^"]+)", line (\d+)')


def line_of_failure(rank: RankState) -> str:
    """Return which line of the user's code raised: "line 5 of the cell", "train.py, line 5".

    It is read from the traceback in the rank's log; "" if there is none of the user's code.
    """
    log = list(rank.log)
    if ev.TRACEBACK_FOLLOWS in log:
        log = log[len(log) - log[::-1].index(ev.TRACEBACK_FOLLOWS) :]  # of the last attempt
    in_cell = [match for line in log if (match := _CELL_LINE.match(line))]
    if in_cell:
        return f"line {in_cell[-1][2]} of the cell"
    frames = [match for line in log if (match := _FILE_LINE.match(line))]
    own = [match for match in frames if not is_library(match[1])]
    return f"{Path(own[-1][1]).name}, line {own[-1][2]}" if own else ""


def describe_trouble(rank: RankState, state: RunState, width: int = 160) -> str:
    """Return what went wrong in a rank, in one line; "" if nothing did.

    An error that an earlier rank raised, too, is only a reference to that rank.
    """
    is_own = rank.error and _has_failed(rank) and not is_secondary(rank, state)
    earlier = (r for r in state.ranks[: rank.rank] if is_own and _has_failed(r))
    alike = (f"the same as rank {r.rank}" for r in earlier if r.error == rank.error)
    return next(alike, "") or describe_own_trouble(rank, state, width)


def describe_own_trouble(rank: RankState, state: RunState, width: int = 160) -> str:
    """Return what went wrong in a rank, in one line, without a reference; "" if nothing did."""
    if is_secondary(rank, state):
        return "lost its peers"
    text = describe_rank_failure(rank, state) if _has_failed(rank) else ""
    if rank.has_lost_peers and text and not explain_mismatch(rank, state, line_of_failure):
        text = describe_lost_peers(state, text)
    return shorten(text, width)


def _has_failed(rank: RankState) -> bool:
    return rank.status in ("failed", "failing")


def find_culprit(state: RunState) -> RankState | None:
    """Return the rank whose failure caused the others; None if no rank failed."""
    return min(find_causes(state), key=lambda rank: rank.ended or math.inf, default=None)


def is_secondary(rank: RankState, state: RunState) -> bool:
    """Return whether a rank failed only because another one had failed."""
    return rank.has_lost_peers and any(not r.has_lost_peers for r in find_causes(state))
