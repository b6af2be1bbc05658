"""Steers a training while it runs: each request is carried out on all ranks at the same step."""

from ...part_api import Command, Part

PART = Part(
    commands={
        "finish": Command(
            "steering.commands:magic",
            """
%nbtrain finish [RUN]  end the training of a run after this step, as if its loop had come to its
                       end: what follows the loop still runs, and the weights come back
                       (--after epoch: after this epoch)
""",
        ),
    },
    shell_commands={
        "finish": Command(
            "steering.commands:run_shell_command",
            "end the training of a run as if its loop had come to its end",
            arguments="steering.commands:add_arguments",
        ),
    },
    launch_side="steering.launch_side:SteeringLaunch",
    rank_side="steering.rank_side:SteeringRank",
    provides={"finish": "steering.requests:finish"},
    switch="steering",
)
