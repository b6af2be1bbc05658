"""Lint: what a cell, and the functions it calls, will do wrong on several ranks.

By `ast` alone: nothing of the user's is imported, executed or evaluated. What is reported is
certain; in doubt it stays quiet. Nothing here stops a launch.

    facts.py      one piece of source, indexed
    values.py     what a notebook variable is, by its exact type
    sources.py    which pieces of source a launch will run
    program.py    all of them together; what only one rank does
    rules.py, saving.py, prepared.py    the rules
    plain.py, placement.py, spans.py, migrate.py    a plain loop, and the edits it needs
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..plan import Call, Cell
from .facts import Unit
from .migrate import migration
from .notes import Edit, Note, apply_edits, silenced
from .prepared import unprepared
from .program import Program, read
from .rules import (
    backward,
    built_model,
    captured_accelerator,
    captured_device,
    doubled,
    model_calls,
    pinned_device,
)
from .saving import saving
from .sources import NameCell, gather

__all__ = ["CODES", "Edit", "Note", "Unit", "apply_edits", "lint", "models_built"]

CODES = {
    "accelerator": "an Accelerator made in the notebook is used in the ranks",
    "backward": "`loss.backward()` in a loop under Accelerate",
    "captured-device": "a `device` chosen in the notebook places things in the ranks",
    "device": "a hard-coded `cuda` that every rank would use",
    "doubled": "DistributedDataParallel or DistributedSampler, and `prepare` too",
    "migrate": "a plain PyTorch loop: what to change, line by line, to train on all ranks",
    "model-per-rank": "a model built by every rank where memory is scarce",
    "prepare": "a loader, model or optimizer that never comes out of `prepare`",
    "save": "a file that every rank writes",
}
"""Every code, and what it is about."""


def lint(
    task: Call | Cell,
    *,
    device: str = "cpu",
    low_ram_tpu: bool = False,
    ranks: int | None = None,
    name_cell: NameCell | None = None,
) -> tuple[Note, ...]:
    """Return what will go wrong with a task on several ranks, in the order of the source.

    Args:
        device: what the ranks will train on ("cpu", "cuda", …).
        low_ram_tpu: the host has memory for one copy of a model, not for one a rank.
        ranks: how many there will be; None: several. One rank has no peers to trip over.
        name_cell: turns a cell's file name into "In[3]", None for a file of another kind.
    """
    try:
        units = gather(task, name_cell)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # the ranks will say so, at the line
    try:
        return _lint(units, device, low_ram_tpu, ranks) if units else ()
    except RecursionError:  # an expression nested deeper than ast can be asked about
        return ()


def models_built(task: Call | Cell) -> list[tuple[Unit, ast.Call]]:
    """Return the calls by which each rank builds or loads a model, with the source they are in."""
    try:
        return list(model_calls(read(gather(task))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _lint(units: list[Unit], device: str, low_ram_tpu: bool, ranks: int | None) -> tuple[Note, ...]:
    found = list(_found(read(units), device, low_ram_tpu, ranks))
    places: dict[str, list[Unit]] = {}
    for unit in units:
        places.setdefault(unit.place, []).append(unit)
    loud = [one for one in found if not _is_silenced(one, places[_place(one)])]
    migrate = [one for one in found if one.code == "migrate"]
    if not set(migrate) <= set(loud):  # half of the edits are none
        loud = [one for one in loud if one.code != "migrate"]
    order = {place: number for number, place in enumerate(places)}
    return tuple(
        sorted(dict.fromkeys(loud), key=lambda one: (order[_place(one)], one.line, one.column))
    )


def _found(program: Program, host: str, low_ram_tpu: bool, ranks: int | None) -> Iterator[Note]:
    yield from captured_accelerator(program)
    yield from backward(program)
    yield from unprepared(program)
    yield from doubled(program)
    if low_ram_tpu:
        yield from built_model(program)
    if ranks == 1:
        return
    edits = migration(program)
    yield from edits
    # What the edits put right needs no second note.
    changed = {(one.where, edit.line) for one in edits for edit in one.edits}
    given = {
        edit.insert.strip().removesuffix(" = accelerator.device")
        for one in edits
        for edit in one.edits
        if edit.insert and edit.insert.endswith(" = accelerator.device")
    }
    for one in (*pinned_device(program), *captured_device(program, host)):
        if (one.where, one.line) not in changed and not _is_given(one, given, program):
            yield one
    yield from saving(program)


def _is_given(one: Note, names: set[str], program: Program) -> bool:
    """Return whether the edits give the device that a note is about its right value."""
    unit = next(unit for unit in program.units if unit.place == _place(one))
    text = unit.lines[one.line - 1]
    if one.code == "device":
        return text.partition("=")[0].strip() in names
    return any(text[one.column - 1 :].startswith(name) for name in names)


def _place(one: Note) -> str:
    return one.where.removesuffix(f"line {one.line}").removesuffix(", ")


def _is_silenced(one: Note, units: list[Unit]) -> bool:
    return any(silenced(one.code, one.line, unit.lines) for unit in units)
