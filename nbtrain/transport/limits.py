"""Limits of what travels between processes: sizes and times, and what each was measured on."""

CONNECT_TIMEOUT_S = 10.0
"""How long a process of this run may take to answer: a rank on another host to reach the notebook
(TCP repeats a lost request after 1, 3 and 7 s), the fork server to fork the ranks (on a very busy
machine it took 1 s), a rank to publish its address, and those of a background run to start before
their cell ends."""

CHUNK_BYTES = 8 << 20
"""How much is read at once of a message's data, and how much of all growing files is copied to
another host at once. Nothing larger is read of a sender that is not trusted yet, or sent of an
exception's instance or one of its attributes."""

MAX_EXCEPTION_CHAIN = 20
"""Causes of an exception that are copied, and members of a group."""

MAX_TEXT_CHARS = 100_000
"""Of a longer message or note of an exception, the rest is not copied, and a longer source is not
read before a launch. Ordinary code of this length takes 0.3 s."""

RESCUE_MAX_BYTES = 1 << 30
"""What is done unasked, is done with data up to this size: saving weights after a failure or an
interrupt, when there is little time; copying an optimizer back without `--out`, as most serve one
run only; and unpickling a result in the rank, to find out whether the notebook can."""
