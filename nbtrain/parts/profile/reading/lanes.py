"""The parts of a rank's lane in the typical step, as they are drawn. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from .comparison import WAITS, Comparison
from .intervals import Interval, intersect, subtract
from .trace import LANE_BINS, LANE_KINDS, Step

HIDDEN = "hidden"
"""Communication beside other work, which is drawn below the lane."""


class Part(NamedTuple):
    """What a rank did for a time. Times are seconds since the first rank began the step."""

    kind: str
    """One of `KINDS`, `WAITS` or `HIDDEN`."""
    begin_s: float
    end_s: float


def name_kind(kind: str, has_gpu: bool) -> str:
    """Return how a kind is called: on a GPU, Python between operations leaves it idle."""
    if kind == "python":
        return "GPU idle" if has_gpu else "only Python"
    return {WAITS: "waits for other ranks", HIDDEN: "hidden communication"}.get(kind, kind)


def list_parts(compared: Comparison, index: int) -> list[Part]:
    """Return what the rank of an index did in the typical step, on the clock of the first host."""
    at, offset = compared.typical, compared.offsets_ns[index]
    steps = (rank.steps[at].begin for rank in compared.ranks)
    first = offset + min(b - o for b, o in zip(steps, compared.offsets_ns, strict=True))
    waits, step = compared.find_waits(index), compared.ranks[index].steps[at]
    spans = list[tuple[str, Interval]]()
    for kind, span in _list_spans(step):
        waiting = intersect([span], waits) if kind == "communication" else []
        spans += [(kind, part) for part in subtract([span], waiting)]
        spans += [(WAITS, part) for part in waiting]
    spans += [(HIDDEN, part) for part in step.hidden]
    return [Part(kind, (low - first) / 1e9, (high - first) / 1e9) for kind, (low, high) in spans]


def _list_spans(step: Step) -> Iterator[tuple[str, Interval]]:
    """Yield the kinds of a step's lane, each with its time."""
    at, width = 0, (step.end - step.begin) / LANE_BINS
    for sign, group in groupby(step.lane):
        end = at + sum(1 for _ in group)
        yield LANE_KINDS[sign], (step.begin + round(at * width), step.begin + round(end * width))
        at = end
