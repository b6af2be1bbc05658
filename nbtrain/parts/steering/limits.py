"""Limits of steering: how long ranks wait for each other before a request is called off."""

AGREEMENT_TIMEOUT_S = 2.0
"""How long a request may hold ranks up, in all. A rank that evaluates or saves alone makes no step
for longer."""

CLUSTER_FACTOR = 5.0
"""These times are so much longer on a cluster, where orders and reports go from host to host: with
two nodes of Ray on one busy host of 2 cores, requests were called off after 2 s."""

FIRST_STEP_TIMEOUT_S = 30.0
"""The same if the first that waits has made its first step: others may still compile theirs. A
click on Look waits as long, at most, because the kernel handles no other click until then. After
this time, `run.peek()` warns that it waits."""

FIRST_ROUND_S = 0.02
"""For all ranks to come to one step, before those that wait continue to a later one: a rank in a
collective needs them. The next round takes 5 times as long, as the rank may only be slow, and each
round after that twice as long."""

ANSWER_TIMEOUT_S = 3.0
"""For the ranks to carry out a request. After that, the caller continues."""

MAX_SLIDERS = 16
"""Settings that a board offers sliders for. The commands change all others, too."""

MAX_SEPARATE_OPTIMIZERS = 4
"""With more optimizers than this, one slider is for all of them: there may be one a parameter."""

MAX_TITLE_CHARS = 80
"""Of the name of a checkpoint."""

WAIT_POLL_S = 0.001
"""Between two readings of the bell by a rank that waits, and at least between two polls of the
launcher during a request. A poll takes 1 ms of CPU time with 2 ranks."""

MAX_EMPTY_PASSES = 1000
"""Passes that give nothing after a finish. A loop over ``range(10**9)`` may end by its steps."""
