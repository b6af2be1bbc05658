"""Advises what to do about a run that has a problem. Pure."""

from __future__ import annotations

from ..checks.remedies import remedies, remedies_of_rank
from ..hangs import verdict
from ..system.text import format_ranks
from ..tracking.overview import stragglers
from ..tracking.state import RankState, RunState
from . import run_texts

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
    """Return what to do next, in a sentence; "" if there is no problem or no known remedy."""
    culprit = verdict.find_culprit(state)
    if run_texts.is_stuck(state):
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
    """Return the remedy for a known error, else for its kind, else the line to correct."""
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
