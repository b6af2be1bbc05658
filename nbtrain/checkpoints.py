"""Where a training saves what a later attempt goes on from, and which save is whole.

A checkpoint is a folder that all ranks may write into. It counts once every rank has left it: a
rank that dies while it saves leaves one that is never taken for whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .folder import RunFolder

_NAME = re.compile(r"step-\d{8}")


def attempt() -> int:
    """Return the number of this attempt at the run: 1, or more after restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1


def checkpoint_dir() -> Path:
    """Return the run's folder for checkpoints, the same for all its ranks and attempts.

    It goes when the run's folder goes (the last 20 are kept). Outside a run: ``./checkpoints``.
    """
    folder = _dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _dir() -> Path:
    run = os.environ.get("NBTRAIN_RUN")
    return RunFolder(Path(run)).checkpoints if run else Path("checkpoints").absolute()


@contextlib.contextmanager
def checkpoint(step: int, keep: int | None = 2) -> Iterator[Path]:
    """Give a folder to save `step` into: ``with nbtrain.checkpoint(step) as path: ...``.

    Every rank enters, whether it writes (``accelerator.save_state(path)``) or not: the checkpoint
    is whole when all have left without an exception. Then rank 0 deletes older ones, but the
    newest `keep` (None: all stay).

    Raises:
        ValueError: `step` is negative, or `keep` is not positive.
    """
    if int(step) < 0 or (keep is not None and keep < 1):
        raise ValueError(f"checkpoint: step must be ≥ 0 and keep ≥ 1, not {step!r} and {keep!r}")
    rank = os.environ.get("RANK", "0")
    folder = checkpoint_dir() / f"step-{int(step):08d}"
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".done-{rank}"
    mine.unlink(missing_ok=True)  # of an earlier attempt at this step: from here on, it is not
    yield folder
    mine.write_text(_stamp())
    if keep is not None and rank == "0":
        newest = [found for found in _found() if _is_whole(found)][-keep:]
        for found in _found():
            if newest and found < newest[0]:
                shutil.rmtree(found, ignore_errors=True)


def last_checkpoint() -> Path | None:
    """Return the newest checkpoint that is whole; None where there is none.

    All ranks of an attempt see the same, as long as none of them has begun to save.
    """
    return next((found for found in reversed(_found()) if _is_whole(found)), None)


def _found() -> list[Path]:
    return sorted(path for path in _dir().glob("step-*") if _NAME.fullmatch(path.name))


def _stamp() -> str:
    """Tell what the parts of one checkpoint share: those of two attempts at a step are none."""
    return f"attempt {attempt()}, {_ranks()} ranks"


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def _is_whole(folder: Path) -> bool:
    try:
        stamps = {(folder / f".done-{rank}").read_text() for rank in range(_ranks())}
    except FileNotFoundError:
        return False
    return len(stamps) == 1 and stamps.pop().endswith(f", {_ranks()} ranks")
