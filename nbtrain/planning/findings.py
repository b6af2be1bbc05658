"""What is noticed about a launch before it starts: one type, whichever check noticed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError, PreflightError


@dataclass(frozen=True)
class Finding:
    """Something that a user should know about a launch, and what to do about it."""

    message: str
    """What was noticed, in one sentence."""

    remedy: str = ""
    """What to do about it, in one or two sentences."""

    level: Literal["refuse", "warn"] = "warn"
    """Whether the launch is refused, or goes on with a note on its board."""

    error: type[PreflightError | PlanError] = PreflightError
    """What a refused launch raises."""

    @property
    def text(self) -> str:
        """The finding as it is shown."""
        return f"{self.message} {self.remedy}".rstrip()


@dataclass(frozen=True)
class Edit:
    """Delete a line of the source, or insert a line before it, or both: replace it."""

    line: int
    """1-based, in the source without any edit."""

    delete: bool = False
    insert: str | None = None


@dataclass(frozen=True)
class CodeFinding(Finding):
    """A finding at a line of the user's code."""

    code: str = ""
    """The rule that noticed it: one of `lint.CODES`."""

    place: str = ""
    """The source: "In[3]" or "train.py"; empty for the cell that is launched."""

    line: int = 0
    """1-based, in the whole source; so are the lines of `edits`."""

    column: int = 0
    """1-based, in characters."""

    edits: tuple[Edit, ...] = ()
    """What to change in that source to put it right."""

    @property
    def location(self) -> str:
        """The source and the line: "line 7", "In[3], line 7", "train.py, line 7"."""
        return f"{self.place}, line {self.line}" if self.place else f"line {self.line}"

    @property
    def text(self) -> str:
        """The finding as it is shown."""
        return f"{self.location}, column {self.column}: {self.message} [{self.code}]"
