"""What the launcher tells the ranks: the request under way, and those that are decided."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

AFTER = ("step", "epoch")
"""What the training may finish after."""


@dataclass(frozen=True)
class Action:
    """What all ranks are to do."""

    name: str = "finish"
    after: str = "step"
    """One of `AFTER`."""


@dataclass(frozen=True)
class Asked:
    """A request under way: ranks wait for each other."""

    request: int
    target: int
    """As `Agreement.target`."""


@dataclass(frozen=True)
class Decided:
    """A request that is over."""

    request: int
    is_applied: bool
    action: Action
    ahead: int = 0
    """The largest `StepBoundary.ahead` of all ranks."""
    read: int = 0
    """The largest `StepBoundary.read`."""
    ends_bars: bool = False
    """Whether bars that the training iterates over end: all ranks have the same number of them."""


@dataclass(frozen=True)
class Orders:
    """All that the launcher has told the ranks of an attempt."""

    asked: Asked | None = None
    decided: tuple[Decided, ...] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Orders:
        """Return the orders of `encode`. Raises `ValueError`, `KeyError` or `TypeError`."""
        record = json.loads(data or b"{}")
        asked = record.get("asked")
        decided = (
            Decided(**{**each, "action": Action(**each["action"])})
            for each in record.get("decided", ())
        )
        return cls(None if asked is None else Asked(**asked), tuple(decided))


RequestStatus = Literal["pending", "applied", "called off"]
"""The status of a request, as in `events.Steered`."""
