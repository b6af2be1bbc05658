"""A run's numbers as TensorBoard's event files, written by PyTorch's own writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import MissingExtra
from .history import Row, is_number, names


def write(rows: Sequence[Row], folder: Path) -> Path:
    """Write every number into ``folder/rank-N``, at its step and its time; return `folder`.

    A row without a step is written at how many numbers of its name its rank had said before.

    Raises `MissingExtra` where tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra(
            'run.to_tensorboard() needs tensorboard: pip install "nbtrain[tensorboard]"'
        ) from error
    for rank in sorted({row["rank"] for row in rows}):
        own = [row for row in rows if row["rank"] == rank]
        with SummaryWriter(str(folder / f"rank-{rank}")) as writer:
            for name in names(own):
                said = [row for row in own if is_number(row.get(name))]
                for count, row in enumerate(said):
                    step = count if row["step"] is None else row["step"]
                    writer.add_scalar(name, row[name], step, walltime=row["time"])
    return folder
