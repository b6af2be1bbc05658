"""Finds a training loop and what it trains with; and the rule about what is not prepared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from ...findings import Finding
from .source import Source, called_name, dotted_name, loops_around, names_in, receiver

_OPTIMIZER = re.compile(
    r"SGD|Adam(W|ax)?(8bit)?|(N|R|Sparse)Adam|RMSprop|Ada(grad|delta|factor)|LBFGS|ASGD|Rprop"
    r"|Muon|Lion"
)
_LOADER = re.compile(r"loader|(^|_)dl($|_)", re.IGNORECASE)
_PREPARE = frozenset(
    {"prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler"}
)
_ITERATORS = frozenset({"enumerate", "tqdm", "trange", "progress", "iter", "track", "islice"})
"""What goes over its first argument."""

_WRAPPERS = frozenset({"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP"})

_SPLIT = re.compile(r"shard|split_|_by_node|partition|distributed", re.IGNORECASE)
"""What gives each rank its own part of the data."""


@dataclass(frozen=True)
class Loop:
    """A training loop: the loops around a ``backward``, and what is certain to be used in them."""

    source: Source
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


def find_loop(backward: ast.Call, source: Source) -> Loop | None:
    """Return the loops around a ``backward``, and what they use, if it is in a loop."""
    around, scope = loops_around(backward, source), source.scope(backward)
    if not around:
        return None
    inside = (node for node in ast.walk(around[-1]) if isinstance(node, ast.Call))
    calls = [call for call in inside if source.scope(call) is scope]
    owners = [receiver(call) for call in calls if called_name(call) == "step"]
    stepped = {owner.id: owner for owner in owners if isinstance(owner, ast.Name)}
    optimizers = {name: use for name, use in stepped.items() if _is_optimizer(use, source)}
    iterated = [name for loop in around if isinstance(loop, ast.For) for name in _names(loop.iter)]
    loaders = {name.id: name for name in iterated if _is_loader(name, source)}
    functions = {call.func.id: call.func for call in calls if isinstance(call.func, ast.Name)}
    made = [b.value for use in stepped.values() for b in source.bindings(use)]
    models = [name for maker in filter(_makes_optimizer, made) for name in _models_of(maker)]
    if optimizers and not any(map(_makes_optimizer, made)):  # they were handed in
        models = [name for name, use in functions.items() if _is_model(use, source)]
    used = {name: functions[name] for name in models if name in functions}
    return Loop(source, backward, around, tuple(calls), loaders, stepped, optimizers, used)


def _names(iterable: ast.expr) -> list[ast.Name]:
    """Return the plain names a ``for`` goes over, through tqdm, enumerate, zip and their like."""
    if isinstance(iterable, ast.Name):
        return [iterable]
    if called_name(iterable) in (*_ITERATORS, "zip") and isinstance(iterable, ast.Call):
        arguments = iterable.args if called_name(iterable) == "zip" else iterable.args[:1]
        return [name for argument in arguments for name in _names(argument)]
    return []


def _makes_optimizer(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Return whether a call makes a torch optimizer."""
    path = dotted_name(node.func).split(".") if isinstance(node, ast.Call) else [""]
    is_known = _OPTIMIZER.fullmatch(path[-1]) is not None
    is_of_torch = "optim" in path[:-1] and "lr_scheduler" not in path
    return is_known or (is_of_torch and path[-1][:1].isupper())


def _is_optimizer(name: ast.Name, source: Source) -> bool:
    """Return whether a name is certain to hold an optimizer: by its value, making or name."""
    known, bound = source.is_kind(name, "optim.Optimizer"), source.bindings(name)
    if known is not None or not bound:
        return bool(known)
    if len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
        return name.id.lower().startswith("opt")
    return all(_makes_optimizer(binding.value) for binding in bound)


def _is_loader(name: ast.Name, source: Source) -> bool:
    """Return whether a name is certain to hold a DataLoader.

    The notebook's value decides. Without one, each assignment must make a DataLoader; for a
    parameter, its name decides.
    """
    known, bound = source.is_kind(name, "utils.data.DataLoader"), source.bindings(name)
    if known is not None or not bound:
        return bool(known)
    if len(bound) == 1 and isinstance(bound[0].statement, ast.arg):
        return _LOADER.search(name.id) is not None
    return all(called_name(b.value) in ("DataLoader", "StatefulDataLoader") for b in bound)


def _is_model(name: ast.Name, source: Source) -> bool:
    """Return whether a name that is called is certain to hold the model.

    The notebook's value decides, except for names of losses and metrics. Without a value, it must
    be a parameter named ``model``, ``net`` or ``network``.
    """
    known, bound = source.is_kind(name, "nn.Module"), source.bindings(name)
    if known is not None:
        return known and not re.search("loss|crit|metric", name.id)
    given = [binding for binding in bound if isinstance(binding.statement, ast.arg)]
    others = [binding.value for binding in bound if binding not in given]
    moved = all(isinstance(v, ast.Call) and dotted_name(receiver(v)) == name.id for v in others)
    return bool(given) and moved and name.id in ("model", "net", "network")  # model = model.to(…)


