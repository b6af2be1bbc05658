"""Finds out whether a run whose ranks all ended well lost its results, and reports it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..findings import Finding
from ..tracking.events import RETURNED
from ..tracking.state import RankState, RunState
from .failures import describe_returncode

LOST = "results lost"
"""The code of such a run."""

_ROOM = "Free space there, or set NBTRAIN_HOME to a folder with more room"
_REMEDIES = {
    "EFBIG": "Raise the limit on the size of a file (ulimit -f)",
    "EROFS": "Set NBTRAIN_HOME to a folder that can be written",
}
_AGAIN = "then run it again, or save the model in the function"


def describe_lost_results(state: RunState, expected: Collection[str]) -> Finding | None:
    """Return what was lost, why, and what to do; None if nothing was.

    `expected` are the names of what rank 0 was to send to the notebook.
    """
    lost = [saved for rank in state.ranks for saved in rank.saved if saved.lost]
    if lost:
        remedy = _REMEDIES.get(lost[0].code, _ROOM)
        names = _listed(list(dict.fromkeys(saved.name for saved in lost)))
        text = f"{names} could not be saved in the run's folder ({lost[0].trouble})"
        remedy = f"{remedy}, {_AGAIN}"
    elif expected and state.ranks and _broke_off(first := state.ranks[0]):
        ending = "ended (is the disk of the run's folder full?)"
        if first.returncode:
            ending = describe_returncode(first.returncode)
        text = f"rank 0 {ending} before it reported that it had saved {_listed(list(expected))}"
        remedy = "run.load() loads what is there"
    else:
        return None
    if any(rank.status == "done" for rank in state.ranks):
        text += ". What the ranks returned is in nbtrain.last_run().results"
    return Finding(LOST, f"results are lost: {text}.", f"{remedy}.")


def _broke_off(rank: RankState) -> bool:
    """Whether a rank left its result, and then did not report that all else was saved, too."""
    return rank.status == "done" and not rank.node and rank.result is None


def _listed(names: Sequence[str]) -> str:
    shown = [name if name == RETURNED else f"`{name.removesuffix('@all')}`" for name in names[:6]]
    return ", ".join([*shown, *(["…"] if len(names) > 6 else [])])
