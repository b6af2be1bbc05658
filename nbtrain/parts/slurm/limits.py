"""Limits of runs on the nodes of a Slurm job. Others are those of any run."""

AGENT_START_TIMEOUT_S = 60.0
"""For ``srun`` to start an agent on each node, and for them to connect. Slurm itself gives a node
60 s to begin a step (``MessageTimeout``, ``TcpTimeout``), and Python on a busy shared disk needs
some of them."""

COMMAND_TIMEOUT_S = 10.0
"""For a command of Slurm to answer. Its controller may be busy."""

LIMIT_CHECK_INTERVAL_S = 60.0
"""Between two readings of the job's time limit. Slurm itself checks it every 30 s, and minutes are
its unit."""

NOTICE_S = 60.0
"""Before the time limit, the ranks save a checkpoint and stop; of a job with less than twice this
time left at the start of a run, after half of it. Slurm ends a job up to 30 s late, never early."""

KEEP_INTERVAL_S = 5.0
"""Before the ranks are asked again for that checkpoint, if one of them made no step, and between
two readings of a time limit that is near."""

COMPLETING_TIMEOUT_S = 5.0
"""For Slurm to report how a job ended, whose processes it is ending."""

SUBMIT_TIMEOUT_S = 60.0
"""For ``sbatch``. A plugin of the site may look at each job before it is accepted."""

QUEUE_INTERVAL_S = 10.0
"""Between two questions to Slurm about submitted jobs. Sites ask not to call squeue in a loop."""

FIRST_ANSWER_TIMEOUT_S = 3.0
"""For such an answer. Without it, a run counts as waiting or running."""
