"""`Finding`: what nbtrain noticed before, during or after a run, and what to do about it.

Code compares `Finding.code`. The texts are for users, and may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Edit:
    """Delete a line of the source, or insert a line before it, or both: replace it."""

    line: int
    """1-based, in the source without any edit."""

    delete: bool = False
    insert: str | None = None


@dataclass(frozen=True)
class Place:
    """A place in the user's code."""

    source: str
    """ "In[3]" or "train.py"; empty for the cell that is launched."""

    line: int
    """1-based, in the whole source; so are the lines of edits."""

    column: int
    """1-based, in characters."""

    def __str__(self) -> str:
        """Return the source and the line: "line 7", "In[3], line 7", "train.py, line 7"."""
        return f"{self.source}, line {self.line}" if self.source else f"line {self.line}"


NOWHERE = Place("", 0, 0)
"""The place of a finding that is not about code."""


@dataclass(frozen=True)
class Finding:
    """A fact that a user should know about a launch or a run, and what to do about it."""

    code: str
    """What was noticed, for programs: it stays the same when the text changes."""

    text: str
    """What was noticed, in one or two sentences."""

    remedy: str = ""
    """What to do about it, in one or two sentences."""

    level: Literal["refuse", "warn"] = "warn"
    """Whether the launch is refused, or continues with a note on its board."""

    place: Place = NOWHERE
    """The place in the user's code."""

    edits: tuple[Edit, ...] = ()
    """The changes of that source that correct it."""

    flaw: str = ""
    """What makes the result of the run wrong, in a few words; empty if it is right."""

    @property
    def full_text(self) -> str:
        """Return the text and the remedy, as users read them.

        For a place in code, that place comes first, and the finding's code last, in brackets.
        """
        text = f"{self.text} {self.remedy}".rstrip()
        if self.place == NOWHERE:
            return text
        return f"{self.place}, column {self.place.column}: {text} [{self.code}]"
