"""All the source of one launch together: what its names stand for, and what a rank alone does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from . import value_kinds
from .source_index import (
    MISSING,
    FunctionNode,
    Unit,
    arguments_of,
    called,
    dotted,
    is_function,
    names_in,
    receiver,
)

_OPTIMIZER = re.compile(
    r"SGD|Adam(W|ax)?(8bit)?|(N|R|Sparse)Adam|RMSprop|Ada(grad|delta|factor)|LBFGS|ASGD|Rprop"
    r"|Muon|Lion"
)
_LOADER = re.compile(r"loader|(^|_)dl($|_)", re.IGNORECASE)
_RANK = re.compile(
    r"(^|_)(rank|main_process|last_process|process_index|master|global_zero|process_zero|chief"
    r"|is_main|main_rank|rank0|rank_zero)($|_)",
    re.IGNORECASE,
)
_RANK_VARIABLE = re.compile(r"(LOCAL_|GLOBAL_|NODE_)?RANK|SLURM_PROCID|SLURM_LOCALID")
_PASSES_ON = frozenset(
    {"int", "bool", "str", "Path", "join", "joinpath", "format", "get", "getenv", "with_suffix"}
)
_LIBRARIES = frozenset({"torch", "np", "numpy", "joblib", "pickle", "accelerator"})
_LEAVES = frozenset({"exit", "_exit", "abort"})


class Program:
    """The units of a launch, and what is certain of all of them together."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.calls = [(unit, call) for unit in units for call in unit.calls]
        self.names = frozenset(_identifiers(units))
        self.functions: dict[str, list[tuple[Unit, FunctionNode]]] = {}
        for unit in units:
            for node in filter(is_function, unit.nodes):
                self.functions.setdefault(node.name, []).append((unit, node))
        made = [name for name, value in _assignments(units) if called(value) == "Accelerator"]
        self.accelerators = frozenset(made)
        captured = (self.captured(load, unit) for unit in units for load in unit.loads)
        makes_one = any(called(call) == "Accelerator" for _, call in self.calls)
        self.accelerated = makes_one or "accelerator" in captured
        self.rankish: set[str] = set()
        self._find_rankish()
        self._exits: dict[ast.AST, set[ast.stmt]] = {}
        self._reached = self._find_reached()

    def is_accelerator(self, node: ast.AST | None, unit: Unit) -> bool:
        """Return whether an expression is the Accelerator, as far as names tell."""
        if isinstance(node, ast.Call):
            return called(node) == "Accelerator"
        name = _last(node)
        if not name:
            return False
        if name in self.accelerators or "accelerator" in name.lower():
            return True
        return node is not None and self.captured(node, unit) == "accelerator"

    def captured(self, node: ast.AST, unit: Unit) -> str:
        """Return the kind of the notebook's value that an expression names; '' if it is none."""
        value = unit.value_of(node)
        return "" if value is MISSING else value_kinds.kind(value)

    def mentions_rank(self, node: ast.AST) -> bool:
        """Return whether an expression depends on which rank evaluates it."""
        names = names_in(node)
        if not names.isdisjoint(self.rankish) or any(map(_RANK.search, names)):
            return True
        texts = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
        return any(isinstance(text, str) and _RANK_VARIABLE.fullmatch(text) for text in texts)

    def runs_on_one_rank(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether only some ranks get to a node, or nothing shows that all do.

        True in doubt: for a function whose callers are not in sight, say.
        """
        return self.guarded(node, unit) or unit.function_around(node) not in self._reached

    def skipped(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether a node is behind a test of the rank, or in a function nobody mentions."""
        return self.guarded(node, unit) or any(
            is_function(above) and self._is_idle(above, unit) for above in unit.ancestors(node)
        )

    def _is_idle(self, function: FunctionNode, unit: Unit) -> bool:
        owner = unit.parents.get(function)
        called_by_others = (
            function in (unit.entry, unit.tree)
            or bool(function.decorator_list)
            or function.name.startswith("__")
            or (isinstance(owner, ast.ClassDef) and bool(owner.bases))
        )
        return not called_by_others and function.name not in self.names

    def guarded(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether a test of the rank stands between a node and its function's start."""
        below = node
        for above in unit.ancestors(node):
            if any(map(self.mentions_rank, _decides(above, below))):
                return True
            if isinstance(below, ast.stmt) and below in self._after_an_exit(above):
                return True
            if is_function(above):
                return False
            below = above
        return False

    def _after_an_exit(self, above: ast.AST) -> set[ast.stmt]:
        """Return the statements below a node that come after ``if not rank_0: return``."""
        if above not in self._exits:
            self._exits[above] = statements = set()
            for block in blocks(above):
                tests = (self.mentions_rank(s.test) if _leaves(s) else False for s in block)
                left = next((place for place, test in enumerate(tests) if test), len(block))
                statements.update(block[left + 1 :])
        return self._exits[above]

    def _find_reached(self) -> set[ast.AST]:
        """Return the functions that every rank gets to, as far as calls by name show."""
        calls: dict[ast.AST, list[tuple[Unit, ast.Call]]] = {}
        for unit, call in self.calls:
            root = dotted(receiver(call)).partition(".")[0]
            if called(call) in self.functions and root not in _LIBRARIES:
                calls.setdefault(unit.function_around(call), []).append((unit, call))
        starts = [unit.entry for unit in self.units] + [u.tree for u in self.units if u.is_cell]
        stack = [node for node in starts if node is not None]
        reached: set[ast.AST] = set()
        while stack:
            node = stack.pop()
            if node in reached:
                continue
            reached.add(node)
            for unit, call in calls.get(node, []):
                if self.guarded(call, unit):
                    continue
                for _, function in self.functions[called(call)]:
                    if not any(map(self.mentions_rank, function.decorator_list)):
                        stack.append(function)
        return reached

    def _find_rankish(self) -> None:
        """Collect the names that hold something a rank tells itself apart by, wherever set."""
        assigned = list(_assignments(self.units))
        for unit in self.units:
            for node in unit.nodes:
                if isinstance(node, ast.Return) and node.value is not None:
                    function = unit.function_around(node)
                    assigned += [(function.name, node.value)] if is_function(function) else []
        constructors = _constructors(self.units)
        for _unit, call in self.calls:
            known = [function for _, function in self.functions.get(called(call), [])]
            constructor = constructors.get(called(call))
            for function in (*known, constructor) if constructor else known:
                params = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
                is_method = isinstance(call.func, ast.Attribute) or function is constructor
                if is_method and params[:1] == ["self"]:
                    params = params[1:]
                assigned += zip(params, call.args, strict=False)
        assigned = [(name, value) for name, value in assigned if _passes_on(value)]
        for _ in range(5):
            new = {name for name, value in assigned if self.mentions_rank(value)}
            if new <= self.rankish:
                break
            self.rankish |= new


def _constructors(units: Iterable[Unit]) -> dict[str, FunctionNode]:
    """Return the ``__init__`` of each class, by the class's name."""
    return {
        cls.name: function
        for unit in units
        for cls in unit.nodes
        if isinstance(cls, ast.ClassDef)
        for function in cls.body
        if is_function(function) and function.name == "__init__"
    }


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the lists of statements that stand directly in a node."""
    parts = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [part for part in parts if isinstance(part, list)]


def _decides(above: ast.AST, below: ast.AST) -> list[ast.expr]:
    """Return the expressions of a node that decide whether the part of it `below` runs."""
    match above:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return [test] if test is not below else []
        case ast.BoolOp(values=values):
            return values[: values.index(below)]  # type: ignore[arg-type]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return [item.context_expr for item in items if item is not below]
        case ast.Match(subject=subject):
            return [subject]
    return []


def _leaves(statement: ast.stmt) -> TypeGuard[ast.If]:
    if not isinstance(statement, ast.If):
        return False
    last = statement.body[-1]
    if isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise)):
        return True
    return isinstance(last, ast.Expr) and called(last.value) in _LEAVES


def _identifiers(units: Iterable[Unit]) -> Iterator[str]:
    for unit in units:
        for node in unit.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id="torch"), attr="accelerator"):
                    pass  # torch's word for any GPU, no Accelerator
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    yield name
                case ast.alias(name=str(path)) | ast.ImportFrom(module=str(path)):
                    yield from path.split(".")


def _assignments(units: Iterable[Unit]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of plain assignments, to attributes and by keyword arguments too."""
    for unit in units:
        for node in unit.nodes:
            match node:
                case ast.keyword(arg=str(name), value=value):
                    yield name, value
                case ast.Assign(targets=targets, value=value):
                    yield from ((_last(target), value) for target in targets if _last(target))
                case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                    yield _last(node.target), node.value


def _last(node: ast.AST | None) -> str:
    """Return ``c`` for ``a.b.c``; '' for what is no chain of names."""
    return dotted(node).rpartition(".")[2]


def _passes_on(value: ast.expr) -> bool:
    """Return whether what a value depends on is still in it: no data, no model made from it."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and node.args and called(node) not in _PASSES_ON:
            return False
        if isinstance(node, (ast.Dict, ast.List, ast.Set, ast.Lambda, ast.ListComp)):
            return False
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
    return True


def is_optimizer_call(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Return whether a call makes a torch optimizer."""
    name = called(node)
    if not name[:1].isupper() or not isinstance(node, ast.Call):
        return False
    path = dotted(node.func).split(".")
    return _OPTIMIZER.fullmatch(name) is not None or (
        "optim" in path[:-1] and "lr_scheduler" not in path
    )


def role(name: ast.Name, unit: Unit) -> str:
    """Return what a name is certain to hold: a "loader", an "optimizer", …; '' in doubt.

    By the type of the notebook's value, the calls that make it, or the name of a parameter.
    """
    value = unit.value(name)
    if value is not MISSING:
        return value_kinds.kind(value)
    bound = unit.bindings(name)
    if len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
        is_optimizer = name.id.lower().startswith("opt")
        return "loader" if _LOADER.search(name.id) else "optimizer" if is_optimizer else ""
    if bound and all(is_optimizer_call(binding.value) for binding in bound):
        return "optimizer"
    loaders = ("DataLoader", "StatefulDataLoader")
    return "loader" if bound and all(called(b.value) in loaders for b in bound) else ""


def models_of(optimizer: ast.Call) -> list[str]:
    """Return the names whose ``.parameters()`` an optimizer's call is given."""
    names = [
        dotted(receiver(inner))
        for argument in arguments_of(optimizer)
        for inner in ast.walk(argument)
        if isinstance(inner, ast.Call) and called(inner) in ("parameters", "named_parameters")
    ]
    return list(dict.fromkeys(names))


def defines_backward(call: ast.Call, unit: Unit) -> bool:
    """Return whether a call stands in a method that is a backward pass itself."""
    return any(is_function(a) and a.name == "backward" for a in unit.ancestors(call))
