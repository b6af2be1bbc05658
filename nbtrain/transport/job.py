"""Defines `Job`: a run that is ready to start, with all decisions made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..planning.plan import Plan
from ..planning.world import Placement
from ..tracking.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One run, ready to start: the plan with every 'auto' resolved, and the folder for its reports.

    In a run on several nodes, a job has the ranks of one node, numbered from 0.
    """

    plan: Plan
    folder: RunFolder
    world_size: int
    device: str
    threads: int
    port: int = 0
    attempt: int = 1
    failure_before: str = ""
    """Why the attempt before this one failed, as in `FailureReport.kind`; "" in the first one."""
    scratch: str = ""
    """A folder for sockets of the ranks' own workers. The launcher deletes it."""
    world: Placement | None = None
    """Where the ranks are in a run on several nodes."""
    in_kernel: bool = False
    in_notebook: bool = False
    """Whether a notebook can show figures, unlike a script or a terminal."""
    unanswered: str = "the run is in the background, on other hosts, or headless"
    """Why the user cannot answer a debugger; "" if the user can."""
    ranks_stay: bool = False
    """Whether the rank's process keeps running after the task, with its variables and groups."""
    folder_is_temporary: bool = False
    """Whether `folder` is deleted at the end of the task, though the rank's process stays."""
    checkpoint_refusal: str = ""
    """Why `nbtrain.checkpoint` cannot save in the run's folder; "" if it can."""
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a fork does not copy: the names of the notebook's ``threads``, and the packages of those
    that ``libraries`` started."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks, where neither the plan nor the host sets them."""
    rank_sides: tuple[str, ...] = ()
    """What parts do in the ranks: references to subclasses of `RankSide`. Empty in the kernel."""
    shared_classes: frozenset[type] = field(default_factory=frozenset)
