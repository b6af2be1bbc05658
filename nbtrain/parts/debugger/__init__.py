"""A debugger in a rank, with its prompt in the notebook."""

from ...part import Part

PART = Part(
    launch_side="debugger.conversation:DebuggerLaunch",
    rank_side="debugger.hooks:DebuggerRank",
    provides={"look_again": "debugger.hooks:look_again"},
)
