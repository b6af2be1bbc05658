"""May this plan start here? Findings, each with what was seen and what to do; changes nothing.

The questions are pure functions of `Facts`; `facts.gather` is the one place that looks.
"""

from __future__ import annotations

from ..plan import Plan
from . import accelerators, kernel, resources
from .facts import Facts, gather
from .finding import Ask, Finding, line

__all__ = ["Facts", "Finding", "ask", "check", "findings", "line"]

_QUESTIONS: tuple[Ask, ...] = (
    *kernel.QUESTIONS,
    *accelerators.QUESTIONS,
    *resources.QUESTIONS,
)


def check(plan: Plan, device: str, builds: int = 0) -> tuple[str, ...]:
    """Return a line for each thing that will probably go wrong.

    `builds` is how many bytes each rank will build for itself, as far as that is known. Raises
    `PreflightError` with every reason why the ranks of this plan could not work.
    """
    found = findings(plan, device, builds)
    refusals = [finding for finding in found if finding.level == "refuse"]
    if refusals:
        raise refusals[0].error("\n".join(line(finding) for finding in refusals))
    return tuple(line(finding) for finding in found)


def findings(plan: Plan, device: str, builds: int = 0) -> list[Finding]:
    """Return what `check` would refuse or warn of, raising nothing. The plan has no 'auto' left."""
    return ask(gather(plan, device, builds))


def ask(facts: Facts) -> list[Finding]:
    """Return the findings of every question. Pure."""
    return [finding for question in _QUESTIONS for finding in question(facts)]
