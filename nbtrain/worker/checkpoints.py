"""Gives a training folders for its checkpoints, and finds the last complete one.

A checkpoint is a folder that all ranks may write into. It is complete when every rank has left the
block, so the checkpoint of a rank that dies while it saves is never used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import NbtrainError
from ..tracking.run_folder import RunFolder
from . import rank_context

_NAME = re.compile(r"step-\d{8}")
_STAMP = re.compile(r"attempt \d+, (\d+) ranks")


def attempt() -> int:
    """Return the number of this attempt at the run: 1, or more after restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1


def checkpoint_dir() -> Path:
    """Return the run's folder for checkpoints, the same for all its ranks and attempts.

    Creates the folder if it is missing. It is deleted with the run's folder; nbtrain keeps the last
    20. Outside a run, it is ``./checkpoints``.

    Raises `NbtrainError` if not all nodes of the run see the folder.
    """
    context = rank_context.current()
    if context is not None and context.checkpoint_refusal:
        raise NbtrainError(context.checkpoint_refusal)
    folder = _dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _dir() -> Path:
    run = os.environ.get("NBTRAIN_RUN")
    return RunFolder(Path(run)).checkpoints if run else Path("checkpoints").absolute()


@contextlib.contextmanager
def checkpoint(step: int, keep: int | None = 2) -> Iterator[Path]:
    """Give all ranks a folder to save a checkpoint into.

    Example::

        with nbtrain.checkpoint(step) as path:
            accelerator.save_state(path)

    Every rank must enter the block, also one that writes nothing. The checkpoint is complete when
    all ranks have left the block without an exception. An earlier checkpoint of the same step keeps
    its files, and is incomplete until then.

    Args:
        step: the number of the step, which names the folder.
        keep: how many complete checkpoints to keep: rank 0 deletes older ones, and incomplete ones
            among these. None: all.

    Raises:
        ValueError: `step` is negative, or `keep` is not positive.
        NbtrainError: the ranks are on nodes that do not all see the run's folder.
    """
    if int(step) < 0 or (keep is not None and keep < 1):
        raise ValueError(f"checkpoint: step must be ≥ 0 and keep ≥ 1, not {step!r} and {keep!r}")
    folder = checkpoint_dir() / f"step-{int(step):08d}"
    begin(folder)
    yield folder
    mark_done(folder)
    if os.environ.get("RANK", "0") == "0":
        prune(_dir(), keep)


def begin(folder: Path) -> None:
    """Make the folder of a checkpoint, which is incomplete until each rank calls `mark_done`."""
    folder.mkdir(parents=True, exist_ok=True)
    _mark(folder).unlink(missing_ok=True)  # of an earlier attempt


def mark_done(folder: Path) -> None:
    """Mark that this rank has saved all of its part of a checkpoint."""
    # The same for all ranks of an attempt, and different in another attempt.
    stamp = f"attempt {attempt()}, {int(os.environ.get('WORLD_SIZE') or 1)} ranks"
    _mark(folder).write_text(stamp)


def _mark(folder: Path) -> Path:
    return folder / f".done-{os.environ.get('RANK', '0')}"


def last_checkpoint() -> Path | None:
    """Return the folder of the newest complete checkpoint, or None.

    Before the run has one, it is the checkpoint of ``start_from``, which may be a file. All ranks
    of an attempt must call this, and get the same one before any of them saves again. After a
    restart on fewer nodes, a larger number of ranks may have saved it.
    """
    own = next(iter(complete_checkpoints(_dir())[-1:]), None)
    context = rank_context.current()
    start = context.job.plan.start_from if context is not None else None
    if context is None or start is None:
        return own
    context.start_is_read = True  # also after a restart, when the run has its own
    return own or Path(start)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return list(filter(is_complete, checkpoints_in(folder)))


def newest_incomplete(folder: Path) -> str:
    """Return the name of the newest checkpoint if rank 0 has left it and other ranks have not.

    "" otherwise, also without a checkpoint.
    """
    newest = next(iter(checkpoints_in(folder)[-1:]), None)
    is_saved = newest is not None and (newest / ".done-0").exists() and not is_complete(newest)
    return newest.name if newest is not None and is_saved else ""


def prune(folder: Path, keep: int | None) -> None:
    """Delete the checkpoints, also incomplete ones, older than the newest `keep` complete ones.

    Nothing is deleted if `keep` is None or no checkpoint is complete. Errors are ignored.
    """
    newest = complete_checkpoints(folder)[-keep:] if keep is not None else []
    for path in checkpoints_in(folder) if newest else ():
        if path < newest[0]:
            shutil.rmtree(path, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Return whether all ranks of one attempt have left the checkpoint."""
    try:
        stamp = (folder / ".done-0").read_text()
        match = _STAMP.fullmatch(stamp)
        others = range(1, int(match[1])) if match else ()
        return bool(match) and all((folder / f".done-{r}").read_text() == stamp for r in others)
    except (FileNotFoundError, NotADirectoryError):
        return False
