"""The state of a rank in one object: `RankContext`, which `main` makes from the `Job`.

What runs in a rank gets it as an argument. The functions that training code calls, such as
`nbtrain.log`, get it from `current`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..system.files import ReservedFile
from ..tracking.event_log import EventWriter
from ..transport.job import Job
from .device_scalars import ScalarReader
from .stopping import StopOnRequest


@dataclass(eq=False)
class RankContext:
    """What a rank knows and uses while it runs a task. A live rank has one for each task."""

    job: Job
    """The job of the task."""
    process_job: Job
    """The job that the process was started for. Only in a live rank it is not `job`."""
    rank: int
    """The number of the rank in its job, which is the number on this node."""
    writer: EventWriter
    """Writes the rank's events."""
    reserve: ReservedFile
    """Space for the last file of the rank, which reports how its task has ended."""
    stopper: StopOnRequest | None = None
    """Handles SIGINT. None for a rank in the kernel, which is interrupted as any cell."""
    checkpoint_refusal: str = ""
    """Why this rank cannot save checkpoints; "" if it can."""
    optimizer_steps: int = 0
    """Optimizer steps of the task so far: the step of metrics that are logged without one."""
    scalars: ScalarReader = field(default_factory=ScalarReader)
    """Reads metrics on a GPU or TPU when their values are there."""
    diverged: set[str] = field(default_factory=set)
    """Names of logged losses that were not finite."""

    @property
    def global_rank(self) -> int:
        """The number of the rank among the ranks of all nodes."""
        world = self.job.world
        return self.rank + (world.first - world.begin if world else 0)

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.job.world.size if self.job.world else self.job.world_size


_current: RankContext | None = None


def current() -> RankContext | None:
    """Return the context of this process, or None if it is no rank."""
    return _current


def get() -> RankContext:
    """Return the context of this process, which is a rank. Raises `RuntimeError` elsewhere."""
    if _current is None:
        raise RuntimeError("this process is no rank of nbtrain")
    return _current


def set_current(context: RankContext | None) -> RankContext | None:
    """Make a context that of this process, or with None make it no rank; return the one before."""
    global _current  # a process is one rank at most
    before, _current = _current, context
    return before
