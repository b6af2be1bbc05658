"""Which statements of earlier cells the training needs, found without running any of them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence

from ..lint.facts import called, dotted, is_function, receiver
from .statements import Statement

_SEEDS = frozenset({"seed", "manual_seed", "manual_seed_all", "set_seed", "seed_everything"})
_MAY_CHANGE = {"exec", "eval", "setattr", "delattr", "next", "open"}
_SHOWS = frozenset(
    {"display", "pprint", "show", "plot", "imshow", "head", "tail", "describe", "info", "summary"}
    | (set(dir(builtins)) - _MAY_CHANGE)
)
"""Calls that leave what they are given as it is."""

_CHANGES = frozenset({"apply", "append", "extend", "update", "load_state_dict", "add_tokens"}) | {
    *("add_special_tokens", "resize_token_embeddings", "to", "cpu", "cuda", "half", "float", "fit"),
    *("train", "eval", "pop", "insert", "sort", "shuffle", "setdefault", "register_buffer"),
}
_SETTINGS = frozenset({"os.environ", "sys.path"})
_NOT_OURS = frozenset({"nbtrain", "plt", "notebook_launcher", "debug_launcher", "get_ipython"})
"""Calls on these start other trainings, or draw."""


def needed(
    statements: Sequence[Statement], wanted: Iterable[str]
) -> tuple[list[Statement], set[str]]:
    """Return the statements that make what is wanted, in their order, and the names none makes.

    Backwards from the end: a statement counts if it binds a name that is needed after it, or may
    change what such a name holds; in doubt it does. What functions read is needed at the end.
    """
    modules = {n for s in statements if s.is_import for n in s.binds}
    made = {n for s in statements if s.is_definition for n in s.settles}
    sets = {n: s.binds for s in statements if len(s.binds) > 1 for n in made & s.settles}
    late = set(wanted)
    while True:
        live, chosen = set(late), list[Statement]()
        for one in reversed(statements):
            calls = {n for name in one.reads & sets.keys() for n in sets[name]}  # `global n`
            binds = one.binds if one.is_definition else one.binds | calls
            if not (binds & (live | {"*"}) or _acts(one, live, modules, made)):
                continue
            chosen.append(one)
            live = (live - one.settles) | one.reads
        of_functions = {n for s in chosen if _has_functions(s.node) for n in s.reads}
        if of_functions <= late:
            break
        late |= of_functions
    bound = {n for s in chosen for n in s.binds}
    return chosen[::-1], set() if "*" in bound else live - bound - set(dir(builtins))


def is_seed(node: ast.stmt) -> bool:
    """Return whether a statement does nothing but seed random numbers."""
    return isinstance(node, ast.Expr) and called(node.value) in _SEEDS


def seeds(source: str) -> bool:
    """Return whether a source seeds random numbers anywhere."""
    return any(called(node) in _SEEDS for node in ast.walk(ast.parse(source)))


def _has_functions(node: ast.stmt) -> bool:
    return any(is_function(n) or isinstance(n, ast.Lambda) for n in ast.walk(node))


def _acts(one: Statement, live: set[str], modules: set[str], made: set[str]) -> bool:
    """Return whether a statement may change what a name that is needed holds, or draws seeds."""
    if one.of_ipython or one.is_definition or one.is_import:
        return False
    values = live - modules - made
    if isinstance(one.node, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
        if one.reads & values:
            values = values | one.binds  # `for p in model.parameters(): p.requires_grad = False`
        inner = (n for n in ast.walk(one.node) if isinstance(n, ast.stmt) and n is not one.node)
        return any(_changes(n, values, live & modules) for n in inner)
    return _changes(one.node, values, live & modules)


def _changes(node: ast.stmt, values: set[str], modules: set[str]) -> bool:
    targets: list[ast.expr] = []
    match node:
        case ast.Expr(value=ast.Call() as call):
            return _call_changes(call, values, modules)
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets = [target]
    if any(dotted(getattr(t, "value", None)) in _SETTINGS for t in targets):
        return True
    stored = {_root(t) for t in targets if isinstance(t, (ast.Attribute, ast.Subscript))}
    if stored & (values | modules):
        return True
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Call) or not _names(receiver(value)) & values:
        return False
    return called(value) in _CHANGES or called(value).endswith("_")


def _call_changes(call: ast.Call, values: set[str], modules: set[str]) -> bool:
    name, root = called(call), _root(call.func)
    if name in _SEEDS or dotted(receiver(call)) in _SETTINGS:
        return True
    if name in _SHOWS or root in _NOT_OURS:
        return False
    return bool(_names(call) & values) or root in modules


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return dotted(node)


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node else set()
