"""Lint: finds what a cell will do wrong on several ranks.

By `ast` alone: nothing of the user's is imported, executed or evaluated. What is reported is
certain; in doubt it stays quiet. It only advises, so that it reads little: the cell itself, and the
functions of the notebook that it calls, each by itself. One finding refuses: nobody wants a cell
that runs nothing.

    source.py       one cell or function: its tree, its names, what only one rank runs
    rules.py, training_loop.py, uncalled_function.py    the five rules
    migration.py    the edits by which a plain loop trains on all ranks
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
    """Return what will go wrong with a task on several ranks, in the order of the source.

    Args:
        device: what the ranks will train on ("cpu", "cuda", …).
        sharded: each rank has a part of the model, by Accelerate's configuration.
        ranks: how many there will be; None: several. One rank has no peers to trip over.
        name_cell: turns a cell's file name into "In[3]", None for a file of another kind.

    Raises `SourceTooLongError`, and whatever `ast` raises for code that it cannot read.
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
    """Yield what is wrong because there are other ranks."""
    if migration := find_migration(source, names):  # whose edits choose the devices, too
        yield migration
    else:
        yield from check_devices(source, device, names)
    if not sharded:
        yield from check_saves(source, names)


_IGNORE = re.compile(r"#\s*nbtrain:\s*ignore(?:\[([^\]]*)\])?")


def _is_silenced(lines: Sequence[str], finding: Finding) -> bool:
    """Return whether a comment on the finding's line, or above all code, asks to leave it out."""
    comments = itertools.takewhile(lambda text: not text.strip() or text.lstrip()[0] == "#", lines)
    return any(
        match[1] is None or finding.code in {code.strip() for code in match[1].split(",")}
        for text in (*lines[finding.place.line - 1 : finding.place.line], *comments)
        for match in _IGNORE.finditer(text)
    )
