"""A debugger in a rank, with its prompt in the notebook."""

from ...part_api import Part

PART = Part(
    launch_side="debugger.conversation:DebuggerLaunch",
    rank_side="debugger.hooks:DebuggerRank",
    provides={"debug_failure": "debugger.hooks:debug_failure"},
)
