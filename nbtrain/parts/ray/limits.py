"""Limits of runs on a Ray cluster. Others are those of any run: `lifecycle.limits`."""

FREE_CHECK_INTERVAL_S = 1
"""Between two checks of what is free, while nodes are waited for. Ray takes whole seconds."""

NODE_RETURN_TIMEOUT_S = 10.0
"""For nodes to come back, or others to replace them, before another attempt."""

DRIVER_KEPT_S = 300.0
"""The next run can use the processes of the last for so long. By default, Ray's autoscaler keeps
an unused node for the same time."""
