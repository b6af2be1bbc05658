"""Finds the checkpoint that a new run starts from."""

from __future__ import annotations

from pathlib import Path

from ...part_api import PlanError, RunFolder, find_run
from ...worker.checkpoints import complete_checkpoints, is_complete
from .kept import content_of


def find_start(start: str) -> str:
    """Return the path of the checkpoint to start from: a path, or the newest one of a run.

    A run is found by its folder, its number, or the start of its name; its checkpoints are those of
    ``run.keep`` and of `nbtrain.checkpoint`. Raises `PlanError` if there is neither, and
    `NbtrainError` if another user could have written the run.
    """
    if not start:
        raise PlanError("start_from must be a run or the path of a checkpoint, not an empty text")
    path = Path(start).expanduser()
    try:
        is_there = path.exists()
    except OSError:  # it is too long
        is_there = False
    if is_there and is_complete(path):
        return str(content_of(path.absolute()))
    if is_there and not RunFolder(path).manifest.exists():
        return str(path.absolute())
    run = RunFolder(path.absolute() if is_there else find_run(start).folder)
    run.check_trust()
    found = [*complete_checkpoints(run.checkpoints), *complete_checkpoints(run.kept)]
    if not found:
        raise PlanError(
            f"{run.path.name} has no checkpoint to start from. Save one while a run trains, by "
            "run.keep() or nbtrain.checkpoint"
        )
    newest = max(found, key=lambda folder: (folder / ".done-0").stat().st_mtime_ns)
    return str(content_of(newest))
