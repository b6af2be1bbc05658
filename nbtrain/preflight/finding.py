"""What a question of the preflight may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import PreflightError
from .facts import Facts


@dataclass(frozen=True)
class Finding:
    """What was seen, and what to do about it: a reason not to launch, or just to say so."""

    seen: str
    remedy: str
    level: Literal["refuse", "warn"] = "refuse"
    error: type[PreflightError] = PreflightError


Ask = Callable[[Facts], Iterator[Finding]]


def line(finding: Finding) -> str:
    """Return a finding as one line of text."""
    return f"{finding.seen} {finding.remedy}"
