"""Find what is read: the task's own source, and the notebook's functions that it calls directly.

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

from ...system.source_files import is_library
from ..plan import Call, Cell
from ..task_values import arguments, function_of, visible
from .source_index import MISSING, Clock, OutOfTime, Unit, is_function

MOST_CHARACTERS = 100_000
"""Characters of a source that is read; the parser, which no clock stops, takes 80 ms for them."""

NameCell = Callable[[str], str | None]
"""Turns a cell's file name into what the user calls it ("In[3]"); None if it is no cell."""


def gather(task: Call | Cell, clock: Clock, name_cell: NameCell | None = None) -> list[Unit]:
    """Return the task's own source, then the functions of the same notebook that it calls.

    Empty where it has no source. Raises `OutOfTime`, and what `ast.parse` raises for a cell.
    """
    finder = _Finder(clock, name_cell)
    first: Unit | None = None
    if isinstance(task, Cell):
        first = finder.unit_of_cell(task)
    elif (function := function_of(task.function)) is not None:
        first = finder.unit_of(function, task)
    if first is None:
        return []
    units, notebook = [first], first.namespace.get("__name__", "__main__")
    for call in first.calls:
        value = first.value(call.func) if isinstance(call.func, ast.Name) else MISSING
        other = None if value is MISSING else function_of(value)
        if other is not None and other.__globals__.get("__name__") == notebook:
            unit = finder.unit_of(other)
            units += [unit] if unit is not None else []
    return units


class _Finder:
    """Turns cells and functions into units, each function once."""

    def __init__(self, clock: Clock, name_cell: NameCell | None) -> None:
        self.clock, self.name_cell = clock, name_cell
        self.parsed: dict[str, tuple[ast.Module, list[str]] | None] = {}
        self.done: set[ast.AST] = set()

    def unit_of_cell(self, cell: Cell) -> Unit:
        """Return a whole cell."""
        if len(cell.source) > MOST_CHARACTERS:
            raise OutOfTime
        module = ast.parse(cell.source)
        defined = [node for node in module.body if is_function(node) and node.name == cell.function]
        unit = Unit(
            tree=module,
            module=module,
            lines=cell.source.split("\n"),  # as ast counts them
            place="",
            namespace=cell.namespace,
            clock=self.clock,
            entry=defined[-1] if defined else None,
        )
        bound = unit.bound[module]
        unit.arguments = {n: v for n, v in arguments(cell).items() if n not in bound}
        return unit

    def unit_of(self, function: types.FunctionType, call: Call | None = None) -> Unit | None:
        """Return the source of a function; None if there is none, or it was returned before.

        `call`: what the ranks call, if this is it.
        """
        filename = function.__code__.co_filename
        parsed = self._parse(filename)
        node = _locate(function, parsed[0]) if parsed else None
        if parsed is None or node is None or node in self.done:
            return None
        self.done.add(node)
        return Unit(
            tree=node,
            module=parsed[0],
            lines=parsed[1],
            place=self._place(filename),
            namespace=visible(function),
            clock=self.clock,
            entry=node if call else None,
            arguments=arguments(call) if call else {},
        )

    def _parse(self, filename: str) -> tuple[ast.Module, list[str]] | None:
        self.clock.check()
        if filename not in self.parsed:
            self.parsed[filename] = None
            lines = [] if is_library(filename) else linecache.getlines(filename)
            if 0 < sum(map(len, lines)) <= MOST_CHARACTERS:
                try:
                    module = ast.parse("".join(lines))
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None  # edited since, or no Python
                self.parsed[filename] = (module, [line.rstrip("\r\n") for line in lines])
        return self.parsed[filename]

    def _place(self, filename: str) -> str:
        if self.name_cell is not None and (named := self.name_cell(filename)):
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
