"""May this plan start here? Findings, each with its remedy; nothing is changed.

The questions are pure functions of `Facts`; `facts.gather` is the one place that looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ..findings import Finding
from ..plan import Plan
from .checks import QUESTIONS
from .facts import EngineTraits, Facts, gather

__all__ = ["Facts", "ask", "check", "findings", "unless_refused"]

T = TypeVar("T", bound=Finding)


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


def unless_refused(result: list[T]) -> list[T]:
    """Return findings that refuse nothing. Raises the error of the first that does."""
    refusals = [finding for finding in result if finding.level == "refuse"]
    if refusals:
        raise refusals[0].error("\n".join(finding.text for finding in refusals))
    return result


def findings(plan: Plan, device: str, engine: EngineTraits) -> list[Finding]:
    """Return what `check` would refuse or warn of, raising nothing. The plan has no 'auto' left."""
    return ask(gather(plan, device, engine))


def ask(facts: Facts) -> list[Finding]:
    """Return the findings of every question. Pure."""
    return [finding for question in QUESTIONS for finding in question(facts)]
