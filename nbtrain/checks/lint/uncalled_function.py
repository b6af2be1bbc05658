"""The rule about the function that trains: the ranks run the cell, and nothing calls it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...findings import Finding
from .source import FunctionNode, Source, called_name, is_function, names_in, receiver

_NAMES = re.compile(r"(^|_)(train|fit|finetune|fine_tune)(_|$)|training|^main$", re.IGNORECASE)
_RUNS_THE_REST = ("time", "capture", "timeit", "prun")
"""Cell magics that run what is below them."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_uncalled(source: Source, others: Sequence[ast.AST]) -> Iterator[Finding]:
    """Yield a finding if a cell has a function that trains, but nothing that runs trains.

    The ranks call a function that is the cell's last statement, except below a magic such as
    ``%%time``, where the finding refuses the launch. `others` are the functions of earlier cells
    that the cell calls. Nothing for the source of a function.
    """
    if not isinstance(source.tree, ast.Module):
        return
    yield from _check_cell_magic(source)
    body = source.tree.body
    starts = [s for s in body if not is_function(s) or s is body[-1]]
    if idle := _find_uncalled(body, starts, others):
        happens = "the ranks run this cell"
        if is_function(body[-1]):
            happens += f" and call {body[-1].name}(), its last function"
        yield source.finding(
            idle,
            "not-called",
            f"{happens}; nothing calls {idle.name}(). Make `def {idle.name}` the last statement "
            "of the cell",
        )


def _check_cell_magic(source: Source) -> Iterator[Finding]:
    """Refuse a cell whose first line is a magic that gets the training function as a text.

    These are ``%%time``, ``%%capture``, ``%%timeit`` and ``%%prun``: nbtrain cannot call a function
    below them. A text that calls its functions, or is no Python, yields nothing.
    """
    match source.module.body:
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
                if idle := _find_uncalled(body, [s for s in body if not is_function(s)]):
                    yield source.finding(
                        statement,
                        "not-called",
                        f"`%%{magic}` runs the rest of the cell by itself, so nothing calls "
                        f"{idle.name}(). Delete this line: the run shows its own times and output.",
                        level="refuse",
                    )


def _find_uncalled(
    body: Sequence[ast.stmt], starts: Sequence[ast.AST], others: Sequence[ast.AST] = ()
) -> FunctionNode | None:
    """Return the last function that trains and is never mentioned, if nothing else trains.

    `starts` is what runs, `others` are definitions from elsewhere. A decorator may register the
    function that it is above.
    """
    nodes = [node for tree in (*body, *others) for node in ast.walk(tree)]
    definitions = {node.name: node for node in nodes if isinstance(node, _DEFINITIONS)}
    stack = [*starts, *(s for s in body if is_function(s) and s.decorator_list)]
    running: set[ast.AST] = set()
    while stack:
        node = stack.pop()
        if node not in running:
            running.add(node)
            texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            names = {*names_in(node), *(text for text in texts if isinstance(text, str))}
            stack += [definitions[name] for name in names & definitions.keys()]
    idle = [s for s in body if is_function(s) and s not in running and _trains(s)]
    return idle[-1] if idle and not any(map(_trains, running)) else None


def _trains(node: ast.AST) -> bool:
    """Return whether a part of the program seems to train."""
    if is_function(node) and _NAMES.search(node.name):
        return True
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(
        (called_name(call) in ("backward", "fit") and receiver(call) is not None)
        or _NAMES.search(called_name(call)) is not None
        for call in calls
    )
