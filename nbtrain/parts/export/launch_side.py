"""Writes the script that ``--save`` asks for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

from ...part_api import Cell, LaunchSide, Option


class ExportLaunch(LaunchSide):
    """Writes the script before the cell runs."""

    cell_options = (
        Option(
            "--save",
            "write this cell and the cells before it to a script, then run the cell; the script "
            "works with python, torchrun and accelerate launch",
            field="save",
            metavar="FILE.py",
        ),
    )

    def before_cell(
        self,
        cell: Cell,
        raw: str,
        history: Sequence[str],
        failures: Mapping[int, int],
        options: Namespace,
    ) -> None:
        """Save the cell as a script, with ``--save``, and print where.

        Raises `PlanError` if the cell cannot become a script, or a file that nbtrain did not write
        is in the way.
        """
        if options.save is not None:
            from .export import save

            print(f"nbtrain: {save(cell, raw, history, failures, options)}")
