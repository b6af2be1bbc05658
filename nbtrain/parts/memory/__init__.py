"""Estimates the memory that a training needs on each rank, before anything is allocated."""

from ...part_api import Command, Part

PART = Part(
    commands={
        "memory": Command(
            "memory.estimate:command",
            """
%nbtrain memory MODEL --batch 8x512 [options]
                       estimate the memory of training per rank, and whether it fits:
    --optimizer NAME            adamw (the default), sgd, …, a variable, none: inference
    --precision no|fp16|bf16    as under Accelerate
    --ranks N, --strategy ddp|fsdp, --card 16GB
    --batch-from NAME           a variable with a batch of the same shape, not --batch
MODEL is a variable, or an expression that builds one: no memory is allocated for it.
""",
            fills_options_alone=True,
        )
    }
)
