"""Find what the ranks will run: the cell, and the functions of other cells and files it calls.

Sources come from `linecache`, where IPython keeps cells; nothing is imported or executed. Functions
of installed libraries are not looked at.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..plan import Call, Cell
from . import values
from .facts import MISSING, Unit, is_function

MOST_UNITS = 200
"""More functions than this are not followed: lint must stay quick."""

NameCell = Callable[[str], str | None]
"""Turns a cell's file name into what the user calls it ("In[3]"); None if it is no cell."""


def gather(task: Call | Cell, name_cell: NameCell | None = None) -> list[Unit]:
    """Return the task's own source first, then everything it refers to, each once.

    Raises `SyntaxError`, `ValueError` or `RecursionError` for a cell that cannot be parsed.
    """
    finder = _Finder(name_cell)
    units: list[Unit] = []
    if isinstance(task, Cell):
        units.append(_cell_unit(task))
    else:
        first = finder.unit_of(task.function, entry=True, call=task)
        if first is None:
            return []
        units.append(first)
    for unit in units:  # grows while it is walked
        for value in _referred(unit):
            if len(units) >= MOST_UNITS:
                return units
            found = finder.unit_of(value)
            if found is not None:
                units.append(found)
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
    unit.arguments = {
        p.name: cell.namespace[p.name]
        for p in cell.parameters
        if p.name in cell.namespace and p.name not in bound
    }
    return unit


def _referred(unit: Unit) -> Iterator[Any]:
    seen: set[str] = set()
    for name in unit.loads:
        value = unit.value(name.id, name)
        if value is MISSING:
            continue
        above = unit.parents.get(name)
        if isinstance(above, ast.Attribute):
            inner = values.member(value, above.attr)
            if inner is not None:
                yield inner
                continue
        if name.id not in seen:
            seen.add(name.id)
            yield value


class _Finder:
    """Turns functions, methods and classes into units; each piece of source once."""

    def __init__(self, name_cell: NameCell | None) -> None:
        self.name_cell = name_cell
        self.parsed: dict[str, tuple[ast.Module, list[str]] | None] = {}
        self.done: set[object] = set()

    def unit_of(self, value: Any, *, entry: bool = False, call: Call | None = None) -> Unit | None:
        function = _function(value)
        if function is None:
            function = None if entry and values.is_class(value) else self._method(value, entry)
        if function is None:
            return None
        filename = function.__code__.co_filename
        if is_library(filename):
            return None
        parsed = self._parse(filename)
        node, owner = _locate(function, parsed[0]) if parsed else (None, None)
        tree = owner or node
        key = (filename, getattr(tree, "lineno", 0), getattr(tree, "col_offset", 0))
        if parsed is None or node is None or tree is None or key in self.done:
            return None
        self.done.add(key)
        return Unit(
            tree=tree,
            module=parsed[0],
            lines=parsed[1],
            place=self._place(filename),
            namespace=_visible(function),
            entry=node if entry else None,
            arguments=_arguments(node, call, owner is not None) if call else {},
        )

    def _method(self, value: Any, call_itself: bool) -> types.FunctionType | None:
        """Return a function defined in the class that a value is or is an instance of."""
        cls = value if values.is_class(value) else type(value)
        members = values.class_dict(cls)
        found = [_function(members["__call__"])] if call_itself and "__call__" in members else []
        found += [] if call_itself else [_function(member) for member in list(members.values())]
        module = members.get("__module__")
        if type(module) is not str:
            return None
        return next(
            (f for f in found if f is not None and f.__globals__.get("__name__") == module), None
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
        named = self.name_cell(filename) if self.name_cell is not None else None
        if named:
            return named
        numbered = re.match(r"<ipython-input-(\d+)-", filename)
        if numbered:
            return f"In[{numbered[1]}]"
        if re.search(r"ipykernel_\d+[/\\]\d+\.py$", filename):
            return "an earlier cell"
        return Path(filename).name


def _function(value: Any) -> types.FunctionType | None:
    """Return the plain function behind methods, partials, caches and honest decorators."""
    for _ in range(20):
        if type(value) in (types.MethodType, staticmethod, classmethod):
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        elif type(value) is functools.partial:
            value = value.func
        elif type(value) is types.FunctionType:
            function: types.FunctionType = value
            value = function.__dict__.get("__wrapped__")
            if value is None:
                return function
        elif type(value) is type(functools.lru_cache(int)):
            value = value.__wrapped__
        else:
            return None
    return None


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


def _visible(function: types.FunctionType) -> Mapping[str, Any]:
    """Return the names a function sees: the globals, and what it closes over."""
    if not function.__closure__:
        return function.__globals__
    seen = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not bound yet
            seen[name] = MISSING
    return seen


def _arguments(node: ast.AST, call: Call, method: bool) -> dict[str, Any]:
    if not (is_function(node) or isinstance(node, ast.Lambda)):
        return {}
    bound: Any = call.function
    args, kwargs = tuple(call.args), dict(call.kwargs)
    while type(bound) is functools.partial:
        bound, args, kwargs = bound.func, (*bound.args, *args), {**bound.keywords, **kwargs}
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    if method and type(bound) is not types.FunctionType:
        names = names[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_library(filename: str) -> bool:
    """Return whether a function's file is installed, the standard library's, or nbtrain's."""
    if filename.startswith("<") and not filename.startswith("<ipython-input-"):
        return True
    parts = Path(filename).parts
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or filename.startswith(_library_folders())
    )


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    own = str(Path(__file__).parent.parent)
    return tuple(f"{folder}/" for folder in (paths["stdlib"], paths["platstdlib"], own))
