"""Edits of a cell: where lines can be inserted, and what the cell is with its edits made."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ...findings import Edit
from .source_index import Unit


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    """Return the source with the edits made; their lines are those of the source as given."""
    lines = source.split("\n")
    by_line: dict[int, list[Edit]] = {}
    for edit in edits:
        by_line.setdefault(edit.line, []).append(edit)
    for line, changes in sorted(by_line.items(), reverse=True):  # so that numbers stay valid
        inserted = [edit.insert for edit in changes if edit.insert is not None]
        deletes = any(edit.delete for edit in changes)
        lines[line - 1 : line - 1 + deletes] = inserted
    return "\n".join(lines)


def stands_alone(statement: ast.stmt, unit: Unit) -> bool:
    """Return whether a statement shares none of its lines with another."""
    start = unit.character(statement.lineno, statement.col_offset)
    before = unit.lines[statement.lineno - 1][:start]
    last = statement.end_lineno or statement.lineno
    after = unit.lines[last - 1][unit.character(last, statement.end_col_offset or 0) :].strip()
    return not before.strip() and (not after or after.startswith("#"))


def indent(statement: ast.stmt, unit: Unit) -> str:
    """Return the white space a statement's line begins with."""
    line = unit.lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def first_line(statement: ast.stmt) -> int:
    """Return a statement's first line, its decorators' included."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
    return statement.lineno
