"""The rule about ``prepare``: a training loop with something in it that never went through.

Reported only of a function that makes the Accelerator itself: what comes to another one may have
been prepared by its caller.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...findings import Finding
from . import value_kinds
from .program import Program, is_optimizer_call, models_of, role
from .source_index import MISSING, Unit, arguments_of, called, dotted, names_in, receiver

_PREPARE = frozenset(
    {"prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler"}
)
_WRAPPERS = frozenset({"enumerate", "tqdm", "trange", "progress", "iter", "track", "islice"})
_WRAPPED = frozenset({"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP"})

_SPLIT = re.compile(r"shard|split_|_by_node|partition|distributed", re.IGNORECASE)
"""What gives each rank its own part of the data."""

Loops = tuple[ast.For | ast.While, ...]


def loops_around(call: ast.Call, unit: Unit) -> Loops:
    """Return the loops around a call in its own function, the innermost first."""
    loops: list[ast.For | ast.While] = []
    for above in unit.ancestors(call):
        if above in unit.scopes:
            break
        if isinstance(above, (ast.For, ast.While)):
            loops.append(above)
    return tuple(loops)


def iterated(iterable: ast.expr) -> list[ast.Name]:
    """Return the plain names a ``for`` goes over, through tqdm, enumerate, zip and their like."""
    if isinstance(iterable, ast.Name):
        return [iterable]
    if called(iterable) in (*_WRAPPERS, "zip") and isinstance(iterable, ast.Call):
        arguments = iterable.args if called(iterable) == "zip" else iterable.args[:1]
        return [name for argument in arguments for name in iterated(argument)]
    return []


def unprepared(program: Program) -> Iterator[Finding]:
    """The loader, model or optimizer of a loop under Accelerate that is used as it was made."""
    prepared = _prepared(program)
    if prepared is None:
        return
    for unit, loops in _loops(program):
        for use, kind, reason in _suspects(unit, loops, program):
            name = dotted(use)
            if name not in prepared:
                yield unit.finding(
                    use,
                    "prepare",
                    f"the {kind} `{name}` is used without `accelerator.prepare`, so that {reason}; "
                    f"write `{name} = accelerator.prepare({name})` before the loop",
                )


def _prepared(program: Program) -> set[str] | None:
    """Return the names given to ``prepare``; None where that cannot be read off the source."""
    names: set[str] = set()
    for unit in program.units:
        for node in unit.nodes:
            if not (isinstance(node, ast.Attribute) and node.attr in _PREPARE):
                continue
            call = unit.parents.get(node)
            if not (isinstance(call, ast.Call) and call.func is node):
                return None  # handed on as a function
            given = arguments_of(call)
            if any(isinstance(argument, ast.Starred) for argument in given):
                return None
            if isinstance(unit.parents.get(call), ast.Expr):
                continue  # what it returns is dropped: nothing is prepared
            names |= {dotted(inner) for argument in given for inner in ast.walk(argument)}
    return names


def _loops(program: Program) -> Iterator[tuple[Unit, Loops]]:
    """Yield the loops around each backward of an Accelerator that the same function makes."""
    seen: set[ast.AST] = set()
    for unit, call in program.calls:
        owner = receiver(call)
        if called(call) != "backward" or not isinstance(owner, ast.Name):
            continue
        loops = loops_around(call, unit)
        made = [called(binding.value) for binding in unit.bindings(owner)]
        if loops and loops[0] not in seen and made == ["Accelerator"]:
            seen.add(loops[0])
            yield unit, loops


def _suspects(unit: Unit, loops: Loops, program: Program) -> Iterator[tuple[ast.Name, str, str]]:
    """Yield what the loop uses and is certain to be a loader, an optimizer, a model; with why."""
    for loop in loops:
        for name in iterated(loop.iter) if isinstance(loop, ast.For) else []:
            loaders = [binding.value for binding in unit.bindings(name) if binding.value]
            if role(name, unit) == "loader" and all(
                _gives_all(loader, unit, program) for loader in loaders
            ):
                yield name, "loader", "every rank would train on all of the data"
    calls = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Call)]
    stepped = [receiver(call) for call in calls if called(call) == "step"]
    models: set[str] = set()
    reported: set[str] = set()
    for name in (owner for owner in stepped if isinstance(owner, ast.Name)):
        made = [binding.value for binding in unit.bindings(name)]
        optimizers = [value for value in made if is_optimizer_call(value)]
        models |= {model for optimizer in optimizers for model in models_of(optimizer)}
        if optimizers and len(optimizers) == len(made) and name.id not in reported:
            reported.add(name.id)
            yield name, "optimizer", "it ignores mixed precision and gradient accumulation"
    for name in (call.func for call in calls if isinstance(call.func, ast.Name)):
        if name.id in models and name.id not in reported:
            reported.add(name.id)
            if _is_raw_model(name, unit, program):
                yield name, "model", "its gradients would not be averaged over the ranks"


def _gives_all(made: ast.expr, unit: Unit, program: Program) -> bool:
    """Return whether a DataLoader goes over all data: no rank's own part, no sampler of its own."""
    keywords = made.keywords if isinstance(made, ast.Call) else []
    if any(k.arg in (None, "sampler", "batch_sampler") for k in keywords):
        return False
    names = [node for node in ast.walk(made) if isinstance(node, ast.Name)]
    data = [binding.value for name in names for binding in unit.bindings(name)]
    return not any(
        program.mentions_rank(value) or any(_SPLIT.search(n) for n in names_in(value))
        for value in (made, *data)
        if value is not None
    )


def _is_raw_model(name: ast.Name, unit: Unit, program: Program) -> bool:
    value = unit.value(name)
    if value is not MISSING:
        return value_kinds.kind(value) == "model"
    bound = unit.bindings(name)
    values = [b.value for b in bound if not isinstance(b.statement, ast.arg)]
    if not bound or any(value is None or called(value) in _WRAPPED for value in values):
        return False
    for node in (node for value in values if value for node in ast.walk(value)):
        above = unit.parents.get(node)
        placing = isinstance(above, ast.Attribute) and above.attr == "device"
        if not placing and dotted(node) and program.is_accelerator(node, unit):
            return False
    return True
