"""Limits of starting and ending the processes of ranks."""

FORK_TIMEOUT_S = 15.0
"""For the fork server to fork all ranks. On a very busy machine it took 1 s."""

MAX_SERVER_FAILURES = 2
"""After this number of failed fork servers, this process starts no other."""

SERVER_IDLE_LIMIT_S = 1800.0
"""A fork server without a launch for so long ends, and frees its memory."""

MAX_STORE_GROWTH_BYTES = 1 << 30
"""Address space that the store's process may use in addition to that of the fork."""

CLOSE_TIMEOUT_S = 1.0
"""For killed ranks, and for a resource tracker, to end."""
