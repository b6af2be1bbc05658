"""Records what all ranks do in the same steps, and shows where their time goes."""

from ...part_api import Command, Part

PART = Part(
    commands={
        "profile": Command(
            "profile.commands:profile_magic",
            """
%nbtrain profile [RUN] record the next steps of all ranks, and show where their time goes (--steps
                       N: 3); of a run that has ended, show what was recorded
""",
        ),
    },
    shell_commands={
        "profile": Command(
            "profile.commands:profile_from_shell",
            "record steps of a run that trains, and print where their time goes",
            arguments="profile.commands:add_profile_arguments",
        ),
    },
    launch_side="profile.launch_side:ProfileLaunch",
    rank_side="profile.ranks.recorder:ProfileRank",
    provides={
        "read_steps": "profile.files:read_steps",
        "record": "profile.profile:record_steps",
        "profiles": "profile.profile:profiles_of",
    },
    switch="profile",
)
