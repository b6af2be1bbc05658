"""Saves what holds a GPU's memory when it runs out, and names the lines that made it."""

from ...part_api import Part

PART = Part(
    launch_side="memory_snapshot.launch_side:SnapshotLaunch",
    rank_side="memory_snapshot.rank_side:SnapshotRank",
)
