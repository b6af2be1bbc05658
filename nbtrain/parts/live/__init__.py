"""Live ranks, which stay between cells: start and stop them, and exchange tasks and values."""

from ...part_api import Command, Part

_RUN = "live.commands:command"

PART = Part(
    commands={
        "start": Command(
            _RUN,
            """
%nbtrain start -n N    start live ranks: %%distributed cells then run on them, and their
                       variables stay (-e, -p, --config, --env as for %%distributed;
                       --idle-timeout SECONDS: end them after so long without a cell)
""",
        ),
        "status": Command(
            _RUN, "%nbtrain status        show the live ranks; %nbtrain stop ends them"
        ),
        "vars": Command(
            _RUN,
            "%nbtrain vars          show the live ranks' variables, and which differ between ranks",
        ),
        "push": Command(_RUN, "%nbtrain push NAMES    send variables of the notebook to the ranks"),
        "pull": Command(
            _RUN,
            "%nbtrain pull NAMES    copy variables of rank 0 (--rank R) here; a model in place",
        ),
        "debug": Command(
            _RUN,
            """
%nbtrain debug         open the debugger where the last cell on live ranks failed (--rank R:
                       on another rank); %debug does the same
""",
        ),
        "restart": Command(_RUN, "%nbtrain restart       end the live ranks, and start new ones"),
        "stop": Command(_RUN),
    },
    cell_magics={
        "rank": Command(
            "live.commands:rank_options",
            "Run this cell on some of the live ranks: ``%%rank 0,2-3 [options]``.",
        )
    },
    launch_side="live.launch_side:LiveLaunch",
    switch="live",
)
