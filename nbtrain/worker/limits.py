"""Limits in a rank: how often a training is looked at, and how much of it is kept or sent."""

REPORT_INTERVAL_S = 0.5
"""Between two reports of counts or of a bar, readings of the loops, and losses of a GPU."""

MAX_LOSSES_KEPT = 1 << 16
"""Losses between two reports. Beyond, as when a process is stopped, the older half is dropped."""

MAX_SKIPPED_LOSSES = 10
"""Losses in a row that are not finite and that a loop, or a `GradScaler`, may skip."""

COMPARED_STEPS = 10
"""The comparison of ranks gets the batches and losses of the first steps, and after them as many
parameters from all over the model."""

CHECKSUM_BYTES = 1 << 16
"""The first bytes of a tensor, which its checksum is made of."""

SAME_ORDER_PASSES = 3
"""Passes in one order that are a fault. An epoch may go over its data twice."""

MEMORY_COUNT_INTERVAL_S = 10.0
"""Between two counts of tensors, which take 5 ms for a large model. A new optimizer is counted
sooner."""

MAX_PENDING_SCALARS = 1024
"""Scalars on their way from a GPU or TPU. With more of them, the rank waits for the oldest."""

MAX_DISPLAYS = 50
"""Displays of one task and rank that are sent, without those that update another."""

MAX_DISPLAY_BYTES = 900_000
"""Of one display, as JSON: readers break lines of a mebibyte. Of a larger one, the text is sent. A
larger value of a cell stays in the rank."""

MAX_ALL_DISPLAYS_BYTES = 16_000_000
"""Of all displays of rank 0, and of those of all other ranks together."""

THREAD_IDLE_LIMIT_S = 30.0
KERNEL_THREAD_IDLE_LIMIT_S = 1.0
"""How long threads that outlive the function may do nothing. In a rank that is the kernel, a cell
waits for them."""

BUSY_CPU_SHARE = 0.005
"""A process that uses less CPU time per second counts as idle."""
