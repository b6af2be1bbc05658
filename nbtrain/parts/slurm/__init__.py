"""Ranks on the nodes of a Slurm allocation that the notebook is in."""

from ...part_api import Part

PART = Part(
    engines={"slurm": "slurm.engine:SlurmEngine"},
    default_engine="slurm.allocation:default_engine",
    launch_side="slurm.launch_side:SlurmLaunch",
)
