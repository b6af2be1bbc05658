"""What to change in the code after an error whose text is known. Pure."""

from __future__ import annotations

import re

_WRAPPERS = "DistributedDataParallel|FullyShardedDataParallel|DataParallel|DeepSpeedEngine"
_UNUSED = (
    "If some parameters rightly get no gradient: "
    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or "
    "DistributedDataParallel(model, find_unused_parameters=True). Else use them in the loss, or "
    "leave them out of the model."
)
_KNOWN = {
    rf"AttributeError: '(?:{_WRAPPERS})' object has no attribute '(\w+)'": (
        r"The model is wrapped on the ranks: write model.module.\1, or, with Accelerate, "
        r"accelerator.unwrap_model(model).\1"
    ),
    rf"TypeError: '(?:{_WRAPPERS})' object is not (?:subscriptable|iterable)": (
        "The model is wrapped on the ranks: write model.module, or, with Accelerate, "
        "accelerator.unwrap_model(model)"
    ),
    "Default process group has not been initialized": (
        "Make an `Accelerator()` before this line, or call torch.distributed.init_process_group(): "
        "it needs no address, nbtrain has set the environment for it."
    ),
    "Expected to mark a variable ready only once": (
        "Gradient checkpointing needs use_reentrant=False here: "
        "checkpoint(…, use_reentrant=False), or, with transformers, "
        'model.gradient_checkpointing_enable({"use_reentrant": False}).'
    ),
    "Parameter indices which did not receive grad|parameters which did not receive grad": _UNUSED,
    r'collective mismatch[\s\S]*accelerate/utils/operations\.py", line \d+ in gather': (
        "If the ranks gather tensors of unequal shapes, give them one shape first: "
        "accelerator.pad_across_processes(x, dim=…), or accelerator.gather_for_metrics for the "
        "last batch."
    ),
    r"CUDA (?:error: )?out of memory": (
        "`%nbtrain memory` shows what a model takes for training, by part, and what would make it "
        "fit; use a smaller batch, or mixed precision."
    ),
    r"os\._exit\(": (
        "os._exit ends a process at once: nothing of the rank comes back. To end it early, return "
        "from the function, or raise an exception."
    ),
}


def remedies(text: str) -> tuple[str, ...]:
    """Return what to change, for each known error in the text of a failure."""
    matches = ((re.search(sign, text), remedy) for sign, remedy in _KNOWN.items())
    return tuple(
        match.expand(remedy) if r"\1" in remedy else remedy
        for match, remedy in matches
        if match is not None
    )
