"""Changes of pieces of lines, turned into edits of whole lines."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .facts import Unit
from .notes import Edit


@dataclass(frozen=True)
class Span:
    """Put `text` where the characters from `start` to `end` of a line are."""

    line: int
    start: int
    end: int
    text: str


def span(node: ast.expr, unit: Unit, text: str) -> Span | None:
    """Return the change that puts text in a node's place; None if it is on several lines."""
    if node.end_lineno != node.lineno or node.end_col_offset is None:
        return None
    start = unit.character(node.lineno, node.col_offset)
    return Span(node.lineno, start, unit.character(node.lineno, node.end_col_offset), text)


def replaced(line: int, spans: Sequence[Span], unit: Unit) -> Edit:
    """Return the edit that makes all changes of one line. They must not overlap."""
    text = unit.lines[line - 1]
    for change in sorted(spans, key=lambda s: s.start, reverse=True):
        text = text[: change.start] + change.text + text[change.end :]
    return Edit(line, delete=True, insert=text)


def deleted(statement: ast.stmt) -> tuple[Edit, ...]:
    """Return the edits that take a whole statement away, whatever its number of lines."""
    last = statement.end_lineno or statement.lineno
    return tuple(Edit(line, delete=True) for line in range(statement.lineno, last + 1))


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
