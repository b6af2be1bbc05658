"""Find what the ranks will run: the cell, and the functions of other cells and files it calls.

Sources come from `linecache`, where IPython keeps cells; nothing is imported or executed. Functions
of installed libraries are not looked at.
"""

from __future__ import annotations

import ast
import linecache
import re
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...system.source_files import is_library
from ..plan import Call, Cell
from ..task_values import arguments, class_dict, function_of, is_class, visible
from . import value_kinds
from .source_index import MISSING, Unit, is_function

MOST_UNITS = 200
"""More functions than this are not followed: lint must stay quick."""

NameCell = Callable[[str], str | None]
"""Turns a cell's file name into what the user calls it ("In[3]"); None if it is no cell."""


def gather(task: Call | Cell, name_cell: NameCell | None = None) -> list[Unit]:
    """Return the task's own source first, then everything it refers to, each once.

    A launch asks several times, and so do its ranks: the answer is kept as long as the task is.
    Raises `SyntaxError`, `ValueError` or `RecursionError` for a cell that cannot be parsed.
    """
    global _latest
    if _latest is not None and _latest[0]() is task and _latest[1] is name_cell:
        return _latest[2]
    units = _gathered(task, name_cell)
    _latest = (weakref.ref(task, _forget), name_cell, units)
    return units


_latest: tuple[weakref.ref[Call | Cell], NameCell | None, list[Unit]] | None = None


def _forget(task: weakref.ref[Call | Cell]) -> None:
    global _latest
    if _latest is not None and _latest[0] is task:
        _latest = None


def _gathered(task: Call | Cell, name_cell: NameCell | None) -> list[Unit]:
    finder = _Finder(name_cell)
    first = _cell_unit(task) if isinstance(task, Cell) else finder.unit_of(task.function, task)
    units = [first] if first is not None else []
    for unit in units:  # grows while it is walked
        for value in _referred(unit):
            other = finder.unit_of(value) if len(units) < MOST_UNITS else None
            if other is not None:
                units.append(other)
    return units


def _cell_unit(cell: Cell) -> Unit:
    module = ast.parse(cell.source)
    defined = [node for node in module.body if is_function(node) and node.name == cell.function]
    unit = Unit(
        tree=module,
        module=module,
        lines=cell.source.split("\n"),  # as ast counts them
        place="",
        namespace=cell.namespace,
        entry=defined[-1] if defined else None,
    )
    bound = unit.scopes[module].bound
    unit.arguments = {n: v for n, v in arguments(cell).items() if n not in bound}
    return unit


def _referred(unit: Unit) -> Iterator[Any]:
    for name in unit.loads:
        value = unit.value(name)
        if value is not MISSING:
            yield value
            above = unit.parents.get(name)
            if isinstance(above, ast.Attribute):
                yield value_kinds.member(value, above.attr)


class _Finder:
    """Turns functions, methods and classes into units; each piece of source once."""

    def __init__(self, name_cell: NameCell | None) -> None:
        self.name_cell = name_cell
        self.parsed: dict[str, tuple[ast.Module, list[str]] | None] = {}
        self.done: set[ast.AST] = set()

    def unit_of(self, value: Any, call: Call | None = None) -> Unit | None:
        """Return the source of a function, method or class; None if there is none, or it is known.

        `call`: what the ranks call, if this is it.
        """
        function = function_of(value)
        if function is None and not (call and is_class(value)):
            function = _method(value, call is not None)
        filename = function.__code__.co_filename if function else ""
        if function is None or not _has_user_source(filename):
            return None
        parsed = self._parse(filename)
        node, owner = _locate(function, parsed[0]) if parsed else (None, None)
        tree = owner or node
        if parsed is None or tree is None or tree in self.done:
            return None
        self.done.add(tree)
        return Unit(
            tree=tree,
            module=parsed[0],
            lines=parsed[1],
            place=self._place(filename),
            namespace=visible(function),
            entry=node if call else None,
            arguments=arguments(call) if call else {},
        )

    def _parse(self, filename: str) -> tuple[ast.Module, list[str]] | None:
        if filename not in self.parsed:
            self.parsed[filename] = None
            try:
                lines = linecache.getlines(filename)
                module = ast.parse("".join(lines)) if lines else None
            except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
                module = None
            if module is not None:
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


def _method(value: Any, called: bool) -> types.FunctionType | None:
    """Return a function defined in the class that a value is or is an instance of.

    `called`: the one that a call of the value runs.
    """
    members = class_dict(value if is_class(value) else type(value))
    functions = map(function_of, [members.get("__call__")] if called else list(members.values()))
    module = members.get("__module__")
    if type(module) is not str:
        return None
    return next((f for f in functions if f and f.__globals__.get("__name__") == module), None)


def _locate(
    function: types.FunctionType, module: ast.Module
) -> tuple[ast.AST | None, ast.ClassDef | None]:
    """Return the node that made a function, and the class it stands in."""
    code = function.__code__
    lambdas: list[ast.AST] = []
    stack: list[tuple[ast.AST, ast.ClassDef | None]] = [(module, None)]
    while stack:
        node, owner = stack.pop()
        if is_function(node) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node, owner
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            lambdas += [node] if node.lineno == code.co_firstlineno else []
        inner = node if isinstance(node, ast.ClassDef) else None if is_function(node) else owner
        stack += [(child, inner) for child in ast.iter_child_nodes(node)]
    return (lambdas[0], None) if len(lambdas) == 1 else (None, None)


def _has_user_source(filename: str) -> bool:
    is_file = not filename.startswith("<") or filename.startswith("<ipython-input-")
    return is_file and not is_library(filename)
