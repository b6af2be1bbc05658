"""The rule about the function that trains: the ranks run the cell, and nothing calls it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...findings import Finding
from .program import Program
from .source_index import FunctionNode, Unit, called, is_function, names_in, receiver

_NAMES = re.compile(r"(^|_)(train|fit|finetune|fine_tune)(_|$)|training|^main$", re.IGNORECASE)
_RUNS_THE_REST = ("time", "capture", "timeit", "prun")
"""Cell magics that run what is below them."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def uncalled(program: Program) -> Iterator[Finding]:
    """A cell whose only training is in a function that nothing calls."""
    unit = program.units[0]
    if not unit.is_cell:
        return
    yield from _behind_a_magic(unit)
    body = unit.module.body
    starts = [s for s in body if not is_function(s) or s is body[-1]]
    others = [u.tree for u in program.units[1:]]
    if idle := _left_out(body, starts, others):
        happens = "the ranks run this cell"
        if is_function(body[-1]):
            happens += f" and call {body[-1].name}(), its last function"
        yield unit.finding(
            idle,
            "not-called",
            f"{happens}; nothing calls {idle.name}(). Make `def {idle.name}` the last statement "
            "of the cell",
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
                body = ast.parse(text).body
                if idle := _left_out(body, [s for s in body if not is_function(s)]):
                    yield unit.finding(
                        statement,
                        "not-called",
                        f"`%%{magic}` runs the rest of the cell by itself, so nothing calls "
                        f"{idle.name}(). Delete this line: the run shows its own times and output.",
                        level="refuse",
                    )


def _left_out(
    body: Sequence[ast.stmt], starts: Sequence[ast.AST], others: Sequence[ast.AST] = ()
) -> FunctionNode | None:
    """Return the last function that trains and is never mentioned, if nothing else trains.

    `starts` is what runs, `others` are definitions from elsewhere. A decorator may register the
    function that it is above.
    """
    nodes = [node for tree in (*body, *others) for node in ast.walk(tree)]
    definitions = {node.name: node for node in nodes if isinstance(node, _DEFINITIONS)}
    stack = [*starts, *(s for s in body if is_function(s) and s.decorator_list)]
    live: set[ast.AST] = set()
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            names = {*names_in(node), *(text for text in texts if isinstance(text, str))}
            stack += [definitions[name] for name in names & definitions.keys()]
    idle = [s for s in body if is_function(s) and s not in live and _trains(s)]
    return idle[-1] if idle and not any(map(_trains, live)) else None


def _trains(node: ast.AST) -> bool:
    """Return whether a part of the program looks as if it trains."""
    if is_function(node) and _NAMES.search(node.name):
        return True
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(
        (called(call) in ("backward", "fit") and receiver(call) is not None)
        or _NAMES.search(called(call)) is not None
        for call in calls
    )
