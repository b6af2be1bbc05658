"""Limits of what is recorded: what a run's state keeps, how often it is read, which runs stay."""

# What the state of a run keeps. The files have everything.

MAX_LOG_LINES = 200
"""Last lines of each rank's log."""

MAX_METRICS = 32
"""Metrics whose curve and, for each rank, last value are kept, the first that are logged."""

MAX_BINS = 256
"""Bins of a curve and of a rank's timeline. With more of them, two become one. Losses are reported
as finely as a curve with that number of bins needs them. The next run of the same name shows a
quarter of the curve's points."""

MAX_LOSSES_IN_BIN = 1 << 40
"""More is a mistake of a file, and would be no float."""

MAX_ITEMS = 1000
"""Epochs of a rank, values that it saved for the notebook, and cells that stacks can name, the last
of each; metrics without a curve that are counted; and events in memory when a run is reopened."""

MAX_EVENTS_KEPT = 32
"""Restarts of a run, phases of a rank before its first step, its progress bars, and its collectives
before a failure, the last of each. A loop that never closes its bars makes ever more."""

MAX_SINGLE_RANKS = 16
"""The flight recorders (each sends up to 1 MiB) and the last metrics of this number of ranks are
read. With more ranks, only those that differ from the others have a row or a line. It is also the
most nodes, results and logs of single ranks that have a line, the most different logs that are
merged (the time for it grows with their number squared), and the most worker processes of a rank's
DataLoader whose stacks are read."""

MAX_NOTE_CHARS = 1000
MAX_NAME_CHARS = 80
"""Longer notes and names are cut. A longer text is data, and no parameter of a function."""

TIMELINE_BIN_S = 0.2
"""The first width of a timeline's bins. A rate needs an interval as long, and a shorter compilation
is not reported."""

MIN_SHOWN_SHARE = 0.05
"""Waiting for data that takes a smaller share of a timeline's bin counts as training, and a smaller
difference in progress or pace as chance: ranks report at different moments."""

MAX_EPOCH_COLUMNS = 8
"""Metrics that have a column in the table of epochs."""

# Rates, and what is concluded from them.

RATE_WINDOW_S = 5.0
"""Rates and the share of waiting are averaged over this time, and a time left needs as much."""

MIN_COMPARED_S = 15.0
"""Training before a rank may be called slow. A wrong "slow" does more harm than a missing one."""

SLOW_SHARE = 0.3
"""A rank is slow if its rate is lower than the others' by this share, or if it waits for data for
this share of its time more than the others."""

# Reading and writing files.

READ_TIMEOUT_S = 0.2
"""Reading the files of running ranks takes no longer. An interrupt waits as long, at most."""

POLL_INTERVAL_S = 0.1
"""Between two reads of a run's folder, twice as long on a crowded host, and between two checks of a
writer whether its file was deleted. A rank that ends wakes the launcher at once. A fifth of it
while a user types to a debugger in a rank, who feels a longer delay, and less during a request to
steer the run."""

MAX_RANKS = 1 << 16
"""A manifest with more ranks is damaged."""

# Measuring ranks, host and GPUs.

RANK_SAMPLE_INTERVAL_S = 0.5
HOST_SAMPLE_INTERVAL_S = 2.0
"""Between two samples, at least: of one rank after another, and of the host with its GPUs."""

SAMPLING_SHARE = 0.005
"""After the first round, sampling ranks takes this share of the launcher's time: a sample of a rank
takes 10 ms, and 90 ms with 4 GB in use."""

UNRESPONSIVE_AFTER_S = 5.0
"""A driver that does not answer for so long is not called again; ranks that stay and ignore
an interrupt, and nodes that do not answer, are reported."""

RELEASE_TIMEOUT_S = 1.0
"""Killed ranks are gone within this time, and drivers and Ray count what they used as free."""

GPU_MEMORY_NOISE_BYTES = 64 << 20
"""A GPU's memory changes by this much without a run."""

# Which runs stay.

MAX_RUNS = 20
"""Runs that are kept, and the same number of scaling measurements, which make dozens each."""

MAX_RUNS_WITH_WEIGHTS = 3
"""Kept runs with weights, and the same number of runs whose weights were never loaded."""

HOST_LOST_AFTER_S = 90
"""A host that answers nothing for this time is lost, and its run counts as ended after this time
without a change. Ray gives a node up after 60 s, and a link that is cut for half a minute recovers.
A kernel that is suspended, or busy in C, also reads nothing."""

REMOTE_RUN_KEPT_S = 86400.0
"""A run of another host is not deleted before: its process cannot be checked, and its clock may
differ."""
