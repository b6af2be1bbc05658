"""Limits of starting and ending the processes of ranks."""

MAX_SERVER_FAILURES = 2
"""After this number of failed fork servers, this process starts no other."""

SERVER_IDLE_LIMIT_S = 1800.0
"""A fork server without a launch for so long ends, and frees its memory."""

MAX_STORE_GROWTH_BYTES = 1 << 30
"""Address space that the store's process may use in addition to that of the fork."""

UNKILLABLE_AFTER_S = 15.0
"""A rank that outlives SIGKILL for so long is given up: a driver or a file system blocks it."""

DRIVER_KEPT_S = 300.0
"""The next run can use the processes of the last on other hosts for so long. By default, Ray's
autoscaler keeps an unused node for the same time."""
