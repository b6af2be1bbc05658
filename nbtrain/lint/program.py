"""All the source of one launch together: what its names stand for, and what a rank alone does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from . import values
from .facts import MISSING, FunctionNode, Unit, called, dotted, is_function, receiver
from .notes import Note

_OPTIMIZER = re.compile(
    r"SGD|Adam(W|ax)?(8bit)?|(N|R|Sparse)Adam|RMSprop|Ada(grad|delta|factor)|LBFGS|ASGD|Rprop"
    r"|Muon|Lion"
)
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


@dataclass(eq=False)
class Program:
    """The units of a launch. Built by `read`."""

    units: Sequence[Unit]
    accelerators: frozenset[str] = frozenset()
    accelerated: bool = False
    names: frozenset[str] = frozenset()
    rankish: set[str] = field(default_factory=set)
    functions: dict[str, list[tuple[Unit, FunctionNode]]] = field(default_factory=dict)
    reached: set[ast.AST] = field(default_factory=set)
    _exits: dict[ast.AST, set[ast.stmt]] = field(default_factory=dict)

    def calls(self) -> Iterator[tuple[Unit, ast.Call]]:
        """Yield every call of every unit."""
        for unit in self.units:
            for call in unit.calls:
                yield unit, call

    def is_accelerator(self, node: ast.AST | None, unit: Unit) -> bool:
        """Return whether an expression is the Accelerator, as far as names tell."""
        if isinstance(node, ast.Call):
            return called(node) == "Accelerator"
        name = dotted(node).rpartition(".")[2]
        if not name:
            return False
        if name in self.accelerators or "accelerator" in name.lower():
            return True
        return isinstance(node, ast.Name) and self.captured(node.id, node, unit) == "accelerator"

    def captured(self, name: str, node: ast.AST, unit: Unit) -> str:
        """Return the kind of the notebook variable behind a name; '' if it is none."""
        value = unit.value(name, node)
        return "" if value is MISSING else values.kind(value)

    def mentions_rank(self, node: ast.AST) -> bool:
        """Return whether an expression depends on which rank evaluates it."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and self._tells_rank(inner.id):
                return True
            if isinstance(inner, ast.Attribute) and self._tells_rank(inner.attr):
                return True
            told = inner.value if isinstance(inner, ast.Constant) else None
            if isinstance(told, str) and _RANK_VARIABLE.fullmatch(told):
                return True
        return False

    def _tells_rank(self, name: str) -> bool:
        return name in self.rankish or _RANK.search(name) is not None

    def runs_on_one_rank(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether only some ranks get to a node, or nothing shows that all do.

        True in doubt: for a function whose callers are not in sight, say.
        """
        return self.guarded(node, unit) or _function_around(node, unit) not in self.reached

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
            test = above.test if isinstance(above, (ast.If, ast.IfExp, ast.While)) else None
            if test is not None and below is not test and self.mentions_rank(test):
                return True
            if isinstance(above, ast.BoolOp):
                position = above.values.index(below)  # type: ignore[arg-type]
                if any(self.mentions_rank(value) for value in above.values[:position]):
                    return True
            items = above.items if isinstance(above, (ast.With, ast.AsyncWith)) else []
            if any(self.mentions_rank(item.context_expr) for item in items if item is not below):
                return True
            if isinstance(above, ast.Match) and self.mentions_rank(above.subject):
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
            found: set[ast.stmt] = set()
            for block in (getattr(above, name, None) for name in ("body", "orelse", "finalbody")):
                left = False
                for one in block if isinstance(block, list) else []:
                    if left:
                        found.add(one)
                    elif isinstance(one, ast.If) and _leaves(one):
                        left = self.mentions_rank(one.test)
            self._exits[above] = found
        return self._exits[above]


def block_of(statement: ast.AST, parent: ast.AST) -> list[ast.stmt]:
    """Return the list of statements of `parent` that a statement stands in."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and any(statement is one for one in block):
            return block
    return []


def _leaves(branch: ast.If) -> bool:
    last = branch.body[-1]
    if isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise)):
        return True
    return isinstance(last, ast.Expr) and called(last.value) in _LEAVES


def read(units: Sequence[Unit]) -> Program:
    """Look through all units once."""
    program = Program(units, accelerators=frozenset(_bound_to(units, "Accelerator")))
    for unit in units:
        for node in unit.nodes:
            if is_function(node):
                program.functions.setdefault(node.name, []).append((unit, node))
    program.names = frozenset(_identifiers(units))
    program.rankish = _rankish(program)
    program.reached = _reached(program)
    captured = (program.captured(n.id, n, u) for u in units for n in u.loads)
    program.accelerated = (
        bool(program.accelerators)
        or any(called(call) == "Accelerator" for _, call in program.calls())
        or "accelerator" in captured
    )
    return program


