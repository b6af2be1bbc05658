"""Lint: what a cell, and the functions it calls, will do wrong on several ranks.

By `ast` alone: nothing of the user's is imported, executed or evaluated. What is reported is
certain; in doubt it stays quiet. Two rules refuse a launch that cannot be meant; the others advise.

    source_index.py     one piece of source, indexed
    value_kinds.py      what a notebook variable is, by its exact type
    source_finder.py    which pieces of source a launch will run
    program.py          all of them together; what only one rank does
    rules.py, save_rule.py, prepare_rule.py, nested_launch.py, uncalled_function.py    the rules
    training_loop.py, edits.py, migration.py    a plain loop, and its edits
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from ...findings import Edit, Finding
from ...system.source_files import cell_name
from ..plan import Call, Cell
from .edits import apply_edits
from .migration import RANK_DEVICE, migration
from .nested_launch import nested_launches
from .prepare_rule import unprepared
from .program import Program
from .rules import (
    backward,
    built_model,
    captured_accelerator,
    captured_device,
    doubled,
    model_calls,
    pinned_device,
)
from .save_rule import saving, tracker_runs
from .source_finder import NameCell, gather
from .source_index import Unit
from .uncalled_function import uncalled

__all__ = ["CODES", "Edit", "Finding", "Unit", "apply_edits", "lint", "models_built"]

CODES = {
    "accelerator": "an Accelerator made in the notebook is used in the ranks",
    "backward": "`loss.backward()` in a loop under Accelerate",
    "captured-device": "a `device` chosen in the notebook places things in the ranks",
    "device": "a hard-coded `cuda` that every rank would use",
    "doubled": "DistributedDataParallel or DistributedSampler, and `prepare` too",
    "migrate": "a plain PyTorch loop: what to change, line by line, to train on all ranks",
    "model-per-rank": "a model built by every rank where memory is scarce",
    "nested-launch": "a launcher called within the run: refused, with what to write instead",
    "not-called": "a function that trains, and that nothing in the cell calls",
    "prepare": "a loader, model or optimizer that never comes out of `prepare`",
    "save": "a file that every rank writes",
}
"""Every code, and what it is about."""


def lint(
    task: Call | Cell,
    *,
    device: str = "cpu",
    low_ram_tpu: bool = False,
    sharded: bool = False,
    ranks: int | None = None,
    name_cell: NameCell | None = None,
) -> tuple[Finding, ...]:
    """Return what will go wrong with a task on several ranks, in the order of the source.

    Args:
        device: what the ranks will train on ("cpu", "cuda", …).
        low_ram_tpu: the host has memory for one copy of a model, not for one a rank.
        sharded: each rank has a part of the model, by Accelerate's configuration.
        ranks: how many there will be; None: several. One rank has no peers to trip over.
        name_cell: turns a cell's file name into "In[3]", None for a file of another kind.
    """
    try:
        units = gather(task, name_cell)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # the ranks will say so, at the line
    try:
        findings = _lint(units, device, low_ram_tpu, ranks) if units else ()
        return tuple(f for f in findings if not (sharded and f.code == "save"))
    except RecursionError:  # an expression nested deeper than ast can be asked about
        return ()


def models_built(task: Call | Cell) -> list[tuple[Unit, ast.Call]]:
    """Return the calls by which each rank builds or loads a model, with the source they are in."""
    try:
        return list(model_calls(Program(gather(task, cell_name))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _lint(
    units: list[Unit], device: str, low_ram_tpu: bool, ranks: int | None
) -> tuple[Finding, ...]:
    lines = {unit.place: unit.lines for unit in units}
    findings = dict.fromkeys(_findings(Program(units), device, low_ram_tpu, ranks))
    silenced = {finding for finding in findings if _silences(lines[finding.place.source], finding)}
    if any(f.code == "migrate" for f in silenced):  # its other edits alone would break the loop
        silenced |= {finding for finding in findings if finding.code == "migrate"}
    order = list(lines)
    shown = (finding for finding in findings if finding not in silenced)
    return tuple(
        sorted(shown, key=lambda f: (order.index(f.place.source), f.place.line, f.place.column))
    )


def _findings(
    program: Program, device: str, low_ram_tpu: bool, ranks: int | None
) -> Iterator[Finding]:
    yield from nested_launches(program, ranks)
    yield from uncalled(program)
    yield from captured_accelerator(program)
    yield from backward(program)
    yield from unprepared(program)
    yield from doubled(program)
    if low_ram_tpu:
        yield from built_model(program)
    if ranks == 1:
        return
    migrations = migration(program)
    yield from migrations
    # What the edits put right needs no second finding.
    edits = [(finding.place.source, edit) for finding in migrations for edit in finding.edits]
    changed = {(place, edit.line) for place, edit in edits}
    rewritten = [edit.insert.strip().partition(" = ") for _, edit in edits if edit.insert]
    names = tuple(name for name, _, value in rewritten if value == RANK_DEVICE)
    for finding in (*pinned_device(program, device), *captured_device(program, device)):
        place = finding.place
        is_changed = (place.source, place.line) in changed
        if not is_changed and not _is_about(finding, names, program):
            yield finding
    yield from saving(program)
    yield from tracker_runs(program)


def _is_about(finding: Finding, names: tuple[str, ...], program: Program) -> bool:
    """Return whether a finding about a device is about one of these variables."""
    unit = next(unit for unit in program.units if unit.place == finding.place.source)
    text = unit.lines[finding.place.line - 1]
    if finding.code == "device":
        return text.partition("=")[0].strip() in names
    return text[finding.place.column - 1 :].startswith(names)


_IGNORE = re.compile(r"#\s*nbtrain:\s*ignore(?:\[([^\]]*)\])?")


def _silences(lines: Sequence[str], finding: Finding) -> bool:
    """Return whether a comment on the finding's line, or above all code, asks to leave it out."""
    comments = itertools.takewhile(lambda text: not text.strip() or text.lstrip()[0] == "#", lines)
    return any(
        match[1] is None or finding.code in {code.strip() for code in match[1].split(",")}
        for text in (*lines[finding.place.line - 1 : finding.place.line], *comments)
        for match in _IGNORE.finditer(text)
    )
