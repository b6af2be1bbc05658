"""The life of a run: start, watch, restart, detach, reopen, list."""
