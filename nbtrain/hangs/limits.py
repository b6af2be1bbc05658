"""Limits of hang detection: how long ranks may be silent, and how long they have to answer."""

DEADLOCK_CHECK_AFTER_S = 4.0
"""Without progress of any rank for so long, the flight recorders are read, which costs the ranks
nothing. The time doubles after each check without a deadlock, by at most `IDLE_NOTE_AFTER_S` / 6.
"""

DEADLOCK_CONFIRM_S = 2.0
"""Between the two readings that must show the same deadlock: the run is ended for it."""

IDLE_NOTE_AFTER_S = 60.0
"""Ranks that have all been idle for so long are reported before they count as hung."""

IDLE_WINDOW_S = 30.0
"""Ranks count as idle after so long without CPU time, files and GPU use."""

IDLE_CPU_CORES = 0.05
"""A rank that uses less, its child processes included, is idle."""

MAX_IDLE_IO_BYTES = 1 << 20
"""An idle rank reads and writes at most this between two checks."""

MAX_PROCESS_GENERATIONS = 20
"""Parents that are followed from a child process up to its rank."""

COMPILE_CHECK_INTERVAL_S = 10.0
"""Between two checks whether a compiling rank uses the CPU, at most."""

SURVEY_INTERVAL_S = 1.0
"""Between two surveys of silent ranks (their stacks and recorders), at least."""

SURVEY_ECHO_S = 2.0
"""A survey's signal may interrupt a system call, and code may print about it for so long."""

STACK_REPLY_TIMEOUT_S = 0.5
"""Most ranks write their stacks within 1 ms."""

PYTHON_REPLY_TIMEOUT_S = 0.25
"""A rank whose Python has not answered by then gets the signal that is answered without Python."""

RECORDER_REPLY_TIMEOUT_S = 0.4
"""For the recorders of all surveyed ranks together."""

REMOTE_REPLY_TIMEOUT_S = 3.0
"""For stacks of ranks on other hosts, and in surveys that may end a run on a busy host."""

MAX_SURVEYED_RECORDERS = 16
"""Ranks whose recorder is read; each sends up to 1 MiB."""

MAX_LOADER_WORKERS = 16
"""Worker processes of a rank's DataLoader whose stacks are read."""

MIN_USER_GROUP_TIMEOUT_S = 300.0
"""A process group with a shorter timeout ends a wait with an error that the code may expect, so a
wait in it is no deadlock."""

MIN_WAIT_S = 1.0
"""A rank that has been in a collective for less may be passing through."""

MAX_NAMED_PLACES = 4
"""Places that a sentence names; the others are counted."""

MAX_NAMED = 3
"""Threads or ranks that a sentence names."""

RECORDER_THREADS = 8
"""torch's recorder server starts one thread per core, and at least these."""

GLOO_THREADS = 4
"""Threads that a gloo group needs in addition."""

FULL_DISK_BYTES = 1 << 20
"""A file system with less free space counts as full, where the error does not name it."""
