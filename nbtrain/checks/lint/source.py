"""Reads the source of a task: the cell or function itself, and functions that it calls directly.

Sources come from `linecache`, where IPython keeps cells; nothing is imported or executed. What
another module defines is not read: a library in the notebook's folder, and not where packages are
installed, would count as the user's file, and take minutes to read.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard

from ...findings import Finding, Place
from ...planning.plan import Call, Cell
from ...planning.task_values import arguments, function_of, module_of, visible
from ...system.source_files import is_library
from ...transport.limits import MAX_TEXT_CHARS

NameCell = Callable[[str], str | None]
"""Returns "In[3]" for the file name of a cell, and None for other files."""

MISSING = object()
"""The value of a name that is local to the source, or unknown."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (*_FUNCTIONS, ast.ClassDef)
_SCOPES = (*_NAMED, ast.Lambda)

_RANK = re.compile(
    r"(^|_)(rank|main_process|last_process|process_index|master|global_zero|process_zero|chief"
    r"|is_main|main_rank|rank0|rank_zero)($|_)",
    re.IGNORECASE,
)
_RANK_VARIABLE = re.compile(r"(LOCAL_|GLOBAL_|NODE_)?RANK|SLURM_PROCID|SLURM_LOCALID")


class SourceTooLongError(Exception):
    """A cell is too long to be read before a launch."""


class Binding(NamedTuple):
    """A statement that binds a name. `value` is None unless it is a separate expression."""

    statement: ast.AST
    value: ast.expr | None = None


