"""Why a run failed, as a value: which rank, of what kind, in a line, and what speaks for it.

Pure: made of the picture and of what ranks left, so it is the same live and reopened.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .exceptions import Captured, Frame
from .host import in_words
from .outcome import Failure, describe_returncode, headline, ranks_text
from .state import RankState, RunState

MISMATCH = "collective mismatch"
_SIGNS = (
    (
        "cuda out of memory",
        r"^(torch\.)?OutOfMemoryError|CUDA (error: )?out of memory|hipErrorOutOf",
    ),
    ("data loader worker", r"DataLoader worker \(pid"),
    (
        "disk full",
        r"o space left on |Errno 28\]|Disk quota exceeded|disk of the run folder .* full",
    ),
    ("fork refused", r"the system refused a new |processes could be (forked|started)"),
    (
        "out of memory",
        r"^MemoryError|ran out of memory and was killed|an't allocate memory|std::bad_alloc"
        r"|Cannot allocate memory|not enough memory: you tried",
    ),
    (
        "communication",
        r"collective mismatch|Watchdog caught collective|NCCL communicator was aborted"
        r"|^(Dist\w+Error|RuntimeError): .*([Tt]imed out|Timeout|NCCL error)",
    ),
)
_KINDS = tuple((kind, re.compile(sign, re.MULTILINE)) for kind, sign in _SIGNS)
_NAMED_BY_WITNESS = ("data loader worker", "disk full", "fork refused")
_STACK = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_ADVICE = {
    "data loader worker": (
        "num_workers=0 loads in the rank itself, where the error is seen; fewer workers, or "
        "smaller batches, need less of /dev/shm",
    )
}


@dataclass(frozen=True)
class Verdict:
    """Why a run failed. `rank` is -1 where it was no rank's doing.

    `kind` is one of: exception, exit, signal, segfault, out of memory, cuda out of memory,
    communication, data loader worker, disk full, fork refused, timeout, node (another one), launch.
    `advice` is what to do about it, where that is known.
    """

    kind: str
    rank: int
    headline: str
    evidence: tuple[str, ...] = ()
    others: str = ""
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        rest = [f"  · {line}" for line in (*self.evidence, self.others) if line]
        return "\n".join([f"{who}{self.headline}  [{self.kind}]", *rest])

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def of(state: RunState, failures: Sequence[Failure]) -> Verdict | None:
    """Return why a run failed; None where it did not, or was interrupted."""
    if state.status == "interrupted":
        return None
    if state.status == "timed out":
        held = [f"rank {r.rank} {_held_out(r)}" for r in state.ranks if _held_out(r)]
        return Verdict("timeout", -1, f"took longer than its timeout: {state.message}", tuple(held))
    if state.elsewhere is not None and all(failure.is_echo for failure in failures):
        return Verdict("node", -1, state.elsewhere.text)
    if failures:
        cause = headline(failures)
        return _of_rank(cause, failures, state)
    if state.status == "succeeded" or not state.is_over:
        return None
    kind, said = diagnose(state.message, died=False)
    return Verdict("launch" if kind == "exception" else kind, -1, said)


def _held_out(rank: RankState) -> str:
    """Word how a rank took being stopped, where it did not obey."""
    if rank.status == "failed":
        return line(rank)
    return "had to be killed" if rank.returncode == -signal.SIGKILL else ""


def _of_rank(cause: Failure, failures: Sequence[Failure], state: RunState) -> Verdict:
    rank = state.ranks[cause.rank]
    told = _told(cause.error) if cause.error is not None else _native_words(cause)
    died = cause.error is None and (not rank.error or _is_exit(rank.error))
    kind, said = diagnose(cause.summary, told, rank.returncode, rank.evidence, died=died)
    if cause.is_echo:
        kind, said = "communication", lost(state, said)
    evidence = [
        *_lines(cause, rank, kind),
        *(text for text in rank.evidence if not said.startswith(text)),
        *(_card(rank, state) if kind == "cuda out of memory" else ()),
        *(advice := _advice(kind, rank, state)),
    ]
    became = others(cause, failures, state)
    return Verdict(kind, cause.rank, said, tuple(dict.fromkeys(evidence)), became, advice)


def _advice(kind: str, rank: RankState, state: RunState) -> tuple[str, ...]:
    """Return what to do; a host that is out of memory ends ranks by signals, a TPU's by SIGSEGV."""
    killed = rank.returncode == -signal.SIGKILL and not rank.error
    killed = killed and "not for want of memory" not in death(rank)
    killed = killed or kind == "out of memory"
    killed = killed or (kind == "segfault" and state.device in ("xla", "tpu"))
    return (*_ADVICE.get(kind, ()), *(state.if_killed if killed else ()))


