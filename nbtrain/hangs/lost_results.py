"""Finds out whether a run lost its results although its ranks ended well. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..findings import Finding
from ..tracking.events import RETURNED
from ..tracking.state import RankState, RunState
from .failures import describe_returncode

RESULTS_LOST = "results lost"
"""The code of such a run, and a kind of `FailureReport`."""

_FREE_SPACE = "Free space there, or set NBTRAIN_HOME to a folder with more room"
_REMEDIES = {
    "EFBIG": "Raise the limit on the size of a file (ulimit -f)",
    "EROFS": "Set NBTRAIN_HOME to a folder that can be written",
}
_THEN = "then run it again, or save the model in the function"


def describe_lost_results(state: RunState, expected: Collection[str]) -> Finding | None:
    """Return what was lost, why, and what to do; None if all was saved.

    Lost is what any rank could not save. Otherwise, `expected` is lost if rank 0 ended before it
    reported that this was saved.
    """
    lost = [saved for rank in state.ranks for saved in rank.saved if saved.lost]
    if lost:
        remedy = _REMEDIES.get(lost[0].code, _FREE_SPACE)
        names = _format_names(list(dict.fromkeys(saved.name for saved in lost)))
        text = f"{names} could not be saved in the run's folder ({lost[0].trouble})"
        remedy = f"{remedy}, {_THEN}"
    elif expected and state.ranks and _lost_later_results(first := state.ranks[0]):
        ending = "ended (is the disk of the run's folder full?)"
        if first.returncode:
            ending = describe_returncode(first.returncode)
        text = (
            f"rank 0 {ending} before it reported that it had saved {_format_names(list(expected))}"
        )
        remedy = "run.load() loads what is there"
    else:
        return None
    if any(rank.status == "done" for rank in state.ranks):
        text += ". What the ranks returned is in nbtrain.last_run().results"
    return Finding(RESULTS_LOST, f"results are lost: {text}.", f"{remedy}.")


def _lost_later_results(rank: RankState) -> bool:
    """Whether a rank saved what it returned, and then never reported that the rest was saved."""
    return rank.status == "done" and not rank.node and rank.result is None


def _format_names(names: Sequence[str]) -> str:
    shown = [name if name == RETURNED else f"`{name.removesuffix('@all')}`" for name in names[:6]]
    return ", ".join([*shown, *(["…"] if len(names) > 6 else [])])
