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


def initialized(facts: Facts) -> Iterator[Finding]:
    """An accelerator that is initialised here cannot be used by ranks forked from here."""
    if facts.device == "cpu" or not facts.forks:
        return
    on_tpu = facts.device == "xla"
    remedy = "Restart the kernel and keep that inside the training function"
    for touch in facts.touches:
        if on_tpu and touch.what != "XLA":
            continue
        named = ", ".join(facts.suspects) if touch.cell is None and touch.what == "CUDA" else ""
        hint = f" Imported here, and reported to do that on import: {named}." if named else ""
        called = f" Called from {touch.calls[-1]}." if touch.calls else ""
        yield Finding(
            f"{touch.what} is already initialised in this kernel, so ranks forked from it could "
            f"not use it. First seen: {touch.where}.{called}{hint}",
            f"{remedy}." if on_tpu else f"{remedy}, {_SPAWN}",
            error=AcceleratorInitializedError,
        )


_SPAWN = (
    "or start this now in fresh processes: `%%distributed --engine spawn` "
    '(`nbtrain.launch(..., engine="spawn")`).'
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
    if facts.in_process_group and facts.plan.engine != "spawn":
        yield Finding(
            "The notebook itself is in a process group (torch.distributed is initialized).",
            "Call torch.distributed.destroy_process_group() in a cell and launch again.",
        )


def precision(facts: Facts) -> Iterator[Finding]:
    """CPUs have no fp16 to train with."""
    if facts.plan.mixed_precision == "fp16" and facts.device == "cpu":
        yield Finding("fp16 mixed precision needs a GPU, and there is none.", "Use -p bf16 or no.")


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
