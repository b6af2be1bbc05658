"""Migrates a plain training loop to Accelerate: ``%%nbtrain migrate``."""

from __future__ import annotations

import difflib
import re
from typing import Any

from ..checks.lint import SourceTooLongError, apply_edits, lint
from ..errors import PlanError
from ..planning.cell import read_cell

USAGE = "%%nbtrain migrate [--apply], on top of the cell that has the training loop"
_MAGIC = re.compile(r"\s*%%distributed\b[^\n]*\n")


def migrate(shell: Any, arguments: list[str], source: str) -> str:
    """Return the changes to a cell as a unified diff; with ``--apply``, replace the cell.

    With ``--apply``, returns a message instead. Raises `PlanError` for other arguments, and if the
    cell has no loop that can be migrated. Raises `SyntaxError` if it is not Python.
    """
    if arguments not in ([], ["--apply"]):
        raise PlanError(f"%nbtrain: unknown arguments {' '.join(arguments)!r}. Use {USAGE}")
    result = _migrate_source(shell, source)
    if arguments:
        shell.set_next_input(result, replace=True)
        return "The cell is migrated to Accelerate. Run it again to train."
    before, after = (text.rstrip("\n").split("\n") for text in (source, result))
    lines = difflib.unified_diff(before, after, "this cell", "migrated", lineterm="")
    return "\n".join([*lines, "", "To make these changes: %%nbtrain migrate --apply"])


def _migrate_source(shell: Any, source: str) -> str:
    """Return a cell with its training loop migrated to Accelerate.

    Raises `PlanError` if no loop of this cell can be changed, and `SyntaxError` for a cell that is
    not Python.
    """
    magic = _MAGIC.match(source)
    head = magic.group() if magic else ""
    body = source[len(head) :]
    python = shell.transform_cell(body)
    try:
        findings = lint(read_cell(python, "<cell>", shell.user_ns))
    except SourceTooLongError:
        raise PlanError("%%nbtrain migrate: this cell is too long to be read") from None
    loop = next((finding for finding in findings if finding.code == "migrate"), None)
    if loop is None:
        raise PlanError(
            "%%nbtrain migrate: this cell has no loop that can be changed automatically. Such a "
            "loop goes over a variable that holds a DataLoader, its function has the model and the "
            "optimizer, and it uses neither Accelerate nor DistributedDataParallel. To change a "
            "loop by hand, follow huggingface.co/docs/accelerate/basic_tutorials/migration"
        )
    if loop.place.source:
        raise PlanError(
            f"%%nbtrain migrate: the loop is in {loop.place}: put %%nbtrain migrate on top of that "
            "cell"
        )
    typed, parsed = body.split("\n"), python.split("\n")
    for line in (edit.line for edit in loop.edits if edit.delete):
        if typed[line - 1 : line] != parsed[line - 1 : line]:  # a magic over several lines
            raise PlanError(
                f"%%nbtrain migrate: line {line} is not plain Python; change it by hand"
            )
    return head + apply_edits(body, loop.edits)
