"""Limits of runs on a Ray cluster. Others are those of any run, in the rooms' own `limits`."""

FREE_CHECK_INTERVAL_S = 1
"""Between two checks of what is free, while nodes are waited for. Ray takes whole seconds."""

NODE_TIMEOUT_S = 20.0
"""For nodes to come back, or others to replace them, before another attempt, for free nodes to be
reserved, and for nbtrain's process on a node to start. Ray lists a lost node for a while."""