def diagnose(
    said: str,
    told: str = "",
    returncode: int | None = None,
    seen: Sequence[str] = (),
    *,
    died: bool,
) -> tuple[str, str]:
    """Return the kind of a failure and its headline.

    `said` is its one line, `told` all of its text, `seen` what the rank saw (`nbtrain.witness`).
    """
    text = "\n".join((said, told, *seen))
    kind = next((kind for kind, sign in _KINDS if sign.search(text)), "")
    if kind == "communication" and MISMATCH in text:
        return kind, f"{said}: ranks called different collectives, or with different sizes"
    if kind in _NAMED_BY_WITNESS:
        better = [line for line in seen if dict(_KINDS)[kind].search(line) and line not in said]
        return kind, f"{better[0]} ({said})" if better else said
    if kind == "cuda out of memory":
        return kind, ". ".join(said.split(". ")[:2])
    if kind or not died:
        return kind or "exception", said
    if returncode is None or returncode >= 0 or "sys.exit(" in said:
        return "exit", said
    if returncode == -signal.SIGSEGV and (frame := _crashed_in(told)):
        return "segfault", f"{said}, in {frame.function} at {_place(frame)}"
    return "segfault" if returncode == -signal.SIGSEGV else "signal", said


def lost(state: RunState, said: str) -> str:
    """Word why a rank lost its peers, where none of them failed: some may have returned early."""
    gone = [r.rank for r in state.ranks if r.status == "done"]
    return f"lost {ranks_text(gone)}, whose function had returned: {said}" if gone else said


def closing_words(ended: str, state: RunState) -> str:
    """Word how ranks ended, where their own lines do not say why."""
    if ended in ("succeeded", "failed"):
        return state.elsewhere.text if ended == "failed" and state.elsewhere is not None else ""
    groups: dict[str, list[int]] = {}
    for rank in state.ranks:
        status = "not started again" if rank.status == "starting" else rank.status
        groups.setdefault(status, []).append(rank.rank)
    return ", ".join(f"{ranks_text(who)} {status}" for status, who in groups.items())


def line(rank: RankState) -> str:
    """Return the headline of one rank's failure, from the picture alone."""
    raised = bool(rank.error) and not _is_exit(rank.error) and (rank.returncode or 0) >= 0
    if raised or not rank.is_over:
        return diagnose(rank.error or "", "", None, rank.evidence, died=False)[1]
    told = "\n".join(rank.log[-60:]) if (rank.returncode or 0) < 0 else ""
    return diagnose(death(rank), told, rank.returncode, rank.evidence, died=True)[1]


def death(rank: RankState) -> str:
    """Word how a rank ended that left no exception."""
    if rank.cause:
        return rank.cause
    how = describe_returncode(rank.returncode)
    if not rank.error:
        return how
    if (rank.returncode or 0) < 0:  # ended by us for taking too long over it
        return f"failed with {rank.error}, and did not end by itself"
    if _is_exit(rank.error):
        return f"{how} ({rank.error})"
    return f"failed with {rank.error}; its report could not be written"


def _is_exit(error: str | None) -> bool:
    return (error or "").startswith("sys.exit(")


def _told(error: Captured | None) -> str:
    """Return the texts of an exception and of what it came from."""
    texts: list[str] = []
    while error is not None and len(texts) < 20:
        texts.append(f"{error.type_name}: {error.text}")
        error = error.cause or (None if error.suppress_context else error.context)
    return "\n".join(texts)


def _native_words(cause: Failure) -> str:
    """Return the log of a rank that native code ended: it is told there alone."""
    return cause.log if (cause.returncode or 0) < 0 else ""


