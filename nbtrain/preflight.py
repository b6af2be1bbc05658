"""May this plan start here? Findings, each with what was seen and what to do; changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import guard
from .errors import AcceleratorInitializedError, PreflightError
from .plan import Plan


@dataclass(frozen=True)
class Finding:
    """A reason not to launch: what was seen, and what to do about it."""

    seen: str
    remedy: str
    error: type[PreflightError] = PreflightError


def check(plan: Plan, device: str) -> None:
    """Raise `PreflightError` with every reason why the ranks of this plan could not work."""
    findings = [finding for ask in _QUESTIONS for finding in ask(plan, device)]
    if findings:
        raise findings[0].error("\n".join(f"{f.seen} {f.remedy}" for f in findings))


def _accelerator_state(plan: Plan, device: str) -> Iterator[Finding]:
    state = sys.modules.get("accelerate.state")
    if plan.engine == "fork" and state is not None and state.PartialState._shared_state:
        yield Finding(
            "An Accelerator (or PartialState) was made in the notebook: forked ranks would "
            "inherit it and train alone instead of together.",
            "Create it inside the training function, then restart the kernel, or clear it with "
            "accelerate.state.AcceleratorState._reset_state(reset_partial_state=True).",
        )


def _initialized(plan: Plan, device: str) -> Iterator[Finding]:
    if device == "cpu" or plan.engine in ("inline", "spawn"):
        return
    for what in sorted(guard.initialized()):
        yield Finding(
            f"{what} is already initialised in this kernel, so ranks forked from it could not use "
            f"it. First seen: {guard.culprit(what).where}.",
            "Restart the kernel and keep that inside the training function, or start this now in "
            'fresh processes: --engine spawn (nbtrain.launch(..., engine="spawn")).',
            AcceleratorInitializedError,
        )


def _process_group(plan: Plan, device: str) -> Iterator[Finding]:
    dist = sys.modules.get("torch.distributed")
    if (
        plan.engine != "spawn"
        and dist is not None
        and dist.is_available()
        and dist.is_initialized()
    ):
        yield Finding(
            "The notebook itself is in a process group (torch.distributed is initialized).",
            "Call torch.distributed.destroy_process_group() in a cell and launch again.",
        )


def _precision(plan: Plan, device: str) -> Iterator[Finding]:
    if plan.mixed_precision == "fp16" and device == "cpu":
        yield Finding("fp16 mixed precision needs a GPU, and there is none.", "Use -p bf16 or no.")


def _inline_timeout(plan: Plan, device: str) -> Iterator[Finding]:
    if plan.engine == "inline" and plan.timeout is not None:
        yield Finding("The inline engine cannot enforce a timeout.", "Leave it out, or use fork.")


_QUESTIONS: tuple[Callable[[Plan, str], Iterator[Finding]], ...] = (
    _initialized,
    _accelerator_state,
    _process_group,
    _precision,
    _inline_timeout,
)
