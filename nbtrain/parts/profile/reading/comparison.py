"""Compares what the ranks of a run did in the same steps. Pure.

Ranks of one host read one clock. Between hosts, clocks are compared by collectives: all ranks leave
one at about the same time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from .intervals import Interval, intersect, merge, total
from .trace import KINDS, Collective, RankProfile

WAITS = "waits"
"""How long a rank is in a collective before the last rank has come; a part of `communication`."""

PARTS = (*KINDS, WAITS)
"""What a step's time is spent on, if `communication` is without `WAITS`."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one name and size in the recorded steps."""

    name: str
    size_bytes: int | None
    """What each rank gives, if the traces have it."""
    per_step: float
    transfer_s: float
    """From when the last rank has come until the end; the mean."""

    @property
    def bytes_per_s(self) -> float | None:
        """How fast what a rank gives was sent, if its size is known."""
        return self.size_bytes / self.transfer_s if self.size_bytes and self.transfer_s else None


@dataclass(frozen=True)
class Comparison:
    """The same recorded steps of all ranks."""

    ranks: Sequence[RankProfile]
    """By their numbers."""

    @cached_property
    def step_s(self) -> float:
        """A step in seconds: the mean of all ranks."""
        return fmean(self.mean_s(rank, *PARTS) for rank in self.ranks)

    @cached_property
    def typical(self) -> int:
        """The index of the step that is most like the mean: it is drawn."""
        usual = [(rank, self.shares(rank), self.mean_s(rank, *PARTS)) for rank in self.ranks]

        def difference(at: int) -> float:
            found = 0.0
            for rank, shares, mean_s in usual:
                parts = self.parts_ns[rank.rank][at]
                whole = sum(parts.values())
                found += sum(abs(parts[kind] / whole - shares[kind]) for kind in PARTS)
                found += abs(math.log(whole / 1e9 / mean_s))
            return found

        return min(range(min(len(rank.steps) for rank in self.ranks)), key=difference)

    @cached_property
    def parts_ns(self) -> Mapping[int, list[dict[str, int]]]:
        """By the rank's number, for each step: how long each of `PARTS` took."""
        found = {}
        for index, rank in enumerate(self.ranks):
            waits = self.find_waits(index)
            steps = [(s, total(intersect(waits, [(s.begin, s.end)]))) for s in rank.steps]
            found[rank.rank] = [
                {**s.parts_ns, "communication": s.parts_ns["communication"] - ns, WAITS: ns}
                for s, ns in steps
            ]
        return found

    def shares(self, rank: RankProfile) -> dict[str, float]:
        """Return the share of a rank's steps that each of `PARTS` took. Their sum is 1."""
        whole = self.mean_s(rank, *PARTS)
        return {kind: self.mean_s(rank, kind) / whole for kind in PARTS}

    def mean_s(self, rank: RankProfile, *kinds: str) -> float:
        """Return the seconds of some parts of a rank's steps: the mean."""
        return fmean(sum(parts[k] for k in kinds) for parts in self.parts_ns[rank.rank]) / 1e9

    def median_share(self, rank: RankProfile, kind: str) -> float:
        """Return the share of a rank's step that a part takes: the median of the steps."""
        return median(parts[kind] / sum(parts.values()) for parts in self.parts_ns[rank.rank])

    def hidden_s(self, rank: RankProfile) -> float:
        """Return for how many seconds of a step collectives ran beside other work: the mean."""
        return fmean(total(step.hidden) for step in rank.steps) / 1e9

    @cached_property
    def same_collectives(self) -> list[tuple[Collective, ...]]:
        """The collectives that all ranks have recorded, each with the one of every rank.

        In a step, the n-th of one name, group and size is the same on all ranks. Those whose number
        differs, as at the edge of a step, are left out.
        """
        by_rank = [_sort_collectives(rank) for rank in self.ranks]
        found = []
        for key, first in by_rank[0].items():
            of_ranks = [places.get(key, ()) for places in by_rank]
            if all(len(each) == len(first) for each in of_ranks):
                found += list(zip(*of_ranks, strict=True))
        return found

    @cached_property
    def offsets_ns(self) -> list[int]:
        """How far the clock of each rank's host is ahead of that of the first rank's."""
        offsets = dict[str, list[int]]()
        for index, rank in enumerate(self.ranks):
            if rank.host != self.ranks[0].host:
                ahead = [each[index].end - each[0].end for each in self.same_collectives]
                offsets.setdefault(rank.host, []).extend(ahead)
        by_host = {host: round(median(ahead)) for host, ahead in offsets.items() if ahead}
        return [by_host.get(rank.host, 0) for rank in self.ranks]

    @cached_property
    def clock_error_s(self) -> float | None:
        """How exact the comparison of clocks is, if there are several hosts.

        It is half of the range that the middle half of the collectives gives.
        """
        spreads = []
        for index, rank in enumerate(self.ranks):
            if rank.host != self.ranks[0].host:
                ahead = sorted(each[index].end - each[0].end for each in self.same_collectives)
                if not ahead:
                    return float("inf")
                spreads.append(ahead[len(ahead) * 3 // 4] - ahead[len(ahead) // 4])
        return max(spreads) / 2e9 if spreads else None

    def _begin(self, collective: Collective, index: int) -> int:
        return collective.begin - self.offsets_ns[index]

    def _lasts(self) -> list[int]:
        """Return when the last rank came to each collective."""
        return [
            max(self._begin(c, i) for i, c in enumerate(each)) for each in self.same_collectives
        ]

    def find_waits(self, index: int) -> list[Interval]:
        """Return when a rank waits for ranks that come later, by the clock of its host."""
        before = merge(
            (each[index].begin, last + self.offsets_ns[index])
            for each, last in zip(self.same_collectives, self._lasts(), strict=True)
        )
        return intersect(self.ranks[index].waits, before)

    @cached_property
    def late_rank(self) -> int | None:
        """The index of the rank that the others wait for, if it causes most of all waits."""
        waited = Counter[int]()
        for each, last in zip(self.same_collectives, self._lasts(), strict=True):
            begins = [self._begin(c, i) for i, c in enumerate(each)]
            waited[begins.index(last)] += sum(
                total(intersect(rank.waits, [(c.begin, last + self.offsets_ns[i])]))
                for i, (rank, c) in enumerate(zip(self.ranks, each, strict=True))
            )
        # Ranks that are equally fast are late in turn.
        return next((r for r, ns in waited.items() if ns > 0.8 * waited.total()), None)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """The collectives by name and size, the most expensive first."""
        groups = defaultdict[tuple[str, int | None], list[float]](list)
        for each in self.same_collectives:
            begin = max(self._begin(c, i) for i, c in enumerate(each))
            end = max(c.end - self.offsets_ns[i] for i, c in enumerate(each))
            groups[each[0].name, each[0].size_bytes].append((end - begin) / 1e9)
        steps = len(self.ranks[0].steps)
        found = [Traffic(*key, len(each) / steps, fmean(each)) for key, each in groups.items()]
        return sorted(found, key=lambda each: each.per_step * each.transfer_s, reverse=True)


def _sort_collectives(rank: RankProfile) -> Mapping[tuple[object, ...], list[Collective]]:
    """Return the collectives of a rank by step, name, group and size, in their order."""
    found = defaultdict[tuple[object, ...], list[Collective]](list)
    for each in sorted(rank.collectives, key=lambda c: c.begin):
        step = next((s.number for s in rank.steps if s.begin <= each.begin < s.end), None)
        found[step, each.name, each.group, each.size_bytes].append(each)
    return found