@dataclass(eq=False)
class Source:
    """A cell, or one function of the notebook, as a syntax tree with its names and scopes."""

    tree: ast.Module | FunctionNode | ast.Lambda

    module: ast.Module
    """The whole cell or file that contains the tree; line numbers refer to it."""

    lines: Sequence[str]
    """The lines of the whole cell or file."""

    place: str
    """Its name, "In[3]"; "" for the cell that is launched."""

    namespace: Mapping[str, Any]
    """The values of names that the tree does not define."""

    entry: ast.AST | None = None
    """The function that each rank calls once, if it is in the tree."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The known arguments of that function."""

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        self.bound: dict[ast.AST, dict[str, list[Binding]]] = {self.tree: {}}
        """By function, class or cell: what binds its names."""
        for node in self.nodes:  # from the outside in
            if isinstance(node, _SCOPES):
                self.bound[node] = {}
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                self._scopes[child] = node if node in self.bound else self._scopes[node]
        for node in self.nodes:
            for name, binding in self._bindings_by(node) if node is not self.tree else ():
                self.bound[self.scope(node)].setdefault(name, []).append(binding)
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        self.calls = sorted(calls, key=lambda call: (call.lineno, call.col_offset))
        self.names = set(self._find_names())
        """Every name, attribute and part of an import."""
        self._rank_names = {
            (scope, name)
            for scope, names in self.bound.items()
            for name, bound in names.items()
            if any(binding.value and _is_about_rank(binding.value) for binding in bound)
        }
        self._guarded = set(self._find_guarded())
        self.everywhere = self._find_everywhere()
        """The cell, its entry, and the functions and classes that every rank is certain to call."""

    def _bindings_by(self, node: ast.AST) -> Iterator[tuple[str, Binding]]:
        """Yield the names that a node binds."""
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, self._assignment(node)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], Binding(node)
            case ast.arg(arg=name):
                yield name, Binding(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, Binding(node)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                yield name, Binding(node)
            case ast.MatchAs(name=str(name)):
                yield name, Binding(node)

    def _assignment(self, target: ast.expr) -> Binding:
        """Return what assigns to a name, and the value that the name gets if the source shows it.

        In ``a, b = 1, 2``, the value of ``a`` is ``1``; in ``a, b = f()``, it is None.
        """
        parent = self.parents[target]
        if isinstance(parent, ast.Starred):
            return Binding(self._assignment(parent).statement)
        if isinstance(parent, (ast.Tuple, ast.List)):
            statement, value = self._assignment(parent)
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            same = len(values) == len(parent.elts)
            return Binding(statement, values[parent.elts.index(target)] if same else None)
        if isinstance(parent, ast.AugAssign):
            return Binding(parent)
        return Binding(parent, getattr(parent, "context_expr", getattr(parent, "value", None)))

    def _find_names(self) -> Iterator[str]:
        """Yield the names, attributes, parameters and parts of imports in the tree.

        Leaves out ``torch.accelerator``, and the names that functions and classes are defined by.
        """
        for node in self.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id="torch"), attr="accelerator"):
                    pass  # torch's word for any GPU, no Accelerator
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    yield name
                case ast.alias(name=str(path)) | ast.ImportFrom(module=str(path)):
                    yield from path.split(".")

    def _find_guarded(self) -> Iterator[ast.AST]:
        """Yield the statements and expressions that only run after a test of the rank.

        They are in a branch of it, after an early exit, behind ``and`` or ``or``, in a ``match``,
        or in what a context or a decorator guards.
        """
        for node in self.nodes:
            match node:
                case ast.If() | ast.While() if self.mentions_rank(node.test):
                    yield from (*node.body, *node.orelse)
                case ast.IfExp() if self.mentions_rank(node.test):
                    yield from (node.body, node.orelse)
                case ast.With() | ast.AsyncWith():
                    if any(self.mentions_rank(item.context_expr) for item in node.items):
                        yield from node.body
                case ast.Match() if self.mentions_rank(node.subject):
                    yield from node.cases
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if any(map(_is_about_rank, node.decorator_list)):
                        yield from node.body
                case ast.BoolOp():
                    tests = [self.mentions_rank(value) for value in node.values]
                    yield from node.values[tests.index(True) + 1 :] if any(tests) else ()
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, ())
                for place, statement in enumerate(block if isinstance(block, list) else ()):
                    if _leaves(statement) and self.mentions_rank(statement.test):
                        yield from block[place + 1 :]
                        break

    def _find_everywhere(self) -> set[ast.AST]:
        """Return the cell, its entry, and what they call without a test of the rank."""
        defined = {node.name: node for node in self.nodes if isinstance(node, _NAMED)}
        called_from: dict[ast.AST, list[ast.AST]] = {}
        for call in self.calls:
            if dotted_name(call.func) in defined and not self.is_guarded(call):
                caller = self.outermost(call) or self.tree
                called_from.setdefault(caller, []).append(defined[dotted_name(call.func)])
        waiting = [node for node in (self.tree, self.entry) if node is not None]
        found: set[ast.AST] = set()
        while waiting:
            found.add(caller := waiting.pop())
            waiting += (node for node in called_from.get(caller, ()) if node not in found)
        return found

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of a node, its parent, and so on within the tree."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or cell that contains a node."""
        return self._scopes.get(node, self.tree)

    def outermost(self, node: ast.AST) -> ast.AST | None:
        """Return the function or class around a node that stands in no other one."""
        around = [each for each in self.ancestors(node) if isinstance(each, _NAMED)]
        return around[-1] if around else None

    def is_guarded(self, node: ast.AST) -> bool:
        """Return whether a node runs only after a test of the rank."""
        return node in self._guarded or any(a in self._guarded for a in self.ancestors(node))

    def runs(self, node: ast.AST) -> bool:
        """Return whether a node is in code that every rank is certain to run."""
        return (self.outermost(node) or self.tree) in self.everywhere and not self.is_guarded(node)

    def mentions_rank(self, node: ast.AST) -> bool:
        """Return whether an expression, or a value assigned to a name in it, names the rank."""
        names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
        scopes = ((self.scope_of_name(name.id, self.scope(name)), name.id) for name in names)
        return _is_about_rank(node) or any(each in self._rank_names for each in scopes)

    def is_accelerator(self, node: ast.AST | None) -> bool:
        """Return whether an expression is Accelerate's Accelerator, by its name or its making."""
        made = (b.value for b in self.bindings(node)) if isinstance(node, ast.Name) else ()
        is_named = "accelerator" in dotted_name(node).rpartition(".")[2].lower()
        return is_named or any(called_name(value) == "Accelerator" for value in made)

    def scope_of_name(self, name: str, scope: ast.AST | None) -> ast.AST | None:
        """Return the scope that binds a name for `scope`, or None for a global or built-in name."""
        here = scope
        while here is not None:
            if name in self.bound[here] and (here is scope or not isinstance(here, ast.ClassDef)):
                return here
            here = self._scopes.get(here)
        return None

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return what binds a name; empty for one from outside."""
        scope = self.scope_of_name(name.id, self.scope(name))
        return self.bound[scope][name.id] if scope is not None else []

    def value(self, name: ast.Name) -> Any:
        """Return a name's value in the notebook, or the entry's argument of that name.

        MISSING if there is neither, or a function binds the name for itself.
        """
        scope = self.scope_of_name(name.id, self.scope(name))
        if scope is None:
            return self.namespace.get(name.id, MISSING)
        bound = self.bound[scope][name.id]
        if scope is self.entry and len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
            return self.arguments.get(name.id, MISSING)
        return MISSING

    def is_kind(self, name: ast.Name, kind: str) -> bool | None:
        """Return whether the notebook's value of a name is an instance of the torch class `kind`.

        Without a value, the result is None. False without torch, and for what Accelerate has
        prepared.
        """
        value, torch = self.value(name), sys.modules.get("torch")
        if value is MISSING:
            return None
        if torch is None or module_of(type(value)).startswith("accelerate."):
            return False
        # `isinstance` would ask the value for its `__class__`, which may run the user's code.
        cls: Any = functools.reduce(getattr, kind.split("."), torch)
        return issubclass(type(value), cls)

    def column(self, line: int, byte_offset: int) -> int:
        """Return the index of a character in its line, given ast's byte offset."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return len(text.encode()[:byte_offset].decode(errors="replace"))

    def finding(self, node: ast.expr | ast.stmt, code: str, message: str, **more: Any) -> Finding:
        """Return a finding of the rule `code` at a node."""
        column = self.column(node.lineno, node.col_offset) + 1
        return Finding(code, message, place=Place(self.place, node.lineno, column), **more)


