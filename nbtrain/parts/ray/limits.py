"""Limits of runs on a Ray cluster. Others are those of any run: `lifecycle.limits`."""

POLL_S = 0.02
"""Between two checks for signals and for new output on a node, or for released resources here."""

COPY_INTERVAL_S = 0.2
"""Between two batches of output that are copied from a node, and two tries to write one."""

FREE_CHECK_INTERVAL_S = 1
"""Between two checks of what is free, while nodes are waited for. Ray takes whole seconds."""

RELEASE_TIMEOUT_S = 2.0
"""For Ray to report released resources as free. Nodes report every 0.1 s."""

NODE_RETURN_TIMEOUT_S = 10.0
"""For nodes to come back, or others to replace them, before another attempt."""

DRIVER_KEPT_S = 300.0
"""The next run can use the processes of the last for so long. By default, Ray's autoscaler keeps
an unused node for the same time."""
