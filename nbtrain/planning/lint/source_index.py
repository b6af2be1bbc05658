"""One piece of source, indexed once: its calls, names, parents, scopes, and what names hold.

Values of the user's are looked up, never used: only their exact type is asked, in ways that no
class of theirs can hook into.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ...findings import Finding, Place
from ..task_values import held

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


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return the values that a call hands over, positional ones first."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


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


@dataclass(frozen=True)
class Binding:
    """A statement that binds a name. `value` is None where it is no expression of its own."""

    statement: ast.AST
    value: ast.expr | None = None


@dataclass(eq=False)
class Scope:
    """The names that one function, class body or module binds."""

    node: ast.AST
    parent: Scope | None
    bound: dict[str, list[Binding]] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Unit:
    """A cell, or a function or class of an earlier cell or a file, with everything that is in it.

    `tree` is what is looked at; line numbers and `lines` are those of the whole source. `entry`
    is the function that the ranks call, if it is in here, and `arguments` are its arguments.
    """

    tree: ast.AST
    module: ast.Module
    lines: Sequence[str]
    place: str
    namespace: Mapping[str, Any]
    entry: ast.AST | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    around: dict[ast.AST, Scope] = field(default_factory=dict)
    nodes: list[ast.AST] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)
    loads: list[ast.Name] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A stack of its own: a deeply nested expression must not exhaust Python's.
        stack: list[tuple[ast.AST, Scope | None]] = [(self.tree, None)]
        while stack:
            node, scope = stack.pop()
            self.nodes.append(node)
            if scope is not None:
                self.around[node] = scope
                self._bind(node, scope)
            inner = scope
            outside: tuple[object, ...] = ()
            if isinstance(node, _SCOPES):
                inner = self.scopes[node] = Scope(node, scope)
                if is_function(node):  # evaluated where the function is defined
                    outside = (*node.decorator_list, node.returns)
            # All expressions share the nodes of contexts and operators.
            children = [n for n in ast.iter_child_nodes(node) if not isinstance(n, _SHARED)]
            for child in reversed(children):
                self.parents[child] = node
                stack.append((child, scope if scope and child in outside else inner))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        names = (node for node in self.nodes if isinstance(node, ast.Name))
        self.loads = [name for name in names if isinstance(name.ctx, ast.Load)]

    def _bind(self, node: ast.AST, scope: Scope) -> None:
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
            case ast.Global():
                scope.declared.update(node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.ExceptHandler() | ast.MatchAs():
                names = [node.name]
        for name in filter(None, names):
            scope.bound.setdefault(name, []).append(binding)

    def _assigned(self, target: ast.expr) -> Binding:
        """Return what binds a name: the statement, and the value if the name gets just that."""
        above = self.parents[target]
        if not isinstance(above, (ast.Tuple, ast.List, ast.Starred)):
            names = {ast.withitem: "context_expr", ast.AugAssign: ""}
            return Binding(above, getattr(above, names.get(type(above), "value"), None))
        whole = self._assigned(above)
        if isinstance(above, ast.Starred) or not isinstance(whole.value, (ast.Tuple, ast.List)):
            return Binding(whole.statement)
        if len(whole.value.elts) != len(above.elts):
            return Binding(whole.statement)
        return Binding(whole.statement, whole.value.elts[above.elts.index(target)])

    @property
    def is_cell(self) -> bool:
        """Whether this is a whole cell, not a function or class that it refers to."""
        return isinstance(self.tree, ast.Module)

    def character(self, line: int, offset: int) -> int:
        """Return the index in the line of ast's byte offset."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return len(text.encode()[:offset].decode(errors="replace"))

    def finding(
        self, node: ast.expr | ast.stmt, code: str, message: str, refuse: bool = False
    ) -> Finding:
        """Return a finding of the rule `code` at a node, which may refuse the launch."""
        column = self.character(node.lineno, node.col_offset) + 1
        place = Place(self.place, node.lineno, column)
        return Finding(code, message, level="refuse" if refuse else "warn", place=place)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of a node, its parent, and so on within the unit."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def function_around(self, node: ast.AST) -> ast.AST:
        """Return the ``def`` a node stands in; the unit's tree if it stands in none."""
        return next((above for above in self.ancestors(node) if is_function(above)), self.tree)

    def scope(self, node: ast.AST) -> Scope:
        """Return the scope a node's names are looked up in."""
        return self.around.get(node) or self.scopes[self.tree]

    def home(self, name: str, scope: Scope) -> Scope | None:
        """Return the scope that binds a name seen from `scope`; None: it is global or built in."""
        here: Scope | None = scope
        while here is not None:
            if name in here.declared and here.parent is not None:
                return self.scopes[self.tree] if self.is_cell else None
            if name in here.bound and (here is scope or not isinstance(here.node, ast.ClassDef)):
                return here
            here = here.parent
        return None

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return what binds a name; empty for one from outside."""
        home = self.home(name.id, self.scope(name))
        return home.bound.get(name.id, []) if home is not None else []

    def value(self, name: ast.Name) -> Any:
        """Return what the notebook hands in under a name, else MISSING."""
        home = self.home(name.id, self.scope(name))
        if home is None:
            return self.namespace.get(name.id, MISSING)
        bound = home.bound.get(name.id, [])
        if home.node is self.entry and len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
            return self.arguments.get(name.id, MISSING)
        return MISSING

    def value_of(self, node: ast.AST) -> Any:
        """Return what the notebook hands in as ``a``, ``a.b`` or ``a['b']``, else MISSING."""
        match node:
            case ast.Name():
                return self.value(node)
            case ast.Attribute(value=holder, attr=attribute):
                return held(self.value_of(holder)).get(f".{attribute}", MISSING)
            case ast.Subscript(value=holder, slice=ast.Constant(value=str() | int() as key)):
                return held(self.value_of(holder)).get(f"[{key!r}]", MISSING)
        return MISSING


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
