"""One piece of source, indexed once: its calls, names, parents, scopes, and what names hold.

Values of the user's are looked up, never used: only their exact type is asked, in ways that no
class of theirs can hook into.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

MISSING = object()
"""What a name holds that is local to the source, or unknown."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ScopeNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module


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


def names_in(node: ast.AST) -> set[str]:
    """Return every name and attribute that occurs below a node."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.add(inner.attr)
    return found


@dataclass(frozen=True)
class Binding:
    """A statement that binds a name. `value` is None where it is no expression of its own."""

    statement: ast.AST
    value: ast.expr | None = None


@dataclass(eq=False)
class Scope:
    """The names that one function, class body or module binds."""

    node: ScopeNode
    parent: Scope | None
    bound: dict[str, list[Binding]] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    declared: set[str] = field(default_factory=set)

    def bind(self, name: str, statement: ast.AST, value: ast.expr | None = None) -> None:
        self.bound.setdefault(name, []).append(Binding(statement, value))


@dataclass(eq=False)
class Unit:
    """A cell, or a function or class of an earlier cell or a file, with everything found in it.

    `tree` is what is looked at; line numbers and `lines` are those of the whole source. `entry`
    is the function that the ranks call, if it is in here, and `arguments` what they hand it.
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
    calls: list[ast.Call] = field(default_factory=list)
    loads: list[ast.Name] = field(default_factory=list)
    nodes: list[ast.AST] = field(default_factory=list)

    def __post_init__(self) -> None:
        _Indexer(self).index()

    @property
    def is_cell(self) -> bool:
        """Whether this is the cell (or the first function) itself, not what it refers to."""
        return isinstance(self.tree, ast.Module)

    def column(self, node: ast.expr | ast.stmt) -> int:
        """Return the node's 1-based column in characters (ast counts bytes)."""
        return self.character(node.lineno, node.col_offset) + 1

    def character(self, line: int, offset: int) -> int:
        """Return the index in the line of ast's byte offset."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return len(text.encode()[:offset].decode(errors="replace"))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of a node, its parent, and so on within the unit."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def scope(self, node: ast.AST) -> Scope:
        """Return the scope a node's names are looked up in."""
        around = self.around.get(node) or self.scopes.get(self.tree)
        return around if around is not None else Scope(self.module, None)

    def home(self, name: str, scope: Scope) -> Scope | None:
        """Return the scope that binds a name seen from `scope`; None: it is global or built in."""
        inner, here = scope, scope
        while True:
            hidden = isinstance(here.node, ast.ClassDef) and here is not inner
            if name in here.declared and here.parent is not None:
                root = self.scopes.get(self.tree)
                return root if root and isinstance(root.node, ast.Module) else None
            if name in here.bound and not hidden:
                return here
            if here.parent is None:
                return None
            here = here.parent

    def bindings(self, name: str, node: ast.AST) -> list[Binding]:
        """Return what binds the name as seen from a node; empty for a name from outside."""
        home = self.home(name, self.scope(node))
        return home.bound[name] if home is not None and name in home.bound else []

    def value(self, name: str, node: ast.AST) -> Any:
        """Return what the notebook hands in under a name seen from `node`, else MISSING."""
        home = self.home(name, self.scope(node))
        if home is None:
            return self.namespace.get(name, MISSING)
        if home.node is self.entry and name in home.params and len(home.bound[name]) == 1:
            return self.arguments.get(name, MISSING)
        return MISSING


class _Indexer:
    """Fills a unit in one pass."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def index(self) -> None:
        # A stack of its own: a deeply nested expression must not exhaust Python's.
        stack: list[tuple[ast.AST, Scope | None]] = [(self.unit.tree, None)]
        while stack:
            node, scope = stack.pop()
            self.unit.nodes.append(node)
            if scope is not None:
                self.unit.around[node] = scope
            inner = self._look(node, scope)
            outside: tuple[object, ...] = ()
            if is_function(node):  # evaluated where the function is defined
                outside = (*node.decorator_list, node.returns)
            for child in reversed(_children(node)):
                self.unit.parents[child] = node
                stack.append((child, scope if scope and child in outside else inner))

    def _look(self, node: ast.AST, scope: Scope | None) -> Scope | None:
        if isinstance(node, ast.Call):
            self.unit.calls.append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.unit.loads.append(node)
        if scope is not None and isinstance(node, _BINDING):
            _bind(scope, node)
        if not isinstance(node, ScopeNode):
            return scope
        inner = Scope(node, scope)
        if not isinstance(node, (ast.ClassDef, ast.Module)):
            for arg in _all_args(node.args):
                inner.params.add(arg.arg)
                inner.bind(arg.arg, arg)
        self.unit.scopes[node] = inner
        return inner


def _children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes below one, but for contexts and operators: all expressions share those."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, _LOOKED_AT)]
        elif isinstance(value, _LOOKED_AT):
            found.append(value)
    return found


_LOOKED_AT = (
    *(ast.expr, ast.stmt, ast.arg, ast.arguments, ast.keyword, ast.comprehension),
    *(ast.withitem, ast.ExceptHandler, ast.match_case, ast.pattern, ast.alias),
)
_BINDING = (
    ast.stmt,
    ast.NamedExpr,
    ast.comprehension,
    ast.withitem,
    ast.ExceptHandler,
    ast.MatchAs,
)


def _all_args(args: ast.arguments) -> list[ast.arg]:
    rest = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]


def _bind(scope: Scope, node: ast.AST) -> None:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            scope.bind(node.name, node)
        case ast.Assign():
            for target in node.targets:
                _bind_target(scope, node, target, node.value)
        case ast.AnnAssign(value=ast.expr()):
            _bind_target(scope, node, node.target, node.value)
        case ast.AugAssign():
            _bind_target(scope, node, node.target, None)
        case ast.NamedExpr():
            _bind_target(scope, node, node.target, node.value)
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            _bind_target(scope, node, node.target, None)
        case ast.withitem(optional_vars=ast.expr() as target):
            _bind_target(scope, node, target, node.context_expr)
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                scope.bind(alias.asname or alias.name.partition(".")[0], node)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            scope.bind(name, node)
        case ast.Global() | ast.Nonlocal():
            scope.declared.update(node.names if isinstance(node, ast.Global) else ())
        case _:
            pass


def _bind_target(
    scope: Scope, statement: ast.AST, target: ast.expr, value: ast.expr | None
) -> None:
    if isinstance(target, ast.Name):
        scope.bind(target.id, statement, value)
    elif isinstance(target, ast.Starred):
        _bind_target(scope, statement, target.value, None)
    elif isinstance(target, (ast.Tuple, ast.List)):
        values: Sequence[ast.expr | None] = [None] * len(target.elts)
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            values = value.elts
        for inner, one in zip(target.elts, values, strict=True):
            _bind_target(scope, statement, inner, one)
