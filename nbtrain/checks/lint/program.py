"""Joins all the source of one launch: what names mean, and what only one rank runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from .source_index import FunctionNode, Unit, called, dotted, is_function, names_in

_RANK = re.compile(
    r"(^|_)(rank|main_process|last_process|process_index|master|global_zero|process_zero|chief"
    r"|is_main|main_rank|rank0|rank_zero)($|_)",
    re.IGNORECASE,
)
_RANK_VARIABLE = re.compile(r"(LOCAL_|GLOBAL_|NODE_)?RANK|SLURM_PROCID|SLURM_LOCALID")


class Program:
    """The units of a launch, and what is certain of all of them together."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.names: set[str] = set()
        """Every name, attribute and part of an import."""
        for node in (node for unit in units for node in unit.nodes):
            match node:
                case ast.Attribute(value=ast.Name(id="torch"), attr="accelerator"):
                    pass  # torch's word for any GPU, no Accelerator
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    self.names.add(name)
                case ast.alias(name=str(path)) | ast.ImportFrom(module=str(path)):
                    self.names.update(path.split("."))
        self.accelerated = any(
            called(node) == "Accelerator"
            or (isinstance(node, ast.Name) and unit.kind(node) == "accelerator")
            for unit in units
            for node in (*unit.calls, *unit.loads)
        )
        self.everywhere = self._find_everywhere()
        """The cell and the functions that every rank is certain to run."""

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        """Yield the calls of anything with one of these names; without any, all calls."""
        for unit in self.units:
            for call in unit.calls:
                unit.clock.check()
                if not names or called(call) in names:
                    yield unit, call

    def is_accelerator(self, node: ast.AST | None, unit: Unit) -> bool:
        """Return whether an expression is the Accelerator, as far as names tell."""
        if isinstance(node, ast.Call):
            return called(node) == "Accelerator"
        if "accelerator" in dotted(node).rpartition(".")[2].lower():
            return True
        bound = unit.bindings(node) if isinstance(node, ast.Name) else []
        is_made = any(called(binding.value) == "Accelerator" for binding in bound)
        return is_made or (isinstance(node, ast.Name) and unit.kind(node) == "accelerator")

    def mentions_rank(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether an expression depends on which rank evaluates it, as far as it shows.

        By the names in it, and by those in what is assigned to them.
        """
        if _is_of_rank(node):
            return True
        names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
        bound = (binding.value for name in names for binding in unit.bindings(name))
        return any(_is_of_rank(value) for value in bound if value is not None)

    def guarded(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether a test of the rank stands before a node, in its function or around it."""
        below = node
        for above in unit.ancestors(node):
            earlier = before(above, below)
            exits = [s.test for s in earlier if isinstance(s, ast.If) and _leaves(s)]
            if any(self.mentions_rank(test, unit) for test in (*_decides(above, below), *exits)):
                return True
            if is_function(above):
                return any(map(_is_of_rank, above.decorator_list))
            below = above
        return False

    def skipped(self, node: ast.AST, unit: Unit) -> bool:
        """Return whether a node is behind a test of the rank, or in what nobody mentions."""
        top = outermost(node, unit)
        if top is None or top in self.everywhere or top.decorator_list:
            return self.guarded(node, unit)
        return top.name not in self.names or self.guarded(node, unit)

    def _find_everywhere(self) -> set[ast.AST]:
        """Return what the ranks start with, and the functions that it calls with no test before."""
        functions: dict[str, ast.AST] = {}
        calls: dict[ast.AST, list[tuple[Unit, ast.Call]]] = {}
        for unit in self.units:
            for node in unit.module.body if unit.is_cell else (unit.tree,):
                if is_function(node):
                    functions[node.name] = node
            for call in unit.calls:
                calls.setdefault(outermost(call, unit) or unit.tree, []).append((unit, call))
        waiting = [node for node in (self.units[0].entry, self.units[0].tree) if node is not None]
        reached: set[ast.AST] = set()
        while waiting:
            reached.add(caller := waiting.pop())
            for unit, call in calls.get(caller, []):
                function = functions.get(dotted(call.func), caller)
                if function not in reached and not self.guarded(call, unit):
                    waiting.append(function)
        return reached


def outermost(node: ast.AST, unit: Unit) -> FunctionNode | ast.ClassDef | None:
    """Return the function or class around a node that stands in no other one."""
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [above for above in unit.ancestors(node) if isinstance(above, named)]
    return around[-1] if around else None


def _is_of_rank(node: ast.AST) -> bool:
    """Return whether a rank is mentioned in an expression."""
    texts = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
    return any(map(_RANK.search, names_in(node))) or any(
        isinstance(text, str) and _RANK_VARIABLE.fullmatch(text) for text in texts
    )


def before(above: ast.AST, below: ast.AST) -> list[ast.stmt]:
    """Return the statements that stand before a node in its block."""
    blocks = (getattr(above, name, None) for name in ("body", "orelse", "finalbody"))
    block = next((each for each in blocks if isinstance(each, list) and below in each), [])
    return list(takewhile(lambda statement: statement is not below, block))


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


def _leaves(branch: ast.stmt) -> bool:
    """Return whether a statement is an ``if`` after which nothing of the function runs."""
    last = branch.body[-1] if isinstance(branch, ast.If) else branch
    is_exit = isinstance(last, ast.Expr) and called(last.value) in ("exit", "_exit", "abort")
    return is_exit or isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise))
