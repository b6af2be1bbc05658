"""Ranks on the nodes of the Slurm job that the notebook is in, or of one of their own."""

from ...part_api import Part

PART = Part(
    engines={"slurm": "slurm.engine:SlurmEngine"},
    default_engine="slurm.allocation:default_engine",
    launch_side="slurm.launch_side:SlurmLaunch",
    provides={"scheduler": "slurm.submit.queue:scheduler"},
)
