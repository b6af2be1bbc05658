"""Which statements of earlier cells the training needs, found without running them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence

from ...planning.lint.source_index import called, dotted, is_function, receiver
from .statements import Statement

_SEEDS = frozenset({"seed", "manual_seed", "manual_seed_all", "set_seed", "seed_everything"})
_MAY_CHANGE = {"exec", "eval", "setattr", "delattr", "next", "open"}
_SHOWS = frozenset(
    {"display", "pprint", "show", "plot", "imshow", "head", "tail", "describe", "info", "summary"}
    | (set(dir(builtins)) - _MAY_CHANGE)
)
"""Calls that do not change their arguments."""

_CHANGES = frozenset({"apply", "append", "extend", "update", "load_state_dict", "add_tokens"}) | {
    *("add_special_tokens", "resize_token_embeddings", "to", "cpu", "cuda", "half", "float", "fit"),
    *("train", "eval", "pop", "insert", "sort", "shuffle", "setdefault", "register_buffer"),
}
_SETTINGS = frozenset({"os.environ", "sys.path"})
_IGNORED = frozenset({"nbtrain", "plt", "notebook_launcher", "debug_launcher", "get_ipython"})
"""Names whose calls start other trainings, or draw."""


def needed(
    statements: Sequence[Statement], wanted: Iterable[str]
) -> tuple[list[Statement], set[str]]:
    """Return the statements that make the wanted names, in order, and the names that none makes.

    Statements are read backwards: one is needed if it binds a name that is needed later, or may
    change that name's value; in doubt it is. What functions read is needed at the end.
    """
    modules = {n for s in statements if s.is_import for n in s.binds}
    made = {n for s in statements if s.is_definition for n in s.settles}
    sets = {n: s.binds for s in statements if len(s.binds) > 1 for n in made & s.settles}
    late = set(wanted)
    while True:
        live, chosen = set(late), list[Statement]()
        for statement in reversed(statements):
            calls = {n for name in statement.reads & sets.keys() for n in sets[name]}  # `global n`
            binds = statement.binds if statement.is_definition else statement.binds | calls
            if not (binds & (live | {"*"}) or _acts(statement, live, modules, made)):
                continue
            chosen.append(statement)
            live = (live - statement.settles) | statement.reads
        of_functions = {n for s in chosen if _has_functions(s.node) for n in s.reads}
        if of_functions <= late:
            break
        late |= of_functions
    bound = {n for s in chosen for n in s.binds}
    return chosen[::-1], set() if "*" in bound else live - bound - set(dir(builtins))


def is_seed(node: ast.stmt) -> bool:
    """Return whether a statement only seeds random numbers."""
    return isinstance(node, ast.Expr) and called(node.value) in _SEEDS


def seeds(source: str) -> bool:
    """Return whether a source seeds random numbers anywhere."""
    return any(called(node) in _SEEDS for node in ast.walk(ast.parse(source)))


def _has_functions(node: ast.stmt) -> bool:
    return any(is_function(n) or isinstance(n, ast.Lambda) for n in ast.walk(node))


def _acts(statement: Statement, live: set[str], modules: set[str], made: set[str]) -> bool:
    """Return whether a statement may change the value of a needed name, or seeds."""
    if statement.of_ipython or statement.is_definition or statement.is_import:
        return False
    values = live - modules - made
    if statement.reads & values and hasattr(statement.node, "body"):
        values |= statement.binds  # `for p in model.parameters(): p.requires_grad = False`
    inner = (node for node in ast.walk(statement.node) if isinstance(node, ast.stmt))
    return any(_changes(node, values, live & modules) for node in inner)


def _changes(node: ast.stmt, values: set[str], modules: set[str]) -> bool:
    value: ast.expr | None = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call):
        return _call_changes(value, values, modules)
    for target in getattr(node, "targets", [getattr(node, "target", None)]):
        is_part = isinstance(target, (ast.Attribute, ast.Subscript))
        if is_part and (dotted(target.value) in _SETTINGS or _root(target) in values | modules):
            return True
    if not isinstance(value, ast.Call) or not _names(receiver(value)) & values:
        return False
    return called(value) in _CHANGES or called(value).endswith("_")


def _call_changes(call: ast.Call, values: set[str], modules: set[str]) -> bool:
    name, root = called(call), _root(call.func)
    if name in _SEEDS or dotted(receiver(call)) in _SETTINGS:
        return True
    if name in _SHOWS or root in _IGNORED:
        return False
    return bool(_names(call) & values) or root in modules


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return dotted(node)


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node else set()
