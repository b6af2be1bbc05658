"""The files of a recording, in the folder of its run, and the request for one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...part_api import Plan, PlanError, RunFolder
from . import limits


@dataclass(frozen=True)
class Request:
    """Which steps are recorded, and how. Its values fit into JSON."""

    steps: int = limits.DEFAULT_STEPS
    start: int = limits.WARMUP_STEPS
    """At a launch: how many steps come before the recorded ones, at least 1."""
    shapes: bool = False
    """Whether the sizes of tensors are recorded."""
    stacks: bool = False
    """Whether all Python calls are recorded, which slows Python down."""
    memory: bool = False
    """Whether it is recorded what operations allocate."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= limits.MAX_STEPS:
            most = f"a number of steps from 1 to {limits.MAX_STEPS}"
            raise PlanError(f"a profile must have {most}, not {self.steps!r}")
        if type(self.start) is not int or self.start < 1:
            raise PlanError(f"the steps before a profile must be at least 1, not {self.start!r}")

    @classmethod
    def read_plan(cls, plan: Plan) -> Request | None:
        """Return the request of a launch, if it has one."""
        if plan.profile is None:
            return None
        start, steps = plan.profile
        return cls(steps, start)


def read_steps(profile: object) -> tuple[int, int] | None:
    """Return the steps before a profile and those in it. Raises `PlanError`.

    `profile` is ``START:COUNT``, such a pair, a number of steps, True for the default, or nothing.
    """
    if profile is None or profile is False:
        return None
    start, steps = limits.WARMUP_STEPS, limits.DEFAULT_STEPS
    if isinstance(profile, str) and re.fullmatch(r"\d{1,15}:\d{1,15}", profile):
        start, steps = map(int, profile.split(":"))
    elif isinstance(profile, (tuple, list)) and len(profile) == 2:
        start, steps = profile
    elif type(profile) is int:
        steps = profile
    elif isinstance(profile, str) and re.fullmatch(r"\d{1,15}", profile):
        steps = int(profile)
    elif profile is not True:
        raise PlanError(
            "profile must be START:COUNT, such as 100:3 for the 3 steps after step 100, not "
            f"{profile!r:.60}"
        )
    request = Request(steps, start)
    return request.start, request.steps


def folder_of(run: RunFolder, attempt: int, first_step: int) -> Path:
    """Return the folder of a recording that begins with a step of an attempt."""
    of_attempt = f".attempt-{attempt}" if attempt > 1 else ""
    return run.profiles / f"step-{first_step:08d}{of_attempt}"


def summary_file(folder: Path, rank: int) -> Path:
    """Return the file with the `RankProfile` of a rank."""
    return folder / f"rank-{rank:04d}.summary.json"


def trace_file(folder: Path, rank: int) -> Path:
    """Return the file with the trace of a rank."""
    return folder / f"rank-{rank:04d}.trace.json.gz"


def failure_file(folder: Path, rank: int) -> Path:
    """Return the file with the reason, for people, why a rank has recorded nothing."""
    return folder / f"rank-{rank:04d}.failed"


def recordings(run: RunFolder) -> Iterator[Path]:
    """Yield the folders of a run's recordings, in the order of their steps."""
    yield from sorted(run.profiles.glob("step-*"))
