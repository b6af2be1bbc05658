"""The state of a rank in one object, `RankContext`, and what a part does in a rank: `RankSide`.

`main` makes the context from the `Job`. What runs in a rank gets it as an argument. The functions
that training code calls, such as `nbtrain.log`, get it from `current`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import part
from ..system.files import ReservedFile
from ..tracking.event_log import EventWriter
from ..transport.job import Job
from ..transport.weights.sender import ResultSender
from .device_scalars import ScalarReader
from .hooks.batches import LatestPasses
from .stopping import StopOnRequest


@dataclass(eq=False)
class TrainingFigures:
    """What the observers of one task have counted.

    An observer is notified of an event before those that were added after it, so their methods
    find its figures as they are after the event.
    """

    steps: int = 0
    """Steps of torch's optimizers so far."""
    fed_passes: int = 0
    """Passes over any data that fed steps."""
    loader_place: tuple[int | None, int | None, int | None] = (None, None, None)
    """Of the loader that feeds the steps: the epoch, the batch before the last step, and how many
    batches it has. Before the first step, of the loader that gave the last batch."""
    passes: LatestPasses = field(default_factory=LatestPasses)
    """What is known of the loaders."""
    losses: tuple[float, int] = (0.0, 0)
    """The sum and the number of the finite losses up to the last step; at the end, of all."""
    losses_before: tuple[float, int] = (0.0, 0)
    """The same, up to the step before."""
    last_loss: float | None = None
    """The last loss that is known, once the training has ended."""


@dataclass(eq=False)
class Knob:
    """A number of the training function that the user can turn: see `nbtrain.knob`."""

    given: float
    """What the code gave last."""
    low: float
    high: float
    turned: float | None = None
    """What the user set."""

    @property
    def present(self) -> float:
        """The value that the code gets."""
        return self.given if self.turned is None else self.turned


class StepAction(Protocol):
    """What a part does on all ranks after the same optimizer step, when a user requests it."""

    def prepare(self, values: Mapping[str, Any], optimizer: Any) -> str:
        """Return why it is impossible now, for people; "" if it is possible.

        `values` are those of the request. `optimizer` has made the present step.
        """

    def apply(self, values: Mapping[str, Any], step: int) -> None:
        """Do it after the present step, which has this number in all attempts."""


@dataclass(eq=False)
class RankContext:
    """What a rank knows and uses while it runs a task. A rank that stays has one for each."""

    job: Job
    """The job of the task."""
    process_job: Job
    """The job that the process was started for. Only in a rank that stays it is not `job`."""
    rank: int
    """The number of the rank in its job, which is the number on this node."""
    writer: EventWriter
    """Writes the rank's events."""
    reserve: ReservedFile
    """Space for the last file of the rank, which reports how its task has ended."""
    stopper: StopOnRequest | None = None
    """Handles SIGINT. A rank in the kernel has none: it is interrupted as any cell."""
    sender: ResultSender | None = None
    """Sends the notebook's models back. It is made just before the task runs."""
    checkpoint_refusal: str = ""
    """Why this rank cannot save checkpoints; "" if it can."""
    optimizer_steps: int = 0
    """Optimizer steps of the task so far, of any framework: the step of metrics that are logged
    without one."""
    figures: TrainingFigures = field(default_factory=TrainingFigures)
    """What the observers of torch's training have counted."""
    scalars: ScalarReader = field(default_factory=ScalarReader)
    """Reads metrics on a GPU or TPU when their values are there."""
    diverged: set[str] = field(default_factory=set)
    """Names of logged losses that were not finite."""
    knobs: dict[str, Knob] = field(default_factory=dict)
    """The numbers that the task's code gets from `nbtrain.knob`, by name."""
    step_actions: dict[str, StepAction] = field(default_factory=dict)
    """What parts do when it is requested, by the name of the request."""
    start_is_read: bool = False
    """Whether the task has got the checkpoint to start from by `nbtrain.last_checkpoint`."""
    is_finishing: bool = False
    """Whether the training should end, and the code after it run: see `nbtrain.should_stop`."""

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
    """Return the context of this process. It is None if the process is not a rank."""
    return _current


def get() -> RankContext:
    """Return the context of this rank. Raises `RuntimeError` in a process that is not a rank."""
    if _current is None:
        raise RuntimeError("this process is not a rank of nbtrain")
    return _current


def set_current(context: RankContext | None) -> None:
    """Set the context of this process. With None, it is not a rank."""
    global _current  # a process is one rank at most
    _current = context


class RankSide:
    """A part's side of a rank, one object a process; a part overrides what it needs."""

    can_rescue = True
    """Whether the rank can read and send its weights after a failure."""

    def begin(self, context: RankContext) -> None:
        """Prepare for a task."""

    def before_call(self, context: RankContext) -> None:
        """Prepare just before the task is called, with its `sender`; an error fails the rank."""

    def finish_task(self, context: RankContext) -> None:
        """Let what was queued end: the task has returned, and a peer may wait for this rank."""

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """Handle an exception of the task, before it is in the run's folder."""


def sides_of(job: Job) -> list[RankSide]:
    """Return the `RankSide` of each part that has one for the job's device, imported if need be.

    A process has one object of each.
    """
    return [side for side in map(_side, job.rank_sides) if side is not None]


@functools.cache
def _side(reference: str) -> RankSide | None:
    """Return this process's object of a `RankSide`; without its package, print that once."""
    try:
        side: RankSide = part.load(reference)()
    except ImportError as error:  # a package that the host of this rank lacks
        print(f"nbtrain: a rank works without {reference} ({error})", file=sys.stderr)
        return None
    return side
