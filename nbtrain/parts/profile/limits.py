"""Limits of profiles: how much is recorded, and what is worth advice."""

WARMUP_STEPS = 2
"""Steps before the recorded ones. The first steps compile, allocate, and start workers; and the
profiler itself is slower in its first step."""

DEFAULT_STEPS = 3
"""Steps that are recorded by default."""

MAX_STEPS = 10
"""Steps of a recording at most. Five steps of one large model took 4 GB."""

SAMPLE_INTERVAL_S = 0.001
"""Between two samples of the training thread's line."""

MAX_SAMPLES = 20_000
"""Samples of a recording at most."""

LEAST_SAVING = 0.2
"""Advice is given if it could save this share of a step. A healthy training of DDP on the CPU
spends up to 15 % in Python, and as much in its optimizer."""

SMALL_MESSAGE_BYTES = 1 << 20
"""Collectives of fewer bytes than this are slowed by their number more than by their size."""
