"""Limits of runs on the nodes of a Slurm job. Others are those of any run."""

AGENT_START_TIMEOUT_S = 60.0
"""For ``srun`` to start an agent on each node, and for them to connect. Slurm itself gives a node
60 s to begin a step (``MessageTimeout``, ``TcpTimeout``), and Python on a busy shared disk needs
some of them."""

COMMAND_TIMEOUT_S = 10.0
"""For a command of Slurm to answer. Its controller may be busy."""

COMPLETING_TIMEOUT_S = 5.0
"""For Slurm to report how a job ended, whose processes it is ending."""
