"""The rule about the function that trains: the ranks run the cell, and nothing calls it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ...findings import Finding
from .program import Program
from .source_index import FunctionNode, Unit, called, is_function, receiver

_NAMES = re.compile(r"(^|_)(train|fit|finetune|fine_tune)(_|$)|training|^main$", re.IGNORECASE)
_RUNS_THE_REST = ("time", "capture", "timeit", "prun")
"""Cell magics that run what is below them."""


def uncalled(program: Program) -> Iterator[Finding]:
    """A cell whose only training is in a function that nothing calls."""
    unit = next((u for u in program.units if u.is_cell), None)
    if unit is None:
        return
    yield from _behind_a_magic(unit)
    body = unit.module.body
    candidates = [
        s
        for s in body[:-1]
        if is_function(s) and not s.decorator_list and s.name not in program.names and _trains(s)
    ]
    live = _live(unit, program) if candidates else set()
    idle = [s for s in candidates if s not in live]
    if not idle or any(map(_trains, live)):
        return
    name = idle[-1].name
    happens = "the ranks run this cell"
    if is_function(body[-1]):
        happens += f" and call {body[-1].name}(), its last function"
    yield unit.finding(
        idle[-1],
        "not-called",
        f"{happens}; nothing calls {name}(). Make `def {name}` the last statement of the cell",
    )


def _behind_a_magic(unit: Unit) -> Iterator[Finding]:
    """A cell magic on top, which takes the functions below it as a text."""
    match unit.module.body:
        case [
            ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(attr="run_cell_magic"),
                    args=[ast.Constant(value=str(magic)), _, ast.Constant(value=str(text))],
                )
            ) as statement
        ] if magic in _RUNS_THE_REST:
            with suppress(SyntaxError):  # another magic in there, perhaps
                if name := _left_out(ast.parse(text).body):
                    yield unit.finding(
                        statement,
                        "not-called",
                        f"`%%{magic}` runs the rest of the cell by itself, so that nothing calls "
                        f"{name}(). Delete this line: the run shows its own times and output.",
                        refuse=True,
                    )


def _left_out(body: list[ast.stmt]) -> str:
    """Return the last function of these statements, if it trains and none of them does; or ''."""
    last = body[-1] if body else None
    if not is_function(last) or last.decorator_list or not _trains(last):
        return ""
    definitions = {s.name: s for s in body if isinstance(s, _DEFINITIONS)}
    starts = [s for s in body if not is_function(s) or s.decorator_list]
    live = _mentioned(starts, definitions)
    return "" if last in live or any(map(_trains, live)) else last.name


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _live(unit: Unit, program: Program) -> set[ast.AST]:
    """Return the cell's statements that the ranks run, and the functions these mention."""
    definitions = {
        node.name: node
        for each in program.units
        for node in each.nodes
        if isinstance(node, _DEFINITIONS)
    }
    body = unit.module.body
    starts = [s for s in body if not is_function(s) or s in (body[-1], unit.entry)]
    return _mentioned(starts, definitions)


def _mentioned(starts: Sequence[ast.AST], definitions: Mapping[str, ast.AST]) -> set[ast.AST]:
    """Return these nodes, the definitions that they mention, those that these mention, …"""
    stack = list(starts)
    live: set[ast.AST] = set()
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        names |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
        stack += [definitions[name] for name in names & definitions.keys()]
    return live


def _trains(node: ast.AST | FunctionNode) -> bool:
    """Return whether a part of the program looks as if it trains."""
    if is_function(node) and _NAMES.search(node.name):
        return True
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(
        (called(call) in ("backward", "fit") and receiver(call) is not None)
        or _NAMES.search(called(call)) is not None
        for call in calls
    )
