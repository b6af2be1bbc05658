"""Limits of a run's life: how often it is checked, how long each side waits, what is kept."""

# Watching a run.

FOLDER_CHECK_INTERVAL_S = 0.5
"""Between two checks whether the run's folder exists, its disk has space, and its supervisor runs.
A check takes less than 0.1 ms on a local disk."""

RESERVED_BYTES = 1 << 16
"""Kept free on the disk for the launcher's events, and the same for each rank's. An event has a few
hundred bytes."""

# Starting and restarting.

START_TIMEOUT_S = 120.0
"""For ranks to start, on any host. They take 1 to 3 s, and longer on a cluster or a loaded host. A
rank that has not reported its start later may be unable to: on a full disk, its events are lost."""

RESTART_DELAY_S = 1.0
"""Before the second attempt; the delay before each further one is longer by as much."""

IMPORT_TIMEOUT_S = 3.0
"""An interrupt ends an import that takes longer. The longest module of torch takes 0.4 s."""

MAX_TEMPDIR_CHARS = 58
"""Paths of sockets are too long in a longer temporary folder. They have at most 107 bytes (103 on
macOS), and a run's folder with a socket of nbtrain or `multiprocessing` adds 45."""

# Stopping.

FAILURE_REPORT_TIMEOUT_S = 2.0
"""A rank that is failing has this time to report why; so have the others if all failures so far are
echoes (a rank that lost its peers)."""

# What is kept.

PRUNE_EVERY_TASKS = 8
"""Tasks of ranks that stay between two prunings. Listing the folders takes longer than a short
task."""
