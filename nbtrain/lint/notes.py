"""What lint has to say: notes, the edits some of them carry, and how they are silenced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Delete `line` (1-based), or insert the line `insert` before it, or both: replace it."""

    line: int
    delete: bool = False
    insert: str | None = None


@dataclass(frozen=True)
class Note:
    """One finding: what will go wrong, where, and what to write instead.

    `where` names source and line: "line 7" of the cell, "In[3], line 7", "train.py, line 7".
    `line` and `column` are 1-based, in that source; so are the lines of `edits`.
    """

    code: str
    message: str
    where: str
    line: int
    column: int
    edits: tuple[Edit, ...] = ()

    @property
    def text(self) -> str:
        """The note as it is shown."""
        return f"{self.where}, column {self.column}: {self.message} [{self.code}]"


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    """Return the source with the edits made; their lines are those of the source as given."""
    lines = source.split("\n")
    deleted: set[int] = set()
    inserted: dict[int, list[str]] = {}
    for edit in edits:
        if edit.delete:
            deleted.add(edit.line)
        if edit.insert is not None:
            inserted.setdefault(edit.line, []).append(edit.insert)
    result: list[str] = []
    for number, line in enumerate(lines, 1):
        result += inserted.get(number, [])
        if number not in deleted:
            result.append(line)
    for number in sorted(n for n in inserted if n > len(lines)):
        result += inserted[number]
    return "\n".join(result)


_IGNORE = re.compile(r"#\s*nbtrain:\s*ignore(?:\[([^\]]*)\])?")


def silenced(note_code: str, line: int, lines: Sequence[str]) -> bool:
    """Return whether a comment on the note's line, or above all code, asks to leave it out."""
    own = lines[line - 1] if 0 < line <= len(lines) else ""
    return any(_ignores(text, note_code) for text in (own, *_head(lines)))


def _head(lines: Sequence[str]) -> list[str]:
    head: list[str] = []
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            break
        head.append(line)
    return head


def _ignores(text: str, code: str) -> bool:
    if "nbtrain" not in text:
        return False
    return any(
        found[1] is None or code in {part.strip() for part in found[1].split(",")}
        for found in _IGNORE.finditer(text)
    )
