"""The rule about ``prepare``: a training loop with something in it that never went through.

Reported only of a function that makes the Accelerator itself: what comes to another one may have
been prepared by its caller.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import values
from .facts import MISSING, Scope, Unit, called, dotted, names_in, receiver
from .notes import Note
from .program import Program, is_loader_call, is_optimizer_call, models_of, note

_PREPARE = frozenset(
    {"prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler"}
)
_WRAPPERS = frozenset({"enumerate", "tqdm", "trange", "progress", "iter", "track", "islice"})
_LOADER_NAME = re.compile(r"loader|(^|_)dl($|_)", re.IGNORECASE)

_SPLIT = re.compile(r"shard|split_|_by_node|partition|distributed", re.IGNORECASE)
"""What gives each rank its own part of the data."""


@dataclass(frozen=True)
class Loop:
    """A training loop: the scope it stands in, and the ``for`` statements around its backward."""

    unit: Unit
    scope: Scope
    backward: ast.Call
    loops: tuple[ast.For | ast.While, ...]

    @property
    def calls(self) -> list[ast.Call]:
        """The calls within the innermost loop."""
        return [node for node in ast.walk(self.loops[0]) if isinstance(node, ast.Call)]


def loops_around(call: ast.Call, unit: Unit) -> tuple[ast.For | ast.While, ...]:
    """Return the loops around a call in its own function, the innermost first."""
    found: list[ast.For | ast.While] = []
    for above in unit.ancestors(call):
        if above in unit.scopes:
            break
        if isinstance(above, (ast.For, ast.While)):
            found.append(above)
    return tuple(found)


def iterated(iterable: ast.expr) -> list[ast.Name]:
    """Return the plain names a ``for`` goes over, through tqdm, enumerate, zip and their like."""
    if isinstance(iterable, ast.Name):
        return [iterable]
    if called(iterable) in (*_WRAPPERS, "zip") and isinstance(iterable, ast.Call):
        arguments = iterable.args if called(iterable) == "zip" else iterable.args[:1]
        return [name for argument in arguments for name in iterated(argument)]
    return []


def unprepared(program: Program) -> Iterator[Note]:
    """The loader, model or optimizer of a loop under Accelerate that is used as it was made."""
    prepared = _prepared(program)
    if prepared is None:
        return
    for loop in _loops(program):
        for use, what, why in _suspects(loop, program):
            if dotted(use) not in prepared:
                yield note(
                    loop.unit,
                    use,
                    "prepare",
                    f"the {what} `{dotted(use)}` never comes out of `accelerator.prepare`: {why}; "
                    f"write `{dotted(use)} = accelerator.prepare({dotted(use)})` before the loop",
                )


def _prepared(program: Program) -> set[str] | None:
    """Return the names given to ``prepare``; None where that cannot be read off the source."""
    found: set[str] = set()
    for unit in program.units:
        for node in unit.nodes:
            if not (isinstance(node, ast.Attribute) and node.attr in _PREPARE):
                continue
            call = unit.parents.get(node)
            if not (isinstance(call, ast.Call) and call.func is node):
                return None  # handed on as a function
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(isinstance(argument, ast.Starred) for argument in given):
                return None
            if isinstance(unit.parents.get(call), ast.Expr):
                continue  # what it returns is dropped: nothing is prepared
            found |= {dotted(inner) for argument in given for inner in ast.walk(argument)}
    return found


def _loops(program: Program) -> Iterator[Loop]:
    seen: set[ast.AST] = set()
    for unit, call in program.calls():
        if called(call) != "backward" or not program.is_accelerator(receiver(call), unit):
            continue
        loops = loops_around(call, unit)
        scope = unit.scope(call)
        if not loops or loops[0] in seen or not _makes_accelerator(call, unit):
            continue
        seen.add(loops[0])
        yield Loop(unit, scope, call, loops)


def _makes_accelerator(call: ast.Call, unit: Unit) -> bool:
    told = receiver(call)
    if not isinstance(told, ast.Name):
        return False
    bound = unit.bindings(told.id, told)
    return len(bound) == 1 and called(bound[0].value) == "Accelerator"


def _suspects(loop: Loop, program: Program) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield what the loop uses and is certain to be a loader, an optimizer, a model; with why."""
    unit = loop.unit
    for around in loop.loops:
        for name in iterated(around.iter) if isinstance(around, ast.For) else []:
            if _is_raw_loader(name, unit, program):
                yield name, "loader", "every rank would train on all of the data"
    models: set[str] = set()
    told: set[str] = set()
    for call in loop.calls:
        stepped = receiver(call)
        if called(call) == "step" and isinstance(stepped, ast.Name):
            made = [one.value for one in unit.bindings(stepped.id, stepped)]
            optimizers = [v for v in made if isinstance(v, ast.Call) and is_optimizer_call(v)]
            models |= {name for one in optimizers for name in models_of(one)}
            if made and len(optimizers) == len(made) and stepped.id not in told:
                told.add(stepped.id)
                yield (
                    stepped,
                    "optimizer",
                    "it knows nothing of mixed precision and gradient accumulation",
                )
    for call in loop.calls:
        used = call.func
        if isinstance(used, ast.Name) and used.id in models and used.id not in told:
            told.add(used.id)
            if _is_raw_model(used, unit, program):
                yield used, "model", "its gradients would not be averaged over the ranks"


def _is_raw_loader(name: ast.Name, unit: Unit, program: Program) -> bool:
    value = unit.value(name.id, name)
    if value is not MISSING:
        return values.kind(value) == "loader"
    bound = unit.bindings(name.id, name)
    if len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
        return _LOADER_NAME.search(name.id) is not None
    return bool(bound) and all(
        is_loader_call(one.value) and _gives_all(one.value, unit, program) for one in bound
    )


def _gives_all(made: ast.expr | None, unit: Unit, program: Program) -> bool:
    """Return whether a DataLoader goes over all data: no rank's own part, no sampler of its own."""
    keywords = made.keywords if isinstance(made, ast.Call) else []
    if made is None or any(k.arg in (None, "sampler", "batch_sampler") for k in keywords):
        return False
    names = [node for node in ast.walk(made) if isinstance(node, ast.Name)]
    data = [one.value for name in names for one in unit.bindings(name.id, name)]
    return not any(
        program.mentions_rank(value) or any(_SPLIT.search(n) for n in names_in(value))
        for value in (made, *data)
        if value is not None
    )


def _is_raw_model(name: ast.Name, unit: Unit, program: Program) -> bool:
    value = unit.value(name.id, name)
    if value is not MISSING:
        return values.kind(value) == "model"
    bound = unit.bindings(name.id, name)
    if any(one.value is None and not isinstance(one.statement, ast.arg) for one in bound):
        return False
    made = [one.value for one in bound if one.value is not None]
    for value in made:
        if called(value) in ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP"):
            return False
        for node in ast.walk(value):
            above = unit.parents.get(node)
            placing = isinstance(above, ast.Attribute) and above.attr == "device"
            if not placing and dotted(node) and program.is_accelerator(node, unit):
                return False
    return bool(bound)