def read(task: Call | Cell, name_cell: NameCell | None = None) -> list[Source]:
    """Return the task's own source, then the functions of other cells that it calls by their names.

    What those call in turn is not read. Empty where it has no source. Raises `SourceTooLongError`,
    and what `ast.parse` raises for a cell.
    """
    parse = functools.cache(_parse_file)
    if isinstance(task, Cell):
        first: Source | None = _read_cell(task)
    else:
        first = _read_function(function_of(task.function), parse, name_cell, arguments(task))
    if first is None:
        return []
    notebook = first.namespace.get("__name__", "__main__")
    calls: dict[FunctionType, list[ast.Call]] = {}
    for call in first.calls:
        if isinstance(call.func, ast.Name) and first.runs(call):
            value = first.value(call.func)
            function = function_of(value) if value is not MISSING else None
            if function is not None and function.__globals__.get("__name__") == notebook:
                calls.setdefault(function, []).append(call)
    sources = [first]
    for function, made in calls.items():
        source = _read_function(function, parse, name_cell)
        if source is not None and source.tree is not first.tree:
            if len(made) > 1 or loops_around(made[0], first):
                source.entry = None
            sources.append(source)
    return sources


def _read_cell(cell: Cell) -> Source:
    """Return the source of a cell. Raises `SourceTooLongError` and `SyntaxError`."""
    if len(cell.source) > MAX_TEXT_CHARS:
        raise SourceTooLongError
    module = ast.parse(cell.source)
    defined = [node for node in module.body if is_function(node) and node.name == cell.function]
    lines = cell.source.split("\n")  # as ast counts them
    entry = defined[-1] if defined else None
    source = Source(module, module, lines, "", cell.namespace, entry)
    source.arguments = {n: v for n, v in arguments(cell).items() if n not in source.bound[module]}
    return source


