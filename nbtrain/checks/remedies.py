"""Returns remedies for errors whose texts are known, as pure functions."""

from __future__ import annotations

import re

from ..tracking.state import RankState, RunState

_WRAPPERS = "DistributedDataParallel|FullyShardedDataParallel|DataParallel|DeepSpeedEngine"
_UNUSED = (
    "If it is right that some parameters get no gradient: "
    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or "
    "DistributedDataParallel(model, find_unused_parameters=True). Otherwise use them in the "
    "loss, or remove them from the model."
)
_UNEQUAL_SIZES = (
    r"(?:collective mismatch|op\.preamble\.length|Connection (?:closed|reset) by peer|Broken pipe)"
    r'[\s\S]*torch/distributed/distributed_c10d\.py", line \d+'
)
"""The error of gloo when ranks take part in a collective with unequal sizes, and its line."""
_REMEDIES = {
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
        "it needs no address, because nbtrain has set its environment variables. With fastai, "
        "train in `with learn.distrib_ctx():` instead."
    ),
    "Expected to mark a variable ready only once": (
        "Gradient checkpointing needs use_reentrant=False here: "
        "checkpoint(…, use_reentrant=False), or, with transformers, "
        'model.gradient_checkpointing_enable({"use_reentrant": False}).'
    ),
    "Parameter indices which did not receive grad|parameters which did not receive grad": _UNUSED,
    rf"{_UNEQUAL_SIZES} in (?:all_gather|gather)": (
        "Every rank must take part in a gather, with a tensor of the same shape. If the shapes "
        "differ, write x = accelerator.pad_across_processes(x, dim=…) before it, or gather "
        "objects: accelerator.gather_for_metrics(x, use_gather_object=True), or "
        "torch.distributed.all_gather_object."
    ),
    rf"{_UNEQUAL_SIZES} in (?:all_)?reduce\n": (
        "Every rank must take part in a reduce, with a tensor of the same shape."
    ),
    r"(?:CUDA|HIP) (?:error: )?out of memory": (
        "`%nbtrain memory` shows what a model takes for training, by part, and a launch with "
        "`--memory-snapshot` names the lines that hold the memory. Use a smaller batch, or mixed "
        "precision."
    ),
    "CUDA error: (?:device-side assert|an illegal memory access)": (
        "A GPU reports such an error some lines after the one that caused it. Run the cell with "
        "`%%distributed --env CUDA_LAUNCH_BLOCKING=1`: the traceback then ends at that line. If "
        "the rank ran in the kernel itself, restart the kernel first. Often an index is too "
        "large, such as a label or a token."
    ),
    "Expected more than 1 value per channel when training": (
        "A BatchNorm got a batch of one sample, often the last batch of an epoch: "
        "DataLoader(…, drop_last=True) leaves that batch out."
    ),
    "fork\\(\\) called from a process already using GNU OpenMP": (
        "The notebook has run a parallel function of numba, whose threads a forked rank lacks. "
        "Start fresh processes: `%%distributed --engine spawn`. Or restart the kernel, and set "
        "NUMBA_THREADING_LAYER=workqueue in the environment before numba is imported."
    ),
    r"os\._exit\(": (
        "os._exit ends a process at once, so the rank returns nothing. To end it early, return "
        "from the function, or raise an exception."
    ),
}


_UNFINISHED = re.compile(
    r"^FileNotFoundError|^\w*BadZipFile|^EOFError: Ran out of input|^\w*SafetensorError|"
    r"PytorchStreamReader failed|unexpected EOF|^UnpicklingError|pickle data was truncated|"
    r"^JSONDecodeError|^EmptyDataError|invalid load key"
)
"""Errors from a file that does not exist yet, or is still being written."""

_WAIT = (
    "If another rank writes the file, it may not have finished: call "
    "accelerator.wait_for_everyone(), or torch.distributed.barrier(), on every rank between "
    "writing and reading."
)


_JOIN_FIRST = (
    "The ranks have not joined each other. If another rank writes the file: make an "
    "`Accelerator()` at the beginning, and call accelerator.wait_for_everyone() on every rank "
    "between writing and reading."
)


_FEWER_BATCHES = (
    "Probably a rank had fewer batches than the others; each needs the same number. "
    "accelerator.prepare(loader) and DistributedSampler see to it, and drop_last=True does if the "
    "parts of the data are equal. With DDP, `with model.join():` around the loop lets a rank end "
    "earlier."
)


def remedies_of_rank(rank: RankState, state: RunState) -> tuple[str, ...]:
    """Return the remedy for a rank that failed because of what other ranks did.

    Either other ranks left a collective, or they had not finished writing the file that this rank
    reads. Empty for other failures.
    """
    if rank.has_lost_peers and rank.progress is not None:
        left = [r.progress.steps for r in state.ranks if r.status == "done" and r.progress]
        if left and min(left) <= rank.progress.steps:
            return (_FEWER_BATCHES,)
    first = state.ranks[0]
    alone = rank.rank > 0 and (not first.error or first.has_lost_peers)
    if not (alone and _UNFINISHED.search(rank.error or "")):
        return ()
    return (_WAIT if rank.collectives else _JOIN_FIRST,)


def remedies(text: str) -> tuple[str, ...]:
    """Return the remedy of each known error in the text of a failure."""
    matches = ((re.search(sign, text), remedy) for sign, remedy in _REMEDIES.items())
    return tuple(
        match.expand(remedy) if r"\1" in remedy else remedy
        for match, remedy in matches
        if match is not None
    )
