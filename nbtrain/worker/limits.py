"""Limits in a rank: how often a training is looked at, and how much of it is kept or sent."""

REPORT_INTERVAL_S = 0.5
"""Between two reports of counts, readings of the loops around a step, and losses of a GPU."""

STANDSTILL_REPORT_AFTER_S = 1.0
"""Without a step or a batch for so long, the last counts are reported: the rank may hang."""

NEW_PASS_LOOK_INTERVAL_S = 0.02
"""Between two readings of the loops if a new pass over the data has begun."""

BAR_REPORT_INTERVAL_S = 0.1
"""Between two reports of a progress bar. Its end is always reported."""

MAX_FRAMES = 60
"""Frames around a step that are searched for loops."""

MAX_FIRST_LOSSES = 256
"""Steps from the start whose losses are all reported, so that a short training has a curve."""

MAX_SKIPPED_LOSSES = 10
"""Losses in a row that are not finite and that a loop, or a `GradScaler`, may skip."""

ENDLESS_PASS_BATCHES = 1_000_000_000
"""A longer pass does not end with its length, so the length is not shown."""

COMPARED_STEPS = 10
COMPARED_BATCHES = 8
COMPARED_PARAMETERS = 8
"""What the ranks' comparison gets: the first batches and losses, after these steps, and parameters
from all over the model."""

CHECKSUM_BYTES = 1 << 16
"""The first bytes of a tensor, which its checksum is made of."""

SAME_ORDER_PASSES = 3
"""Passes in one order that are a fault. An epoch may go over its data twice."""

MEMORY_COUNT_INTERVAL_S = 10.0
NEW_OPTIMIZER_COUNT_INTERVAL_S = 1.0
MAX_MEMORY_COUNT_SHARE = 0.001
"""Between two counts of tensors, at least, and with an optimizer that is new. The share is of the
rank's time: a large model takes milliseconds to count."""

MAX_PENDING_SCALARS = 1024
"""Scalars on their way from a GPU. With more of them, the rank waits for the oldest."""

MAX_DISPLAY_BYTES = 900_000
"""Of one display, as JSON: readers break lines of a mebibyte. Of a larger one, the text is sent."""

MAX_DISPLAYS = 50
"""Displays of one task and rank that are sent, without those that update another."""

MAX_ALL_DISPLAYS_BYTES = 16_000_000
"""Of all displays of rank 0, and of those of all other ranks together."""

MAX_CELL_VALUE_BYTES = 1 << 20
"""The value of a cell's last expression is sent beside its display up to this size."""

MAX_LOGGED_HTML_CHARS = 4000
"""Characters of the text of HTML in the log."""

MAX_NAMED_PARAMETERS = 8
"""Parameters without a gradient that are named. The others are counted."""

FULL_DISK_BYTES = 1 << 20
"""A file system with less free space counts as full, where the error does not name it."""

MAX_LAST_COLLECTIVES = 32
"""Collectives that a failed rank reports. Ranks differ in the last few."""

RECORDER_TIMEOUT_S = 1.0
"""A full recorder (2,000 entries) answers in 60 to 90 ms."""

THREAD_IDLE_LIMIT_S = 30.0
KERNEL_THREAD_IDLE_LIMIT_S = 1.0
THREAD_TOTAL_LIMIT_S = 600.0
"""How long threads that outlive the function may do nothing, and how long they may last in all. In
a rank that is the kernel, a cell waits for them."""

BUSY_CPU_SHARE = 0.005
"""A process that uses less CPU time per second counts as idle."""
