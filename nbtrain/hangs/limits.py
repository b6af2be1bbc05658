"""Limits of hang detection: how long ranks may be silent, and how long they have to answer."""

DEADLOCK_CHECK_AFTER_S = 4.0
"""Without progress of any rank for so long, the flight recorders are read, which costs the ranks
nothing. The time doubles after each check without a deadlock, until a quarter of
`IDLE_NOTE_AFTER_S` lies between two checks."""

DEADLOCK_CONFIRM_S = 2.0
"""Between the two readings that must show the same deadlock: the run is ended for it."""

IDLE_NOTE_AFTER_S = 60.0
"""Ranks that have all been silent for so long, and idle for half of it, are reported before they
count as hung. Idle is a rank without CPU time, files and GPU use."""

IDLE_CPU_CORES = 0.05
"""A rank that uses less, its child processes included, is idle."""

MAX_IDLE_IO_BYTES = 1 << 20
"""An idle rank reads and writes at most this between two checks."""

SURVEY_INTERVAL_S = 1.0
"""Between two surveys of silent ranks (their stacks and recorders), at least. A rank that has been
in a collective for less may be passing through. Its signal may interrupt a system call, and code
may print about that for twice as long."""

REPLY_TIMEOUT_S = 0.5
"""For the stacks of all ranks, most of which write them within 1 ms, and for their recorders. A
rank whose Python has not answered in half of this time gets the signal that is answered without
Python."""

REMOTE_REPLY_TIMEOUT_S = 3.0
"""For stacks of ranks on other hosts, and in surveys that may end a run on a busy host."""

MIN_USER_GROUP_TIMEOUT_S = 300.0
"""A process group with a shorter timeout ends a wait with an error that the code may expect, so a
wait in it is no deadlock."""

MAX_NAMED = 4
"""Places, threads or ranks that a sentence names; the others are counted."""

RECORDER_THREADS = 13
"""Threads that torch's recorder server and a gloo group need, beside one for each core."""

FULL_DISK_BYTES = 1 << 20
"""A file system with less free space counts as full, where the error does not name it."""
