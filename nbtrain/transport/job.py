"""`Job`: a run that is ready to start, with all decisions made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..planning.plan import Plan
from ..planning.world import Placement
from ..tracking.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One run, ready to start: the plan with every 'auto' resolved, and where it reports.

    `scratch` is a folder for sockets of the ranks' own workers; the launcher deletes it. Of a run
    on several nodes these are one's ranks, numbered from 0: `world` says where they are in it.
    """

    plan: Plan
    folder: RunFolder
    world_size: int
    device: str
    threads: int
    port: int = 0
    attempt: int = 1
    scratch: str = ""
    world: Placement | None = None
    in_kernel: bool = False
    in_notebook: bool = False
    """Whether a notebook is there to show figures, rather than a script or a terminal."""
    unanswered: str = "the run is in the background, on other hosts, or headless"
    """Why no user can answer a debugger; "" if one can."""
    is_live: bool = False
    """Whether the rank's process goes on after the task, with its variables and its groups."""
    is_mirrored: bool = False
    """Whether `folder` is copied to the notebook's host as it grows, and deleted then."""
    keeps_checkpoints: bool = True
    """Whether all ranks see the run's folder, where `nbtrain.checkpoint` saves."""
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a forked rank has none of: the notebook's ``threads``, by their names, and those of
    ``libraries``, their packages."""
    shared_classes: frozenset[type] = field(default_factory=frozenset)
