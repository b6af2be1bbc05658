"""Finds a training loop and what it trains with; and the rule about what is not prepared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeGuard

from ...findings import Finding
from .program import Program
from .source_index import Unit, called, dotted, names_in, receiver

_OPTIMIZER = re.compile(
    r"SGD|Adam(W|ax)?(8bit)?|(N|R|Sparse)Adam|RMSprop|Ada(grad|delta|factor)|LBFGS|ASGD|Rprop"
    r"|Muon|Lion"
)
_LOADER = re.compile(r"loader|(^|_)dl($|_)", re.IGNORECASE)
_PREPARE = frozenset(
    {"prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler"}
)
_WRAPPERS = frozenset({"enumerate", "tqdm", "trange", "progress", "iter", "track", "islice"})
_WRAPPED = frozenset({"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP"})

_SPLIT = re.compile(r"shard|split_|_by_node|partition|distributed", re.IGNORECASE)
"""What gives each rank its own part of the data."""


@dataclass(frozen=True)
class Loop:
    """A training loop: the loops around a ``backward``, and what is certain to be used in them."""

    unit: Unit
    backward: ast.Call

    around: tuple[ast.For | ast.While, ...]
    """The innermost loop first."""

    calls: tuple[ast.Call, ...]
    """The calls in these loops that the same function makes."""

    loaders: Mapping[str, ast.Name]
    """By name: where each is used."""

    stepped: Mapping[str, ast.Name]
    """What has its ``step`` called: optimizers, schedulers."""

    optimizers: Mapping[str, ast.Name]
    models: Mapping[str, ast.Name]


def loops_around(call: ast.Call, unit: Unit) -> tuple[ast.For | ast.While, ...]:
    """Return the loops around a call in its own function, the innermost first."""
    inside = takewhile(lambda above: above not in unit.bound, unit.ancestors(call))
    return tuple(above for above in inside if isinstance(above, (ast.For, ast.While)))


def loop_of(backward: ast.Call, unit: Unit) -> Loop | None:
    """Return the training loop that a ``backward`` is in; None if it is in none."""
    around, scope = loops_around(backward, unit), unit.scope(backward)
    if not around:
        return None
    inside = [node for node in ast.walk(around[-1]) if isinstance(node, ast.Call)]
    calls = [call for call in inside if unit.scope(call) is scope]
    owners = [receiver(call) for call in calls if called(call) == "step"]
    stepped = {owner.id: owner for owner in owners if isinstance(owner, ast.Name)}
    optimizers = {name: use for name, use in stepped.items() if role(use, unit) == "optimizer"}
    sources = [name for loop in around if isinstance(loop, ast.For) for name in iterated(loop.iter)]
    loaders = {name.id: name for name in sources if role(name, unit) == "loader"}
    functions = {call.func.id: call.func for call in calls if isinstance(call.func, ast.Name)}
    made = [b.value for use in stepped.values() for b in unit.bindings(use)]
    models = [name for maker in filter(is_optimizer_call, made) for name in models_of(maker)]
    if optimizers and not any(map(is_optimizer_call, made)):  # they were handed in
        models = [name for name, use in functions.items() if _is_model(use, unit)]
    called_models = {name: functions[name] for name in models if name in functions}
    return Loop(unit, backward, around, tuple(calls), loaders, stepped, optimizers, called_models)


def iterated(iterable: ast.expr) -> list[ast.Name]:
    """Return the plain names a ``for`` goes over, through tqdm, enumerate, zip and their like."""
    if isinstance(iterable, ast.Name):
        return [iterable]
    if called(iterable) in (*_WRAPPERS, "zip") and isinstance(iterable, ast.Call):
        arguments = iterable.args if called(iterable) == "zip" else iterable.args[:1]
        return [name for argument in arguments for name in iterated(argument)]
    return []


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
    kind, bound = unit.kind(name), unit.bindings(name)
    if kind is not None:
        return kind
    if len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
        is_optimizer = name.id.lower().startswith("opt")
        return "loader" if _LOADER.search(name.id) else "optimizer" if is_optimizer else ""
    if bound and all(is_optimizer_call(binding.value) for binding in bound):
        return "optimizer"
    loaders = ("DataLoader", "StatefulDataLoader")
    return "loader" if bound and all(called(b.value) in loaders for b in bound) else ""


def _is_model(name: ast.Name, unit: Unit) -> bool:
    """Return whether a name that is called is the model, as handed in or as the notebook has it."""
    kind, bound = unit.kind(name), unit.bindings(name)
    if kind is not None:
        return kind == "model" and not re.search("loss|crit|metric", name.id)
    given = [binding for binding in bound if isinstance(binding.statement, ast.arg)]
    others = [binding.value for binding in bound if binding not in given]
    moved = all(isinstance(v, ast.Call) and dotted(receiver(v)) == name.id for v in others)
    return bool(given) and moved and name.id in ("model", "net", "network")  # model = model.to(…)


def models_of(optimizer: ast.Call) -> list[str]:
    """Return the names whose ``.parameters()`` an optimizer's call is given."""
    inside = [node for node in ast.walk(optimizer) if isinstance(node, ast.Call)]
    names = ("parameters", "named_parameters")
    return list(dict.fromkeys(dotted(receiver(c)) for c in inside if called(c) in names))


