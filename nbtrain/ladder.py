"""The stop ladder: what is done to ranks that are to end, and when, by why they are to."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """A step of the stop ladder: `action` is taken `after` seconds."""

    after: float
    action: str


# After a failure the others may report their own for a moment (the first seen need not be the
# first that happened), then go. An interrupt leaves two seconds to save.
_ON_FAILURE = (Rung(0.2, "terminate"), Rung(0.7, "kill"))
_ON_REQUEST = (
    Rung(0.0, "interrupt"),  # heard at the end of a step, or by nbtrain.should_stop()
    Rung(0.5, "interrupt"),  # heard anywhere, but where the code asks
    Rung(1.5, "interrupt"),  # heard anywhere
    Rung(2.0, "terminate"),
    Rung(2.5, "kill"),
)
LADDERS = {
    "failed": _ON_FAILURE,
    "interrupted": _ON_REQUEST,
    "timed out": _ON_REQUEST,
    "abandoned": (Rung(0.0, "interrupt"), Rung(0.7, "terminate"), Rung(1.0, "kill")),
}
DEATH_BY = {
    "interrupt": -signal.SIGINT,
    "terminate": -signal.SIGTERM,
    "kill": -signal.SIGKILL,
}
"""The signal that a rank dies of if it dies of an action, as its return code."""