def _lines(cause: Failure, rank: RankState, kind: str) -> list[str]:
    """Return what speaks for a verdict in what the rank itself left."""
    found: list[str] = []
    if cause.error is not None and (frames := cause.error.frames):
        at = next((f for f in reversed(frames) if not f.is_library), frames[-1])
        found.append(f"at {_place(at)} in {at.function}")
    if cause.error is not None and kind == "cuda out of memory":
        found += [part.rstrip(".") for part in cause.error.text.split(". ")[2:]]
    if cause.error is None and cause.returncode is not None and cause.returncode >= 0:
        found.append(f"exit code {cause.returncode}")
    if cause.error is None and cause.returncode is not None and cause.returncode < 0:
        found.append(f"signal {-cause.returncode}")
        found += [f"at {_place(f)} in {f.function}" for f in _stack(cause.log) if not f.is_own]
    if (held := rank.taken.memory) and "memory" in kind + cause.summary:
        found.append(f"it held {in_words(held)} of memory when last seen")
    steps = rank.step if rank.step is not None else rank.trained.steps if rank.trained else None
    return [*found, *([f"its last step was {steps}"] if steps else [])]


def _crashed_in(log: str) -> Frame | None:
    """Return the innermost frame of the user's own in the stack that faulthandler left."""
    return next((f for f in _stack(log) if not f.is_own and not f.is_library), None)


def _stack(log: str) -> Iterator[Frame]:
    for match in filter(None, map(_STACK.match, log.splitlines())):
        number = int(match["line"])
        yield Frame(match["file"], number, match["function"], number, number)


def _place(frame: Frame) -> str:
    """Name a line; a cell's file has a name that nobody gave it."""
    is_cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")
    return f"line {frame.line}" if is_cell else f"{Path(frame.filename).name}:{frame.line}"


def _card(rank: RankState, state: RunState) -> list[str]:
    """Word who held what on the rank's GPU when it was last looked at."""
    gpus = state.host.gpus if state.host is not None else ()
    for index, name, used, total, *_ in gpus:
        if index == rank.taken.gpu:
            held = {r.rank: r.taken.gpu_memory or 0 for r in state.ranks if r.taken.gpu == index}
            rest = max(0, used - sum(held.values()))
            who = [f"rank {r} {in_words(size)}" for r, size in held.items()]
            whole = f"{in_words(used)} of {in_words(total)}"
            told = ", ".join([*who, f"others {in_words(rest)}"])
            return [f"GPU {index} ({name}), when last seen, held {whole}: {told}"]
    return []


def others(cause: Failure, failures: Sequence[Failure], state: RunState) -> str:
    """Say in a line what became of the other ranks."""
    became: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.rank != cause.rank and rank.status != "failed":
            ended = {"done": "had finished", "stopped": "stopped"}.get(rank.status, "still there")
            became.setdefault(ended, []).append(rank.rank)
    for other in failures:
        if other is not cause:
            kind = other.error.type_name if other.error else other.summary
            echo = other.is_echo and not cause.is_echo
            words = "could not go on without it" if echo else f"failed too ({kind})"
            became.setdefault(words, []).append(other.rank)
    return "; ".join(f"{ranks_text(ranks)} {_was(words, ranks)}" for words, ranks in became.items())


def _was(words: str, ranks: list[int]) -> str:
    if words == "still there":
        return "is still there" if len(ranks) == 1 else "are still there"
    if words != "stopped":
        return words
    return "was stopped" if len(ranks) == 1 else "were stopped"


def last_words(lines: list[str], count: int = 12) -> list[str]:
    """Return the lines that tell how a process died: its last, or those of faulthandler's stack,
    from the thread that crashed on."""
    crash = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not crash:
        return lines[-count:]
    stacks = lines[crash[-1] + 1 :]
    own = [i for i, line in enumerate(stacks) if line.startswith("Current thread ")]
    return [*lines[max(0, crash[-1] - 4) : crash[-1] + 1], *stacks[own[0] if own else 0 :]][:count]


def note(cause: Failure, state: RunState, why: Verdict) -> str:
    """Say which rank the exception is from, what became of the others, and what it does not say."""
    where = f"nbtrain: this is from rank {cause.rank} of {state.world_size}"
    told = f"{where}; {why.others}." if why.others else f"{where}."
    text = f"{told} What rank {cause.rank} printed: nbtrain.last_run().logs({cause.rank})"
    known = cause.error is None or why.kind == "exception" or why.headline == cause.summary
    return "\n".join([text, *([] if known else [f"nbtrain: {why.headline}"]), *why.advice])