def _read_function(
    function: FunctionType | None,
    parse: Callable[[str], tuple[ast.Module, list[str]] | None],
    name_cell: NameCell | None,
    given: Mapping[str, Any] | None = None,
) -> Source | None:
    """Return the source of a function, or None if it has no source or the source has changed."""
    parsed = parse(function.__code__.co_filename) if function is not None else None
    if function is None or parsed is None:
        return None
    module, lines = parsed
    code = function.__code__
    found = [
        node
        for node in ast.walk(module)
        if isinstance(node, (*_FUNCTIONS, ast.Lambda))
        if getattr(node, "name", "<lambda>") == code.co_name
        if first_line(node) == code.co_firstlineno
    ]
    if len(found) != 1:
        return None
    place, known = _name_place(code.co_filename, name_cell), given or {}
    return Source(found[0], module, lines, place, visible(function), found[0], known)


def _parse_file(filename: str) -> tuple[ast.Module, list[str]] | None:
    """Return the tree and lines of a cell or of the user's file.

    Other files have no result, nor has one that is empty, longer than `MAX_TEXT_CHARS` or not valid
    Python.
    """
    lines = [] if is_library(filename) else linecache.getlines(filename)
    if not 0 < sum(map(len, lines)) <= MAX_TEXT_CHARS:
        return None
    try:
        return ast.parse("".join(lines)), [line.rstrip("\r\n") for line in lines]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # edited since, or no Python


def _name_place(filename: str, name_cell: NameCell | None) -> str:
    """Return the name of a cell or file for messages: "In[3]", "an earlier cell", "train.py"."""
    if name_cell is not None and (named := name_cell(filename)):
        return named
    # IPython 7 does not keep the numbers of the files that ipykernel names.
    if re.search(r"ipykernel_\d+[/\\]\d+\.py$", filename):
        return "an earlier cell"
    numbered = re.match(r"<ipython-input-(\d+)-", filename)
    return f"In[{numbered[1]}]" if numbered else Path(filename).name


def is_function(node: ast.AST | None) -> TypeGuard[FunctionNode]:
    """Return whether a node is a ``def``."""
    return isinstance(node, _FUNCTIONS)


def first_line(node: ast.AST) -> int:
    """Return the first line of a statement or lambda, including its decorators."""
    nodes = (node, *getattr(node, "decorator_list", ()))
    return min(getattr(each, "lineno", 0) for each in nodes)


def dotted_name(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a chain of attributes on a name, else ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def called_name(node: ast.AST | None) -> str:
    """Return the last name of a called function, ``save`` for ``torch.save(…)``; else ""."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def receiver(node: ast.Call) -> ast.expr | None:
    """Return ``x`` of ``x.method(…)``."""
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def names_in(node: ast.AST) -> set[str]:
    """Return every name and attribute that occurs in a node."""
    return {
        inner.id if isinstance(inner, ast.Name) else inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Name, ast.Attribute))
    }


def loops_around(node: ast.AST, source: Source) -> tuple[ast.For | ast.While, ...]:
    """Return the loops around a node in its own function, the innermost first."""
    scope = source.scope(node)
    around = (a for a in source.ancestors(node) if source.scope(a) is scope and a is not scope)
    return tuple(each for each in around if isinstance(each, (ast.For, ast.While)))


def _is_about_rank(node: ast.AST) -> bool:
    """Return whether the rank is named in an expression."""
    texts = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
    return any(map(_RANK.search, names_in(node))) or any(
        isinstance(text, str) and _RANK_VARIABLE.fullmatch(text) for text in texts
    )


def _leaves(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Return whether a statement is an ``if`` whose body leaves the function, or the loop."""
    last = statement.body[-1] if isinstance(statement, ast.If) else None
    if isinstance(last, ast.Expr):
        return called_name(last.value) in ("exit", "_exit", "abort")
    return isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise))
