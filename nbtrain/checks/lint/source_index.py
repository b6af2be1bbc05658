"""Indexes one piece of source, once: its calls, names, parents, and what names hold.

Values of the user's are looked up, never used: only their exact type is asked, in ways that no
class of theirs can hook into.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from ...findings import Finding, Place
from .value_kinds import kind

MISSING = object()
"""What a name holds that is local to the source, or unknown."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def is_function(node: ast.AST | None) -> TypeGuard[FunctionNode]:
    """Return whether a node is a ``def``."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a chain of attributes on a name, else the empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def called(node: ast.AST | None) -> str:
    """Return the last part of what a call calls: ``save`` for ``torch.save(…)``."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def receiver(node: ast.Call) -> ast.expr | None:
    """Return ``x`` of ``x.method(…)``."""
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def devices_of(call: ast.Call) -> list[ast.expr]:
    """Return the arguments that name a device: ``device=…``, and the first of ``.to(…)``."""
    devices = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    return devices + (call.args[:1] if called(call) == "to" and receiver(call) else [])


def names_in(node: ast.AST) -> set[str]:
    """Return every name and attribute that occurs below a node."""
    return {
        inner.id if isinstance(inner, ast.Name) else inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Name, ast.Attribute))
    }


class OutOfTime(Exception):
    """Reading the code took longer than advice may take."""


class Clock:
    """The time that is left for reading code, as this thread uses it: a busy host takes none."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.thread_time() + budget_s

    def check(self) -> None:
        """Raise `OutOfTime` when it is used up."""
        if time.thread_time() > self._end:
            raise OutOfTime


class Binding(NamedTuple):
    """A statement that binds a name. `value` is None where it is no expression of its own."""

    statement: ast.AST
    value: ast.expr | None = None


@dataclass(eq=False)
class Unit:
    """A cell, or a function of an earlier cell or a file, with everything that is in it."""

    tree: ast.AST
    """What is looked at."""

    module: ast.Module
    """The whole source, of which the tree is a part; all line numbers are those of this source."""

    lines: Sequence[str]
    """Those of the whole source."""

    place: str
    """What people call the source, "In[3]"; empty for the cell that is launched."""

    namespace: Mapping[str, Any]
    """What names from outside stand for."""

    clock: Clock

    entry: ast.AST | None = None
    """The function that the ranks call, if it is in here."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of that function."""

    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, ast.AST] = field(default_factory=dict)
    """By node: the function, class or module that binds the names which are bound there."""

    bound: dict[ast.AST, dict[str, list[Binding]]] = field(default_factory=dict)
    """By scope: what binds its names."""

    nodes: list[ast.AST] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)
    loads: list[ast.Name] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bound[self.tree] = {}
        stack = [self.tree]  # of its own: a deeply nested expression must not exhaust Python's
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            if len(self.nodes) % 500 == 0:
                self.clock.check()
            if node is not self.tree:
                above = self.parents[node]
                self.scopes[node] = above if above in self.bound else self.scopes[above]
                self._bind(node)
            if isinstance(node, _SCOPES):
                self.bound[node] = {}
            # All expressions share the nodes of contexts and operators.
            children = [n for n in ast.iter_child_nodes(node) if not isinstance(n, _SHARED)]
            self.parents |= dict.fromkeys(children, node)
            stack += reversed(children)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        names = (node for node in self.nodes if isinstance(node, ast.Name))
        self.loads = [name for name in names if isinstance(name.ctx, ast.Load)]

    def _bind(self, node: ast.AST) -> None:
        """Add the names that a node itself binds to those of its scope."""
        names: Sequence[str | None] = ()
        binding = Binding(node)
        match node:
            case ast.Name(ctx=ast.Store()):
                names, binding = [node.id], self._assigned(node)
            case ast.arg():
                names = [node.arg]
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.ExceptHandler() | ast.MatchAs():
                names = [node.name]
        for name in filter(None, names):
            self.bound[self.scopes[node]].setdefault(name, []).append(binding)

    def _assigned(self, target: ast.expr) -> Binding:
        """Return what binds a name: the statement, and the value if the name gets just that."""
        above = self.parents[target]
        if not isinstance(above, (ast.Tuple, ast.List, ast.Starred)):
            names = {ast.withitem: "context_expr", ast.AugAssign: ""}
            return Binding(above, getattr(above, names.get(type(above), "value"), None))
        statement, value = self._assigned(above)
        if isinstance(above, ast.Starred) or not isinstance(value, (ast.Tuple, ast.List)):
            return Binding(statement)
        same = len(value.elts) == len(above.elts)
        return Binding(statement, value.elts[above.elts.index(target)] if same else None)

    @property
    def is_cell(self) -> bool:
        """Whether this is a whole cell, not a function that it calls."""
        return isinstance(self.tree, ast.Module)

    def character(self, line: int, offset: int) -> int:
        """Return the index in the line of ast's byte offset."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return len(text.encode()[:offset].decode(errors="replace"))

    def finding(self, node: ast.expr | ast.stmt, code: str, message: str, **more: Any) -> Finding:
        """Return a finding of the rule `code` at a node."""
        column = self.character(node.lineno, node.col_offset) + 1
        return Finding(code, message, place=Place(self.place, node.lineno, column), **more)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of a node, its parent, and so on within the unit."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module in which a node stands."""
        return self.scopes.get(node, self.tree)

    def home(self, name: str, scope: ast.AST | None) -> ast.AST | None:
        """Return the scope that binds a name seen from `scope`; None: it is global or built in."""
        here = scope
        while here is not None:
            if name in self.bound[here] and (here is scope or not isinstance(here, ast.ClassDef)):
                return here
            here = self.scopes.get(here)
        return None

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return what binds a name; empty for one from outside."""
        home = self.home(name.id, self.scope(name))
        return self.bound[home][name.id] if home is not None else []

    def value(self, name: ast.Name) -> Any:
        """Return what the notebook hands in under a name, else MISSING."""
        home = self.home(name.id, self.scope(name))
        if home is None:
            return self.namespace.get(name.id, MISSING)
        bound = self.bound[home][name.id]
        if home is self.entry and len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
            return self.arguments.get(name.id, MISSING)
        return MISSING

    def kind(self, name: ast.Name) -> str | None:
        """Return what the notebook hands in under a name; None for what it does not."""
        value = self.value(name)
        return None if value is MISSING else kind(value)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