def unprepared(program: Program) -> Iterator[Finding]:
    """The loader, model or optimizer of a loop under Accelerate that is used as it was made.

    Only in a function that makes the Accelerator itself: what comes to another one may have been
    prepared by its caller.
    """
    prepared = _prepared(program)
    seen: set[ast.AST] = set()
    for unit, call in program.calls("backward") if prepared is not None else ():
        owner, loop = receiver(call), loop_of(call, unit)
        made = (
            [called(b.value) for b in unit.bindings(owner)] if isinstance(owner, ast.Name) else []
        )
        if made != ["Accelerator"] or loop is None or loop.around[-1] in seen:
            continue
        seen.add(loop.around[-1])
        for use, kind, reason in _suspects(loop, program):
            if prepared is not None and use.id not in prepared:
                yield unit.finding(
                    use,
                    "prepare",
                    f"the {kind} `{use.id}` is used without `accelerator.prepare`, so "
                    f"{reason}; write `{use.id} = accelerator.prepare({use.id})` before the loop",
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
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(isinstance(argument, ast.Starred) for argument in given):
                return None
            if not isinstance(unit.parents.get(call), ast.Expr):  # else its result is dropped
                names |= {dotted(inner) for argument in given for inner in ast.walk(argument)}
    return names


def _suspects(loop: Loop, program: Program) -> Iterator[tuple[ast.Name, str, str]]:
    """Yield what may never have been prepared, its kind, and what is wrong then."""
    unit = loop.unit
    for name in loop.loaders.values():
        made = [binding.value for binding in unit.bindings(name) if binding.value]
        if all(_gives_all(loader, unit, program) for loader in made):
            yield name, "loader", "every rank would train on all of the data"
    for name in loop.optimizers.values():
        if not any(isinstance(binding.statement, ast.arg) for binding in unit.bindings(name)):
            yield name, "optimizer", "it ignores mixed precision and gradient accumulation"
    for name in loop.models.values():
        if _is_raw(name, unit, program):
            yield name, "model", "its gradients would not be averaged over the ranks"


def _gives_all(made: ast.expr, unit: Unit, program: Program) -> bool:
    """Return whether a DataLoader goes over all data: no rank's own part, no sampler of its own."""
    keywords = made.keywords if isinstance(made, ast.Call) else []
    if any(k.arg in (None, "sampler", "batch_sampler") for k in keywords):
        return False
    names = [node for node in ast.walk(made) if isinstance(node, ast.Name)]
    data = [binding.value for name in names for binding in unit.bindings(name)]
    parts = [value for value in (made, *data) if value is not None]
    is_split = any(_SPLIT.search(name) for part in parts for name in names_in(part))
    return not is_split and not any(program.mentions_rank(part, unit) for part in parts)


def _is_raw(model: ast.Name, unit: Unit, program: Program) -> bool:
    """Return whether nothing that a model's name is bound to wraps it, or is the Accelerator's."""
    kind, bound = unit.kind(model), unit.bindings(model)
    if kind is not None:
        return kind == "model"
    values = [b.value for b in bound if not isinstance(b.statement, ast.arg)]
    if not bound or any(value is None or called(value) in _WRAPPED for value in values):
        return False
    for node in (node for value in values if value for node in ast.walk(value)):
        above = unit.parents.get(node)
        places = isinstance(above, ast.Attribute) and above.attr == "device"
        if not places and dotted(node) and program.is_accelerator(node, unit):
            return False
    return True
