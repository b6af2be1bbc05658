"""Lint: finds what a cell, and the functions that it calls, will do wrong on several ranks.

By `ast` alone: nothing of the user's is imported, executed or evaluated. What is reported is
certain; in doubt it stays quiet. It only advises, so that it reads little and gives up in time:
whoever launches goes on without it. One finding refuses: nobody wants a cell that runs nothing.

    source_index.py     one piece of source, indexed
    source_finder.py    which pieces of source are read: the cell, and what it calls directly
    value_kinds.py      what a notebook variable is, by its exact type
    program.py          all pieces together; what only one rank does
    rules.py, save_rule.py, training_loop.py, uncalled_function.py    the five rules
    migration.py        the edits by which a plain loop trains on all ranks
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from ...findings import Edit, Finding
from ...planning.plan import Call, Cell
from ..limits import LINT_BUDGET_S
from .migration import apply_edits, migration
from .program import Program
from .rules import backward, devices
from .save_rule import saving
from .source_finder import NameCell, gather
from .source_index import Clock, OutOfTime, Unit
from .training_loop import unprepared
from .uncalled_function import uncalled

__all__ = ["CODES", "Edit", "Finding", "OutOfTime", "apply_edits", "lint", "read"]

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

    Raises `OutOfTime`, and whatever `ast` raises for code that it cannot read.
    """
    units = read(task, name_cell)
    if not units:
        return ()
    lines = {unit.place: unit.lines for unit in units}
    rules = _findings(Program(units), device, sharded, ranks)
    findings = (f for f in dict.fromkeys(rules) if not _silences(lines[f.place.source], f))
    order = list(lines)
    return tuple(
        sorted(findings, key=lambda f: (order.index(f.place.source), f.place.line, f.place.column))
    )


def read(task: Call | Cell, name_cell: NameCell | None = None) -> list[Unit]:
    """Return the source that is looked at, within the budget; raises what `lint` raises."""
    return gather(task, Clock(LINT_BUDGET_S), name_cell)


def _findings(program: Program, device: str, sharded: bool, ranks: int | None) -> Iterator[Finding]:
    yield from uncalled(program)
    yield from backward(program)
    yield from unprepared(program)
    if ranks == 1:
        return
    migrations = list(migration(program))
    yield from migrations
    if not any(finding.edits for finding in migrations):  # whose edits choose the devices, too
        yield from devices(program, device)
    if not sharded:
        yield from saving(program)


_IGNORE = re.compile(r"#\s*nbtrain:\s*ignore(?:\[([^\]]*)\])?")


def _silences(lines: Sequence[str], finding: Finding) -> bool:
    """Return whether a comment on the finding's line, or above all code, asks to leave it out."""
    comments = itertools.takewhile(lambda text: not text.strip() or text.lstrip()[0] == "#", lines)
    return any(
        match[1] is None or finding.code in {code.strip() for code in match[1].split(",")}
        for text in (*lines[finding.place.line - 1 : finding.place.line], *comments)
        for match in _IGNORE.finditer(text)
    )
