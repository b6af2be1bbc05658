"""What is in the folder of a checkpoint that ``run.keep`` has saved."""

from __future__ import annotations

from pathlib import Path

from ...part_api import RunFolder

ACCELERATOR = "accelerator"
"""What ``Accelerator.save_state`` saves."""
LIGHTNING = "lightning.ckpt"
"""What the Trainer of Lightning saves."""
MODELS = "models"
"""Of a loop that has neither: a folder as `RunFolder`, with weights and `optimizer_file`."""
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
    for name in (ACCELERATOR, LIGHTNING, MODELS):
        if (folder / name).exists():
            return folder / name
    return next(folder.rglob(TRANSFORMERS), folder)
