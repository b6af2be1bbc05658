"""Limits of what is recorded: what a run's state keeps, how often it is read, which runs stay."""

# What the state of a run keeps. The files have everything.

MAX_LOG_LINES = 200
"""Last lines of each rank's log."""

MAX_METRICS = 32
"""Metrics whose curve and, for each rank, last value are kept, the first that are logged."""

MAX_BINS = 256
"""Bins of a curve and of a rank's timeline. With more of them, two become one. The next run of the
same name shows a quarter as many points of the curve."""

MAX_ITEMS = 1000
"""Epochs of a rank, values that it saved for the notebook, and cells that stacks can name, the last
of each; metrics without a curve that are counted; and events in memory when a run is reopened."""

MAX_EVENTS_KEPT = 16
"""Restarts of a run, phases of a rank before its first step, and its progress bars, the last of
each. A loop that never closes its bars makes ever more."""

MAX_NOTE_CHARS = 1000
MAX_NAME_CHARS = 80

TIMELINE_BIN_S = 0.2
"""The first width of a timeline's bins. A rate needs an interval as long."""

MIN_WAIT_SHARE = 0.05
"""A bin of a timeline with a smaller share of waiting for data counts as training."""

MAX_EPOCH_COLUMNS = 8
"""Metrics that have a column in the table of epochs."""

# Rates, and what is concluded from them.

RATE_WINDOW_S = 5.0
"""Rates and the share of waiting are averaged over this time."""

MIN_ESTIMATE_S = 3.0
"""A time left needs this much training."""

MIN_COMPARED_S = 15.0
"""Training before a rank may be called slow. A wrong "slow" does more harm than a missing one."""

SLOW_RATE_SHARE = 0.7
"""A rank is slow if its rate is below this share of the others' rate."""

MIN_EXTRA_WAIT_SHARE = 0.2
"""Or if it waits for data for this share of its time more than the others."""

# Reading and writing files.

READ_TIMEOUT_S = 0.2
"""Reading the files of running ranks takes no longer. An interrupt waits as long, at most."""

DELETED_CHECK_INTERVAL_S = 0.1
"""Between two checks of a writer whether its file was deleted."""

MAX_TAIL_BYTES = 1 << 20
"""Read of a log in one call: the end of what is new, or of the log when a run is reopened."""

MAX_RANKS = 1 << 16
"""A manifest with more ranks is damaged."""

# Measuring ranks, host and GPUs.

RANK_SAMPLE_INTERVAL_S = 0.5
HOST_SAMPLE_INTERVAL_S = 2.0
"""Between two samples, at least: of one rank after another, and of the host with its GPUs."""

SAMPLING_SHARE = 0.005
"""After the first round, sampling ranks takes this share of the launcher's time: a sample of a rank
takes 10 ms, and 90 ms with 4 GB in use."""

DRIVER_TIMEOUT_S = 5.0
"""A driver may take so long to answer."""

RELEASE_TIMEOUT_S = 1.0
"""Killed ranks are gone within this time, and drivers and Ray count what they used as free."""

GPU_MEMORY_NOISE_BYTES = 64 << 20
"""A GPU's memory changes by this much without a run."""

# Which runs stay.

MAX_RUNS = 20
"""Runs that are kept, and the same number of scaling measurements, which make dozens each."""

MAX_RUNS_WITH_WEIGHTS = 3
"""Kept runs with weights, and the same number of runs whose weights were never loaded."""

REMOTE_RUN_SILENCE_S = 60.0
"""A run of another host counts as ended after so long without a change."""

REMOTE_RUN_KEPT_S = 86400.0
"""It is not deleted before: its process cannot be checked, and its clock may differ."""
