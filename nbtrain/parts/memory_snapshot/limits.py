"""Limits of memory snapshots: how much is recorded, how often it is saved, and what is shown."""

MAX_ENTRIES = 50_000
"""Allocations and frees that a rank remembers, the last ones. 20,000 of another's training, with
C++ stacks, took 3 MB on disk."""

SAVE_INTERVAL_S = 10.0
"""Between two snapshots at least. A search for the largest batch runs out of memory many times."""

MAX_LINES = 3
"""Lines of code that a note names."""
