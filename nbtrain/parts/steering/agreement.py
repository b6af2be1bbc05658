"""Finds one step after which all ranks carry out a request. Pure.

A rank that receives a request waits after its next optimizer step, and reports the step's number.

- All ranks wait after the same step: they carry the request out there.
- They wait after different steps: the others continue to the furthest of these steps.
- Some ranks are missing for a moment. They may be in a collective of the next step, and need the
  ranks that wait. So these continue to a later step, which every rank knows before it is there.
- A rank is missing for too long: the request is called off.

A rank that has reported waits until the launcher decides, so all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from . import limits

Status = Literal["open", "agreed", "called off"]


@dataclass
class Agreement:
    """One request, in the process that watches the run. Times are those of a monotonic clock."""

    members: frozenset[int]
    """The ranks that take part: those that have not ended."""
    target: int = 0
    """Ranks wait after this step, or after a later one if they have made more steps."""
    status: Status = "open"
    late: frozenset[int] = frozenset()
    """The missing ranks, if the request was called off; empty if all ranks had ended."""
    _deadline: float | None = None
    _first_step_deadline: float = 0.0
    _round_ends: float | None = None
    _rounds: int = 0

    def update(
        self, steps: Mapping[int, int], started: Collection[int], ended: Collection[int], now: float
    ) -> bool:
        """Update the agreement; return whether the orders to the ranks change.

        `steps` maps ranks to their last reported steps. `started` are
        the ranks that have made a step, and `ended` the ranks whose task has ended.
        """
        if self.status != "open":
            return False
        self.members = self.members.difference(ended)
        if not self.members:
            return self._call_off([])
        waiting = {r: steps[r] for r in self.members if steps.get(r, -1) >= self.target}
        if self._deadline is None:
            if not waiting:  # the request may wait, too
                return False
            extra = limits.FIRST_STEP_TIMEOUT_S if min(waiting.values()) == 1 else 0.0
            self._deadline = now + limits.AGREEMENT_TIMEOUT_S
            self._first_step_deadline = self._deadline + extra
        if waiting.keys() >= self.members:
            if len({*waiting.values()}) > 1:
                return self._go_on_to(max(waiting.values()))
            self.status = "agreed"
            return True
        if not waiting and now >= self._deadline:  # all are under way, and no rank is held up
            self._deadline, self._round_ends, self._rounds = None, None, 0
            return False
        missing = self.members - waiting.keys()
        all_started = missing <= {*started, *steps}
        if now >= (self._deadline if all_started else self._first_step_deadline):
            return self._call_off(missing)
        if not (waiting and all_started):
            return False
        if self._round_ends is None:
            self._round_ends = now + limits.FIRST_ROUND_S * 2**self._rounds
        if now < self._round_ends:
            return False
        self._rounds += 1  # twice as far each time: until it is beyond a collective
        return self._go_on_to(max(waiting.values()) + 2**self._rounds)

    def _go_on_to(self, target: int) -> bool:
        self.target, self._round_ends = target, None
        return True

    def _call_off(self, late: Collection[int]) -> bool:
        self.status, self.late = "called off", frozenset(late)
        return True
