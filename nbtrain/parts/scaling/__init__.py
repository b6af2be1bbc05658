"""Measures the speed-up of a function on 1, 2, 4, … ranks."""

from ...part_api import Command, Part

PART = Part(
    commands={
        "scaling": Command(
            "scaling.measure:command",
            """
%nbtrain scaling --ranks 1,2,4 [options] train(model, steps=50)
                       run this with each number of ranks, and show the speed-up:
    --repeat N                  run each size N times (by default 3); the median counts
    -e, -p, --downcast-bf16, --config, --env, --timeout, --hang-after, --as
                                as for %%distributed; --as assigns the report
""",
            fills_options_alone=True,
        )
    }
)
