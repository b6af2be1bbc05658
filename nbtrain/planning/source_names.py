"""Finds the names that a cell binds, and those that it reads from the notebook. Pure."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator


def bound_names(source: str, filename: str = "<cell>") -> set[str]:
    """Return the names that a cell may bind at its top level, and ``*`` for a star import.

    Also those that its functions declare global. Raises `SyntaxError`.
    """
    table = symtable.symtable(source, filename, "exec")
    names = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.NamedExpr(target=ast.Name(id=name)):  # in a comprehension it binds outside
                names.add(name)
            case ast.Global(names=declared):  # a function that the cell may call
                names.update(declared)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                names.add("*")
    return names


def names_read(source: str, filename: str = "<cell>") -> set[str]:
    """Return the names that a cell may take from the notebook, those of its functions included.

    Names of Python's builtins are among them. A name that the cell binds before it first reads it
    is not; nor is a name that only a text mentions (``globals()["x"]``, ``eval``). Raises
    `SyntaxError`.
    """
    table = symtable.symtable(source, filename, "exec")
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    scopes = table.get_children()
    while scopes:
        scope = scopes.pop()
        names |= {s.get_name() for s in scope.get_symbols() if s.is_global()}
        scopes += scope.get_children()
    bound: set[str] = set()
    read: set[str] = set()
    for statement in ast.parse(source).body:
        unseen = set(_names_unseen_by_symtable(statement))
        names |= unseen
        read |= unseen | _names_loaded(statement)
        bound |= always_bound_names(statement) - read
    return names - bound


def _names_unseen_by_symtable(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads and that a symbol table does not count as read.

    ``+=`` and ``del`` read names outside of functions; magics get their names in a text.
    """
    stack: list[tuple[ast.AST, bool]] = [(statement, False)]
    while stack:
        node, inside = stack.pop()
        match node:
            case ast.If(
                test=ast.Compare(
                    left=ast.Constant(value=name),
                    ops=[ast.In()],
                    comparators=[ast.Call(func=ast.Name(id="globals" | "dir"), args=[])],
                ),
                body=[ast.Delete(targets=[ast.Name(id=deleted)])],
                orelse=[],
            ) if name == deleted:  # if "x" in globals(): del x, which needs no x
                continue
            case ast.AugAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Del()):
                if not inside:
                    yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"))), args=args
            ):
                for text in [a.value for a in args if isinstance(a, ast.Constant)]:
                    yield from re.findall(r"[A-Za-z_]\w*", str(text))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        stack += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def _names_loaded(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may read before it binds its own, builtins included."""
    own: set[str] = set()
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        own = {statement.name}  # in its body; in its bases and defaults, it is not bound yet
    elif isinstance(statement, ast.For):
        own = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
    body = {n for part in (getattr(statement, "body", ()) if own else ()) for n in ast.walk(part)}
    names: set[str] = set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name not in own or node not in body:
                names.add(name)
            case ast.Global(names=declared):
                names.update(declared)
    return names


def always_bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds on every path.

    Empty for compound statements, except definitions and a ``for`` over a list that is not empty.
    """
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {(a.asname or a.name).partition(".")[0] for a in aliases}
        case ast.Assign(targets=targets):
            names = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            return {name.id for name in names if isinstance(name.ctx, ast.Store)}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return {name}
        case ast.For(target=ast.Name(id=name), iter=ast.List(elts=items) | ast.Tuple(elts=items)):
            return {name} if any(not isinstance(each, ast.Starred) for each in items) else set()
    return set()
