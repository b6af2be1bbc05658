"""Finds the names that a source binds, and those that it reads from outside. Pure."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator, Sequence


def bound_names(source: str, filename: str = "<cell>") -> set[str]:
    """Return the names a cell may bind at its top level; contains ``*`` for a star import."""
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
    """Return the names a cell may take from the notebook, those of its functions included.

    Not those that it binds itself before it first reads them. A name that only a text mentions
    (``globals()["x"]``, ``eval``) is not seen.
    """
    table = symtable.symtable(source, filename, "exec")
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    inner = table.get_children()
    while inner:
        scope = inner.pop()
        names |= {s.get_name() for s in scope.get_symbols() if s.is_global()}
        inner += scope.get_children()
    statements = ast.parse(source).body
    names |= {name for statement in statements for name in _changed(statement)}
    return names - _bound_first(statements)


def _changed(statement: ast.AST) -> Iterator[str]:
    """Yield the names that are read where no symbol table shows it.

    By ``+=`` and ``del`` (in a function, a table shows what is global), and by a magic, which gets
    its names in a text.
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
            ) if name == deleted:  # if "x" in globals(): del x
                continue
            case ast.AugAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Del()):
                if not inside:
                    yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"))), args=args
            ):
                texts = [a.value for a in args if isinstance(a, ast.Constant)]
                for text in texts:
                    yield from re.findall(r"[A-Za-z_]\w*", str(text))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        stack += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def _bound_first(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a plain statement binds before any statement reads them."""
    bound: set[str] = set()
    read: set[str] = set()
    for statement in statements:
        read |= _reads(statement)
        bound |= plainly_bound(statement) - read
    return bound


def _reads(statement: ast.stmt) -> set[str]:
    """Return the names a statement may read before it binds its own."""
    names = set(_changed(statement))
    own: set[ast.AST] = set()
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        # What its body means by its own name is what it is by then; a base class is not.
        inside = [n for part in statement.body for n in ast.walk(part)]
        own = {n for n in inside if isinstance(n, ast.Name) and n.id == statement.name}
    if isinstance(statement, ast.For):  # its variable is bound whenever its body runs
        targets = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
        inside = [n for part in statement.body for n in ast.walk(part)]
        own = {n for n in inside if isinstance(n, ast.Name) and n.id in targets}
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if node not in own:
                names.add(name)
            case ast.Global(names=declared):
                names.update(declared)
    return names


def plainly_bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds whatever happens."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {(a.asname or a.name).partition(".")[0] for a in aliases}
        case ast.Assign(targets=targets):
            stores = [n for target in targets for n in ast.walk(target)]
            return {
                n.id for n in stores if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return {name}
        case ast.For(target=ast.Name(id=name), iter=ast.List(elts=items) | ast.Tuple(elts=items)):
            return {name} if any(not isinstance(each, ast.Starred) for each in items) else set()
    return set()
