"""Finds the checkpoint that a new run starts from."""

from __future__ import annotations

from pathlib import Path

from ...part_api import PlanError, RunFolder, find_run
from ...worker.checkpoints import complete_checkpoints, is_complete
from .kept import content_of


def find_start(start: str) -> str:
    """Return the path of the checkpoint to start from: a path, or the newest one of a run.

    A run is found by its folder, its number, or the start of its name. Its checkpoints of
    ``run.keep`` come before those of `nbtrain.checkpoint`. Raises `PlanError` if there is neither,
    and `NbtrainError` if another user could have written the run.
    """
    path = Path(start).expanduser()
    if path.exists() and not RunFolder(path).manifest.exists():
        return str(path.absolute())
    run = RunFolder(path.absolute() if path.exists() else find_run(start).folder)
    run.check_trust()
    found = sorted(filter(is_complete, run.kept.glob("step-*")))
    found = list(map(content_of, found)) or complete_checkpoints(run.checkpoints)
    if not found:
        raise PlanError(
            f"{run.path.name} has no checkpoint to start from. Save one while a run trains, by "
            "run.keep() or nbtrain.checkpoint"
        )
    return str(found[-1])
