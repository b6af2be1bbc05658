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
    factor: float = 1.0
    """How much longer ranks wait than on one host."""
    _held_s: float = 0.0
    """How long ranks have waited in all."""
    _waiting_since: float | None = None
    """The time of the last update, if ranks waited then."""
    _is_first_step: bool = False
    """Whether a rank waited after its first step."""
    _round_ends: float | None = None
    _rounds: int = 0

    @property
    def timeout_s(self) -> float:
        """For how long the request may hold ranks up, in all."""
        return self.factor * limits.AGREEMENT_TIMEOUT_S

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
        self._held_s += 0.0 if self._waiting_since is None else now - self._waiting_since
        self._waiting_since = now if waiting else None
        if not waiting:  # no rank is held up, so the request may wait, too
            return False
        if waiting.keys() >= self.members:
            if len({*waiting.values()}) > 1:
                return self._go_on_to(max(waiting.values()))
            self.status = "agreed"
            return True
        self._is_first_step |= min(waiting.values()) == 1
        missing = self.members - waiting.keys()
        all_started = missing <= {*started, *steps}
        may_compile = self._is_first_step and not all_started
        extra_s = limits.FIRST_STEP_TIMEOUT_S if may_compile else 0.0
        if self._held_s >= self.timeout_s + extra_s:
            return self._call_off(missing)
        if not all_started:
            return False
        if self._round_ends is None:
            times = 5 * 2 ** (self._rounds - 1) if self._rounds else 1
            self._round_ends = now + times * self.factor * limits.FIRST_ROUND_S
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
