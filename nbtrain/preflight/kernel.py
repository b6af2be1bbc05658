"""Questions about this process and the options: could ranks that come from it work at all?"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import AcceleratorInitializedError
from .facts import Facts
from .finding import Ask, Finding


def fork(facts: Facts) -> Iterator[Finding]:
    """Windows has no fork."""
    if facts.forks and not facts.can_fork:
        yield Finding("This system cannot fork.", "Use --engine inline, or Linux or macOS.")


_RESTART = "Restart the kernel and keep that inside the training function"
_SPAWN = (
    "or start this now in fresh processes: `%%distributed --engine spawn` "
    '(`nbtrain.launch(..., engine="spawn")`).'
)


def initialized(facts: Facts) -> Iterator[Finding]:
    """An accelerator that is initialised here cannot be used by ranks forked from here.

    A TPU belongs to one process at a time: not even by fresh ones.
    """
    on_tpu = facts.device in ("xla", "tpu")
    if facts.device == "cpu" or not (facts.forks or on_tpu):
        return
    for touch in facts.touches:
        if on_tpu and touch.what not in ("XLA", "TPU"):
            continue
        named = ", ".join(facts.suspects) if touch.cell is None and touch.what == "CUDA" else ""
        hint = f" Imported here, and reported to do that on import: {named}." if named else ""
        called = f" Called from {touch.calls[-1]}." if touch.calls else ""
        whose = "ranks" if on_tpu else "ranks forked from it"
        yield Finding(
            f"{touch.what} is already initialised in this kernel, so {whose} could not use it. "
            f"First seen: {touch.where}.{called}{hint}",
            f"{_RESTART}." if on_tpu else f"{_RESTART}, {_SPAWN}",
            error=AcceleratorInitializedError,
        )


def accelerator_state(facts: Facts) -> Iterator[Finding]:
    """Accelerate keeps its state in the class: forked ranks would have the notebook's."""
    if facts.forks and facts.accelerator_alive:
        yield Finding(
            "An Accelerator (or PartialState) was made in the notebook: forked ranks would "
            "inherit it and train alone instead of together.",
            "Create it inside the training function, then restart the kernel, or clear it with "
            "accelerate.state.AcceleratorState._reset_state(reset_partial_state=True).",
        )


def process_group(facts: Facts) -> Iterator[Finding]:
    """A process belongs to one default process group."""
    if facts.in_process_group and (facts.forks or facts.inline):
        yield Finding(
            "The notebook itself is in a process group (torch.distributed is initialized).",
            "Call torch.distributed.destroy_process_group() in a cell and launch again.",
        )


def precision(facts: Facts) -> Iterator[Finding]:
    """CPUs and TPUs have no fp16 to train with."""
    if facts.plan.mixed_precision == "fp16" and facts.device != "cuda":
        here = "there is none" if facts.device == "cpu" else "a TPU has bf16 in its place"
        yield Finding(f"fp16 mixed precision needs a GPU, and {here}.", "Use -p bf16 or no.")


def inline_timeout(facts: Facts) -> Iterator[Finding]:
    """Nobody watches a rank that is this very process."""
    if facts.inline and facts.plan.timeout is not None:
        yield Finding("The inline engine cannot enforce a timeout.", "Leave it out, or use fork.")


QUESTIONS: tuple[Ask, ...] = (
    fork,
    initialized,
    accelerator_state,
    process_group,
    precision,
    inline_timeout,
)
