"""What a part does in a rank: each part may have a `RankSide`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from .. import part
from ..transport.job import Job
from .rank_context import RankContext


class RankSide:
    """A part's side of a rank, one object a process; a part overrides what it needs."""

    def begin(self, context: RankContext) -> None:
        """Prepare for a task."""

    def finish_task(self, context: RankContext) -> None:
        """Let what was queued end: the task has returned, and a peer may wait for this rank."""

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """Look at an exception of the task, before it is reported."""


def sides_of(job: Job) -> Iterator[RankSide]:
    """Yield the `RankSide` of each part that has one for the job's device; none in the kernel.

    A process has one object of each, which is made at the first use.
    """
    for each in () if job.in_kernel else part.parts().values():
        if each.rank_side and (each.devices is None or job.device in each.devices):
            yield _side(each.rank_side)


@functools.cache
def _side(reference: str) -> RankSide:
    side: RankSide = part.load(reference)()
    return side
