"""Checks whether a plan can start here: findings with remedies. It changes nothing.

The questions are pure functions of `Facts`; `facts.gather` is the one place that looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import AcceleratorInitializedError, PlanError, PreflightError
from ...findings import NOWHERE, Finding
from ...planning.plan import Plan
from .checks import QUESTIONS
from .facts import EngineTraits, Facts, gather

__all__ = ["Facts", "ask", "check", "error_of", "findings", "unless_refused"]


def check(
    plan: Plan, device: str, engine: EngineTraits, builds: Callable[[], int] = int
) -> list[Finding]:
    """Return what will probably go wrong with a plan.

    `builds` returns how many bytes each rank will build for itself, as far as that is known; it is
    called only if nothing else refuses the plan, as it takes longer than all the rest. Raises
    `PreflightError` with every reason why the ranks of this plan could not work.
    """
    facts = gather(plan, device, engine)
    result = unless_refused(ask(facts))
    if built := builds():
        result = unless_refused(ask(replace(facts, builds=built)))
    return result


def unless_refused(result: list[Finding]) -> list[Finding]:
    """Return findings that refuse nothing. Raises the error of the first that does."""
    refusals = [finding for finding in result if finding.level == "refuse"]
    if refusals:
        raise error_of(refusals[0])("\n".join(finding.shown for finding in refusals))
    return result


def error_of(refusal: Finding) -> type[PlanError | PreflightError]:
    """Return what a refused launch raises: code cannot run as written, or the kernel's state."""
    if refusal.place != NOWHERE:
        return PlanError
    is_initialized = refusal.code == "accelerator-initialized"
    return AcceleratorInitializedError if is_initialized else PreflightError


def findings(plan: Plan, device: str, engine: EngineTraits) -> list[Finding]:
    """Return what `check` would refuse or warn of, raising nothing. The plan has no 'auto' left."""
    return ask(gather(plan, device, engine))


def ask(facts: Facts) -> list[Finding]:
    """Return the findings of every question. Pure."""
    return [finding for question in QUESTIONS for finding in question(facts)]
