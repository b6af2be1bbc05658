"""What is in the folder of a checkpoint that ``run.keep`` has saved.

The folder has what ``Accelerator.save_state`` saves; or the weights of models, as in a `RunFolder`,
and the states of optimizers; or one of these:
"""

from __future__ import annotations

from pathlib import Path

from ...part_api import RunFolder

LIGHTNING = "lightning.ckpt"
"""What the Trainer of Lightning saves."""
TRANSFORMERS = "checkpoint-*"
"""What the Trainer of transformers saves."""


def folder_of(run: RunFolder, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run.kept / f"step-{step:08d}"


def optimizer_file(folder: Path, number: int) -> Path:
    """Return the file with the state of an optimizer, which are numbered by their first steps."""
    return folder / f"optimizer-{number}.pt"


def failure_file(folder: Path, attempt: int) -> Path:
    """Return the file that has, for people, why an attempt has not saved a checkpoint."""
    return folder.with_suffix(f".failed-{attempt}")


def content_of(folder: Path) -> Path:
    """Return the part of a complete checkpoint that a run loads."""
    if (folder / LIGHTNING).exists():
        return folder / LIGHTNING
    return next(folder.rglob(TRANSFORMERS), folder)
