"""Limits of the checks: what is compared, reported, estimated and read, with the reasons."""

MIN_COMPARED_LOSSES = 4
"""Fewer equal losses may be a coincidence."""

MIN_REPORTED_GPU_SHARE = 0.1
"""A launch warns if a larger share of a GPU's memory is in use. A desktop uses less."""

SHM_BYTES_PER_LOADER_WORKER = 32 << 20
"""About two prefetched batches of images."""

LAUNCH_FILES_COUNT = 16
RANK_FILES_COUNT = 2
"""Files that a launch opens. Measured at 1 to 16 ranks: 7, and two for each rank (its pidfd and its
connection to the store). A rank begins with the kernel's open files and adds about 13 for gloo,
then one for each peer; 16 covers both."""