def _models_of(optimizer: ast.Call) -> list[str]:
    """Return the names whose ``.parameters()`` an optimizer's call is given."""
    inside = [node for node in ast.walk(optimizer) if isinstance(node, ast.Call)]
    names = ("parameters", "named_parameters")
    return list(dict.fromkeys(dotted_name(receiver(c)) for c in inside if called_name(c) in names))


def check_prepared(source: Source) -> Iterator[Finding]:
    """Yield a finding for each loader, model or optimizer of a loop that is not prepared.

    Only in a function that makes the Accelerator itself: what comes to another one may have been
    prepared by its caller.
    """
    prepared = _find_prepared(source)
    loops: dict[ast.AST, Loop] = {}
    for call in source.calls if prepared is not None else ():
        owner = receiver(call) if called_name(call) == "backward" else None
        bound = source.bindings(owner) if isinstance(owner, ast.Name) else []
        is_made = [called_name(binding.value) for binding in bound] == ["Accelerator"]
        if is_made and (loop := find_loop(call, source)):
            loops.setdefault(loop.around[-1], loop)
    for use, kind, reason in (
        each for loop in loops.values() for each in _find_unprepared_parts(loop)
    ):
        if prepared is not None and use.id not in prepared:
            yield source.finding(
                use,
                "prepare",
                f"the {kind} `{use.id}` is used without `accelerator.prepare`, so "
                f"{reason}; write `{use.id} = accelerator.prepare({use.id})` before the loop",
            )


def _find_prepared(source: Source) -> set[str] | None:
    """Return the names given to ``prepare``, or None if the source does not show them."""
    names: set[str] = set()
    for node in source.nodes:
        if not (isinstance(node, ast.Attribute) and node.attr in _PREPARE):
            continue
        call = source.parents.get(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            return None  # handed on as a function
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(isinstance(argument, ast.Starred) for argument in given):
            return None
        if not isinstance(source.parents.get(call), ast.Expr):  # else its result is dropped
            names |= {dotted_name(inner) for argument in given for inner in ast.walk(argument)}
    return names


def _find_unprepared_parts(loop: Loop) -> Iterator[tuple[ast.Name, str, str]]:
    """Yield what needs ``prepare`` in a loop: its name, its kind, and what is wrong without it.

    Does not check whether it is prepared. Leaves out loaders that may split the data, optimizers
    that are parameters, and wrapped models.
    """
    source = loop.source
    for name in loop.loaders.values():
        if not any(_gives_own_part(b.value, source) for b in source.bindings(name) if b.value):
            yield name, "loader", "every rank would train on all of the data"
    for name in loop.optimizers.values():
        if not any(isinstance(binding.statement, ast.arg) for binding in source.bindings(name)):
            yield name, "optimizer", "it ignores mixed precision and gradient accumulation"
    for name in loop.models.values():
        if _is_raw_model(name, source):
            yield name, "model", "its gradients would not be averaged over the ranks"


def _gives_own_part(made: ast.expr, source: Source) -> bool:
    """Return whether a DataLoader's source shows that each rank may get its own part of the data.

    A sign is a sampler, ``**kwargs``, a split, or the rank. False means that no sign was seen.
    """
    keywords = made.keywords if isinstance(made, ast.Call) else []
    if any(k.arg in (None, "sampler", "batch_sampler") for k in keywords):
        return True
    names = [node for node in ast.walk(made) if isinstance(node, ast.Name)]
    data = [binding.value for name in names for binding in source.bindings(name)]
    parts = [made, *filter(None, data)]
    is_split = any(_SPLIT.search(name) for part in parts for name in names_in(part))
    return is_split or any(map(source.mentions_rank, parts))


def _is_raw_model(model: ast.Name, source: Source) -> bool:
    """Return whether a name is certain to hold a model that nothing has wrapped.

    The notebook's value decides. Without one, no assignment may wrap the model or use the
    Accelerator. A parameter counts as raw, and a name that the source does not bind does not.
    """
    known = source.is_kind(model, "nn.Module")
    if known is not None:
        return known
    values = [b.value for b in source.bindings(model) if not isinstance(b.statement, ast.arg)]
    if not source.bindings(model):
        return False
    for value in values:
        if value is None or called_name(value) in _WRAPPERS:
            return False
        for node in ast.walk(value):
            parent = source.parents.get(node)
            is_device = isinstance(parent, ast.Attribute) and parent.attr == "device"
            if dotted_name(node) and not is_device and source.is_accelerator(node):
                return False
    return True
