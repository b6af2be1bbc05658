"""Steers a training while it runs: each request is carried out on all ranks at the same step."""

from ...part_api import Command, Part

PART = Part(
    commands={
        "finish": Command(
            "steering.commands:finish_magic",
            """
%nbtrain finish [RUN]  end the training of a run after this step, as if its loop had come to its
                       end: what follows the loop still runs, and the weights come back
                       (--after epoch: after this epoch)
""",
        ),
        "turn": Command(
            "steering.commands:turn_magic",
            """
%nbtrain turn [RUN] lr=3e-4
                       change a setting of the optimizers while they train: lr, weight_decay,
                       momentum or betas, or a nbtrain.knob(); lr=/3 divides it, lr=back takes it
                       back (--optimizer WHICH, --group N)
""",
        ),
        "peek": Command(
            "steering.commands:peek_magic",
            """
%nbtrain peek [RUN]    load the weights of a background run, as they are now, into the notebook's
                       models; the training goes on
""",
        ),
        "keep": Command(
            "steering.commands:keep_magic",
            """
%nbtrain keep [RUN]    save a checkpoint of a run while it trains, to start another run from
                       (--name TEXT: what it is called)
""",
        ),
    },
    shell_commands={
        "finish": Command(
            "steering.commands:finish_from_shell",
            "end the training of a run as if its loop had come to its end",
            arguments="steering.commands:add_finish_arguments",
        ),
        "turn": Command(
            "steering.commands:turn_from_shell",
            "change the learning rate or another setting of a run while it trains",
            arguments="steering.commands:add_turn_arguments",
        ),
        "keep": Command(
            "steering.commands:keep_from_shell",
            "save a checkpoint of a run while it trains",
            arguments="steering.commands:add_keep_arguments",
        ),
    },
    launch_side="steering.launch_side:SteeringLaunch",
    rank_side="steering.ranks.boundaries:SteeringRank",
    provides={
        "finish": "steering.requests:finish",
        "turn": "steering.requests:turn",
        "peek": "steering.requests:peek",
        "keep": "steering.requests:keep",
        "request_step": "steering.requests:request_step",
        "write_request": "steering.requests:write_request",
        "can_be_steered": "steering.requests:can_be_steered",
        "read_settings": "steering.settings:read_settings",
        "export_changes": "steering.script.schedule:export_changes",
        "export_settings": "steering.script.schedule:export_settings",
        "find_start": "steering.start_points:find_start",
    },
    switch="steering",
)
