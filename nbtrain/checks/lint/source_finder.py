"""Finds the source to read: the task's, and the notebook's functions that it calls directly.

Sources come from `linecache`, where IPython keeps cells; nothing is imported or executed. What
another module defines is not read: a library that lies beside the notebook, and not where packages
are installed, looks like a file of the user's, and takes minutes to read.
"""

from __future__ import annotations

import ast
import linecache
import re
import types
from collections.abc import Callable
from pathlib import Path

from ...planning.plan import Call, Cell
from ...planning.task_values import arguments, function_of, visible
from ...system.source_files import is_library
from ..limits import MAX_SOURCE_CHARS
from .source_index import MISSING, Clock, OutOfTime, Unit, is_function

NameCell = Callable[[str], str | None]
"""Turns a cell's file name into what the user calls it ("In[3]"); None if it is no cell."""


def gather(task: Call | Cell, clock: Clock, name_cell: NameCell | None = None) -> list[Unit]:
    """Return the task's own source, then the functions of the same notebook that it calls.

    Empty where it has no source. Raises `OutOfTime`, and what `ast.parse` raises for a cell.
    """
    parsed: dict[str, ast.Module | None] = {}
    known: set[types.CodeType] = set()

    def unit_of(function: types.FunctionType | None, call: Call | None = None) -> Unit | None:
        if function is None or function.__code__ in known:
            return None
        known.add(function.__code__)
        clock.check()
        filename = function.__code__.co_filename
        lines = [] if is_library(filename) else linecache.getlines(filename)
        if filename not in parsed:
            parsed[filename] = _parse(lines)
        module = parsed[filename]
        node = _locate(function, module) if module is not None else None
        if module is None or node is None:
            return None
        return Unit(
            tree=node,
            module=module,
            lines=[line.rstrip("\r\n") for line in lines],
            place=_place(filename, name_cell),
            namespace=visible(function),
            clock=clock,
            entry=node if call else None,
            arguments=arguments(call) if call else {},
        )

    if isinstance(task, Cell):
        first: Unit | None = _cell(task, clock)
    else:
        first = unit_of(function_of(task.function), task)
    if first is None:
        return []
    notebook = first.namespace.get("__name__", "__main__")
    names = (call.func for call in first.calls if isinstance(call.func, ast.Name))
    values = (value for name in names if (value := first.value(name)) is not MISSING)
    functions = filter(None, map(function_of, values))
    own = (f for f in functions if f.__globals__.get("__name__") == notebook)
    return [first, *filter(None, map(unit_of, own))]


def _cell(cell: Cell, clock: Clock) -> Unit:
    """Return a whole cell."""
    if len(cell.source) > MAX_SOURCE_CHARS:
        raise OutOfTime
    module = ast.parse(cell.source)
    defined = [node for node in module.body if is_function(node) and node.name == cell.function]
    lines = cell.source.split("\n")  # as ast counts them
    entry = defined[-1] if defined else None
    unit = Unit(module, module, lines, "", cell.namespace, clock, entry)
    bound = unit.bound[module]
    unit.arguments = {n: v for n, v in arguments(cell).items() if n not in bound}
    return unit


def _parse(lines: list[str]) -> ast.Module | None:
    if not 0 < sum(map(len, lines)) <= MAX_SOURCE_CHARS:
        return None
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # edited since, or no Python


def _place(filename: str, name_cell: NameCell | None) -> str:
    """Return what people call a source."""
    if name_cell is not None and (named := name_cell(filename)):
        return named
    # IPython 7 does not keep the numbers of the files that ipykernel names.
    if re.search(r"ipykernel_\d+[/\\]\d+\.py$", filename):
        return "an earlier cell"
    numbered = re.match(r"<ipython-input-(\d+)-", filename)
    return f"In[{numbered[1]}]" if numbered else Path(filename).name


def _locate(function: types.FunctionType, module: ast.Module) -> ast.AST | None:
    """Return the node that made a function; None where the source was changed since."""
    name, line = function.__code__.co_name, function.__code__.co_firstlineno
    lambdas: list[ast.AST] = []
    for node in ast.walk(module):
        if is_function(node) and node.name == name:
            if line == min([node.lineno, *(d.lineno for d in node.decorator_list)]):
                return node
        elif isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == line:
            lambdas.append(node)
    return lambdas[0] if len(lambdas) == 1 else None
