"""Lint: finds mistakes in a cell that matter on several ranks.

It reads syntax trees, and imports, executes and evaluates none of the user's code. It reports only
what is certain. It reads the cell and the functions of the notebook that the cell calls, each
separately. All findings are advice, except that a cell whose function is never called is refused.

    source.py       one cell or function: its tree, its names, what only one rank runs
    rules.py, training_loop.py, uncalled_function.py    the five rules
    migration.py    the edits that make a plain loop train on all ranks
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from ...findings import Edit, Finding
from ...planning.plan import Call, Cell
from .migration import apply_edits, find_migration
from .rules import check_backward, check_devices, check_saves
from .source import NameCell, Source, SourceTooLongError, read
from .training_loop import check_prepared
from .uncalled_function import check_uncalled

__all__ = ["CODES", "Edit", "Finding", "SourceTooLongError", "apply_edits", "lint", "read"]

CODES = {
    "backward": "`loss.backward()` in a loop under Accelerate",
    "device": "a hard-coded `cuda`, or a device chosen in the notebook, that every rank would use",
    "migrate": "a plain PyTorch loop: what to change, line by line, to train on all ranks",
    "not-called": "a function that trains, and that nothing in the cell calls",
    "prepare": "a loader, model or optimizer that never comes out of `prepare`",
    "save": "a file that every rank writes",
}
"""Every code, and what it is about."""


def lint(
    task: Call | Cell,
    *,
    device: str = "cpu",
    sharded: bool = False,
    ranks: int | None = None,
    name_cell: NameCell | None = None,
) -> tuple[Finding, ...]:
    """Return the mistakes of a task that matter on several ranks, in the order of the source.

    Empty where the source cannot be found. Comments ``# nbtrain: ignore`` leave findings out.

    Args:
        device: the device type of the ranks ("cpu", "cuda", …).
        sharded: whether Accelerate's configuration gives each rank a part of the model.
        ranks: the number of ranks, or None for several. One rank has fewer findings.
        name_cell: returns "In[3]" for the file name of a cell, and None for other files.

    Raises `SourceTooLongError` for a long cell, and the errors of `ast.parse` for a cell.
    """
    sources = read(task, name_cell)
    names = set[str]().union(*(source.names for source in sources))
    findings: list[Finding] = []
    for source in sources:
        others = [other.tree for other in sources if other is not source]
        rules = (
            check_uncalled(source, others),
            check_backward(source),
            check_prepared(source),
            _check_peers(source, names, device, sharded) if ranks != 1 else (),
        )
        found = dict.fromkeys(itertools.chain(*rules))
        kept = (finding for finding in found if not _is_silenced(source.lines, finding))
        findings += sorted(kept, key=lambda f: (f.place.line, f.place.column))
    return tuple(findings)


def _check_peers(source: Source, names: set[str], device: str, sharded: bool) -> Iterator[Finding]:
    """Yield the findings that matter on several ranks only: plain loops, devices and files.

    A loop that can be migrated takes the place of findings about devices. Files are not checked if
    the model is `sharded`.
    """
    if migration := find_migration(source, names):  # whose edits choose the devices, too
        yield migration
    else:
        yield from check_devices(source, device, names)
    if not sharded:
        yield from check_saves(source, names)


_IGNORE = re.compile(r"#\s*nbtrain:\s*ignore(?:\[([^\]]*)\])?")


def _is_silenced(lines: Sequence[str], finding: Finding) -> bool:
    """Return whether a comment on the finding's line, or above all code, excludes it."""
    comments = itertools.takewhile(lambda text: not text.strip() or text.lstrip()[0] == "#", lines)
    return any(
        match[1] is None or finding.code in {code.strip() for code in match[1].split(",")}
        for text in (*lines[finding.place.line - 1 : finding.place.line], *comments)
        for match in _IGNORE.finditer(text)
    )
