"""Checks whether a plan can start here, and returns findings with remedies. Changes nothing.

The checks are pure functions of `Facts`. Only `facts.gather` reads the process and the host.
"""

from __future__ import annotations

from ...errors import AcceleratorInitializedError, PlanError, PreflightError
from ...findings import NOWHERE, Finding
from ...planning.plan import Plan
from .checks import CHECKS
from .facts import EngineTraits, Facts, gather

__all__ = ["Facts", "check", "error_of", "findings", "raise_if_refused", "run_checks"]


def check(plan: Plan, device: str, engine: EngineTraits) -> list[Finding]:
    """Return what will probably go wrong with a plan.

    Raises `PreflightError` or `PlanError` with every reason why the ranks of this plan could not
    run.
    """
    return raise_if_refused(run_checks(gather(plan, device, engine)))


def raise_if_refused(result: list[Finding]) -> list[Finding]:
    """Return findings, or raise the error of the first one that refuses the launch."""
    refusals = [finding for finding in result if finding.level == "refuse"]
    if refusals:
        raise error_of(refusals[0])("\n".join(finding.full_text for finding in refusals))
    return result


def error_of(refusal: Finding) -> type[PlanError | PreflightError]:
    """Return the exception of a refused launch: `PlanError` if the reason is a line of the code."""
    if refusal.place != NOWHERE:
        return PlanError
    is_initialized = refusal.code == "accelerator-initialized"
    return AcceleratorInitializedError if is_initialized else PreflightError


def findings(plan: Plan, device: str, engine: EngineTraits) -> list[Finding]:
    """Return what `check` would refuse or warn about, without raising for a refusal.

    `plan.engine` must be the name of an engine, not "auto".
    """
    return run_checks(gather(plan, device, engine))


def run_checks(facts: Facts) -> list[Finding]:
    """Return the findings of all checks."""
    return [finding for check in CHECKS for finding in check(facts)]
