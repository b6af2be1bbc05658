"""Writes a cell, and what it needs of the notebook, as a script for ``torchrun``."""

from ...part_api import Command, Part

PART = Part(
    shell_commands={
        "export": Command(
            "export.export:shell_command",
            "write a notebook's %%%%distributed cell as a script, without running anything",
            arguments="export.export:add_arguments",
        )
    },
    launch_side="export.launch_side:ExportLaunch",
)