def _function_around(node: ast.AST, unit: Unit) -> ast.AST:
    """Return the ``def`` a node stands in; the unit's tree if it stands in none."""
    return next((a for a in unit.ancestors(node) if is_function(a)), unit.tree)


def _reached(program: Program) -> set[ast.AST]:
    """Return the functions that every rank gets to, as far as calls by name show."""
    calls: dict[ast.AST, list[tuple[Unit, ast.Call]]] = {}
    for unit, call in program.calls():
        root = dotted(receiver(call)).partition(".")[0]
        if called(call) in program.functions and root not in _LIBRARIES:
            calls.setdefault(_function_around(call, unit), []).append((unit, call))
    starts = [unit.entry for unit in program.units] + [u.tree for u in program.units if u.is_cell]
    stack = [node for node in starts if node is not None]
    found: set[ast.AST] = set()
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        for unit, call in calls.get(node, []):
            if program.guarded(call, unit):
                continue
            for _, function in program.functions[called(call)]:
                if not any(program.mentions_rank(d) for d in function.decorator_list):
                    stack.append(function)
    return found


def _identifiers(units: Iterable[Unit]) -> Iterator[str]:
    for unit in units:
        for node in unit.nodes:
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    yield name
                case ast.Import():
                    for alias in node.names:
                        yield from alias.name.split(".")
                case ast.ImportFrom():
                    yield from (node.module or "").split(".")
                    yield from (alias.name for alias in node.names)
                case _:
                    pass


def _assignments(units: Iterable[Unit]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of plain assignments, to attributes and by keyword arguments too."""
    for unit in units:
        for node in unit.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        name = dotted(target).rpartition(".")[2]
                        if name:
                            yield name, value
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    yield dotted(target).rpartition(".")[2], value
                case ast.NamedExpr(target=ast.Name(id=name), value=value):
                    yield name, value
                case ast.keyword(arg=str(name), value=value):
                    yield name, value
                case _:
                    pass


def _bound_to(units: Iterable[Unit], constructor: str) -> Iterator[str]:
    for name, value in _assignments(units):
        if called(value) == constructor:
            yield name


def _rankish(program: Program) -> set[str]:
    """Return the names that hold something a rank tells itself apart by, wherever they are set."""
    assigned = [(name, value) for name, value in _assignments(program.units) if _passes_on(value)]
    for unit in program.units:
        for node in unit.nodes:
            if isinstance(node, ast.Return) and node.value and _passes_on(node.value):
                function = _function_around(node, unit)
                assigned += [(function.name, node.value)] if is_function(function) else []
    for _unit, call in program.calls():
        for _, function in program.functions.get(called(call), []):
            params = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            if isinstance(call.func, ast.Attribute) and params[:1] == ["self"]:
                params = params[1:]
            pairs = zip(params, call.args, strict=False)
            assigned += [(name, value) for name, value in pairs if _passes_on(value)]
    for _ in range(5):
        new = {name for name, value in assigned if program.mentions_rank(value)}
        if new <= program.rankish:
            break
        program.rankish |= new
    return program.rankish


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


def is_optimizer_call(node: ast.AST | None) -> bool:
    """Return whether a call makes a torch optimizer."""
    name = called(node)
    if not name[:1].isupper() or not isinstance(node, ast.Call):
        return False
    path = dotted(node.func).split(".")
    return _OPTIMIZER.fullmatch(name) is not None or (
        "optim" in path[:-1] and "lr_scheduler" not in path
    )


def is_loader_call(node: ast.AST | None) -> bool:
    """Return whether a call makes a DataLoader."""
    return called(node) in ("DataLoader", "StatefulDataLoader")


def models_of(optimizer: ast.Call) -> list[str]:
    """Return the names whose ``.parameters()`` an optimizer's call is given."""
    found = [
        dotted(receiver(inner))
        for argument in (*optimizer.args, *(k.value for k in optimizer.keywords))
        for inner in ast.walk(argument)
        if isinstance(inner, ast.Call) and called(inner) in ("parameters", "named_parameters")
    ]
    return list(dict.fromkeys(found))


def defines_backward(call: ast.Call, unit: Unit) -> bool:
    """Return whether a call stands in a method that is a backward pass itself."""
    return any(is_function(a) and a.name == "backward" for a in unit.ancestors(call))


def note(unit: Unit, node: ast.expr | ast.stmt, code: str, message: str) -> Note:
    """Return a note at a node."""
    return note_at(unit, node.lineno, unit.column(node), code, message)


def note_at(unit: Unit, line: int, column: int, code: str, message: str) -> Note:
    """Return a note at a line and column of a unit."""
    where = f"{unit.place}, line {line}" if unit.place else f"line {line}"
    return Note(code, message, where, line, column)
