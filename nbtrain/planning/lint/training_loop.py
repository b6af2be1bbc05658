"""Recognise a plain PyTorch training loop, with everything of it that Accelerate must know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import value_kinds
from .prepare_rule import Loops, iterated, loops_around
from .program import Program, blocks, models_of, role
from .source_index import (
    MISSING,
    Binding,
    Scope,
    Unit,
    arguments_of,
    called,
    dotted,
    is_function,
    names_in,
    receiver,
)

DISTRIBUTED = re.compile(
    r"distributed|dist|init_process_group|DistributedDataParallel|DDP|FullyShardedDataParallel"
    r"|FSDP|fully_shard|DataParallel|DistributedSampler|all_reduce|[fF]abric|lightning"
    r"|pytorch_lightning|L|pl|\w*Trainer|TrainingArguments|deepspeed|hvd|horovod|accelerate"
    r"|Accelerator|PartialState|accelerator|notebook_launcher|xm|torch_xla|local_rank|world_size"
    r"|rank|process_index|get_rank|ray|jax|flax|tensorflow|keras|ignite|idist|colossalai|composer"
)
"""Names that show that a program already knows of several ranks, or is no plain loop."""

FORWARDED = frozenset(
    {"train", "eval", "parameters", "named_parameters", "zero_grad", "to", "cuda", "modules"}
    | {"named_modules", "buffers", "children", "training"}
)
"""What the wrapper that `prepare` puts around a model offers just as the model does."""

UNWRAPPED = frozenset({"state_dict", "load_state_dict", "save_pretrained", "generate", "config"})
"""What must be asked of the model inside the wrapper."""


@dataclass(frozen=True)
class Plain:
    """A loop that can be migrated: its place, and the names of what `prepare` is to get."""

    unit: Unit
    scope: Scope
    backward: ast.Call

    loops: Loops
    """Those around the backward, the innermost first."""

    model: str
    optimizers: tuple[str, ...]
    loaders: tuple[str, ...]
    schedulers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What goes through ``prepare``, in the guide's order."""
        return (self.model, *self.optimizers, *self.loaders, *self.schedulers)

    @property
    def before(self) -> list[ast.stmt]:
        """The statements that come before the loop, in its block and those around it."""
        statements: list[ast.stmt] = []
        below: ast.AST = self.loops[-1]
        for above in self.unit.ancestors(below):
            for block in blocks(above):
                if below in block:
                    statements = block[: block.index(below)] + statements
            if above is self.scope.node:
                break
            below = above
        return statements

    def bindings(self, name: str) -> list[Binding]:
        """Return what binds a name in the loop's own scope."""
        return self.scope.bound.get(name, [])

    def uses(self, name: str) -> Iterator[ast.Name]:
        """Yield where a name of the loop's scope is read, in functions within it too."""
        for load in self.unit.loads:
            inside = self.scope.node in self.unit.ancestors(load)
            if load.id == name and inside:
                yield load


def steps_an_optimizer(program: Program) -> bool:
    """Return whether an optimizer, and nothing else, is certain to be stepped somewhere."""
    for unit, call in program.calls:
        owner = receiver(call)
        if called(call) != "step" or owner is None:
            continue
        if any("opt" in dotted(operand).lower() for operand in (owner, *call.args)):
            return True
        if isinstance(owner, ast.Name) and role(owner, unit) == "optimizer":
            return True
    return False


def recognise(backward: ast.Call, unit: Unit) -> Plain | None:
    """Return the loop around a call with all its parts; None if one is not certain."""
    loops, scope = loops_around(backward, unit), unit.scope(backward)
    if not loops:
        return None
    calls = [call for call in calls_in(loops[-1]) if unit.scope(call) is scope]
    stepped = {name.id: name for call in calls for name in _stepped(call)}
    optimizers = [name for name, use in stepped.items() if role(use, unit) == "optimizer"]
    models = _models(optimizers, calls, scope, unit)
    iterators = [
        name for loop in loops if isinstance(loop, ast.For) for name in iterated(loop.iter)
    ]
    loaders = dict.fromkeys(name.id for name in iterators if role(name, unit) == "loader")
    inside = {name.id for call in calls_in(loops[0]) for name in _stepped(call)}
    schedulers = [n for n in stepped if n in inside and _schedules(n, optimizers, scope)]
    others = [name for name in stepped if "opt" in name.lower() and name not in optimizers]
    if len(models) != 1 or not optimizers or others or not loaders:
        return None
    parts = (models[0], tuple(optimizers), tuple(loaders), tuple(schedulers))
    return Plain(unit, scope, backward, loops, *parts)


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Return the calls below a node."""
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _stepped(call: ast.Call) -> list[ast.Name]:
    owner = receiver(call)
    return [owner] if called(call) == "step" and isinstance(owner, ast.Name) else []


def _schedules(name: str, optimizers: Sequence[str], scope: Scope) -> bool:
    """Return whether a name is a learning rate scheduler of one of the optimizers."""
    made = [binding.value for binding in scope.bound.get(name, [])]
    if len(made) != 1 or not isinstance(made[0], ast.Call) or "Plateau" in called(made[0]):
        return False
    return any(isinstance(a, ast.Name) and a.id in optimizers for a in arguments_of(made[0]))


def _models(
    optimizers: Sequence[str], calls: Sequence[ast.Call], scope: Scope, unit: Unit
) -> list[str]:
    """Return whose parameters the optimizers have; what the loop calls if those are handed in."""
    made = [binding.value for name in optimizers for binding in scope.bound.get(name, [])]
    optimizer_calls = [value for value in made if isinstance(value, ast.Call)]
    if made and len(optimizer_calls) == len(made):
        names = [name for optimizer in optimizer_calls for name in models_of(optimizer)]
    else:
        functions = [call.func for call in calls if isinstance(call.func, ast.Name)]
        names = [function.id for function in functions if _is_model(function, unit)]
    return list(dict.fromkeys(names))


def _is_model(name: ast.Name, unit: Unit) -> bool:
    value, bound = unit.value(name), unit.bindings(name)
    given = [binding for binding in bound if isinstance(binding.statement, ast.arg)]
    others = [binding.value for binding in bound if binding not in given]
    moved = all(isinstance(v, ast.Call) and dotted(receiver(v)) == name.id for v in others)
    if given and others and moved and unit.scope(given[0].statement).node is unit.entry:
        value = unit.arguments.get(name.id, MISSING)  # model = model.to(device)
    if value is not MISSING:
        return value_kinds.kind(value) == "model" and not re.search("loss|crit|metric", name.id)
    return bool(given) and moved and name.id in ("model", "net", "network")


def _runs_once(plain: Plain, program: Program) -> bool:
    """Return whether the loop's function is what the ranks call, or called once from there."""
    node, unit = plain.scope.node, plain.unit
    if node is unit.entry or isinstance(node, ast.Module):
        return True
    calls = [(u, c) for u, c in program.calls if is_function(node) and called(c) == node.name]
    if len(calls) != 1:
        return False
    caller, call = calls[0]
    scope = caller.scope(call).node
    at_start = scope is caller.entry or isinstance(scope, ast.Module)
    return at_start and not loops_around(call, caller) and not program.guarded(call, caller)


_MEASURED = re.compile(
    r"loss|acc|best|patience|metric|val|score|nan|stop|err|counter", re.IGNORECASE
)


def _goes_its_own_way(plain: Plain) -> bool:
    """Return whether what a rank measures on its own data steers the loop: ranks would part.

    One that leaves the loop earlier, or takes another learning rate, leaves the others waiting or
    with other parameters.
    """
    made = (binding.value for bound in plain.scope.bound.values() for binding in bound)
    if any("Plateau" in called(value) for value in made):
        return True
    for node in ast.walk(plain.loops[-1]):
        if isinstance(node, (ast.If, ast.While)) and any(
            map(_MEASURED.search, names_in(node.test))
        ):
            inner = (n for statement in node.body for n in ast.walk(statement))
            if any(isinstance(n, (ast.Break, ast.Continue, ast.Return, ast.Raise)) for n in inner):
                return True
    return False


def is_certain(plain: Plain, program: Program) -> bool:
    """Return whether the loop will do the same under Accelerate as without it."""
    unit, before = plain.unit, plain.before
    if not _runs_once(plain, program) or _goes_its_own_way(plain):
        return False
    if isinstance(plain.scope.node, (ast.ClassDef, ast.Lambda)):
        return False
    bound = [binding.statement for name in plain.names for binding in plain.bindings(name)]
    if not all(s in before or isinstance(s, ast.arg) for s in bound):
        return False
    if not all(map(str.isidentifier, plain.names)):
        return False
    calls = calls_in(plain.loops[0])
    forwards = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == plain.model]
    given = [a for call in calls for a in call.args if isinstance(a, ast.Name)]
    if len(forwards) != 1 or any(name.id == plain.model for name in given):
        return False  # a function that gets the model may go around the wrapper
    start = after(plain)
    return all(_survives(use, unit) for use in plain.uses(plain.model) if use.lineno >= start)


def _survives(use: ast.Name, unit: Unit) -> bool:
    above = unit.parents.get(use)
    return not isinstance(above, ast.Attribute) or above.attr in FORWARDED | UNWRAPPED


def last_made(plain: Plain) -> ast.stmt | None:
    """Return the statement after which ``prepare`` belongs: all that it is given is made.

    Later still if weights are loaded or parts of the model are touched: that is done to the
    model itself. None: nothing is made before the loop.
    """
    last: ast.stmt | None = None
    for statement in plain.before:
        touched = {
            inner.value.id
            for inner in ast.walk(statement)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.value, ast.Name)
            and inner.attr not in FORWARDED
        }
        made = any(b.statement is statement for n in plain.names for b in plain.bindings(n))
        if made or plain.model in touched or touched & set(plain.optimizers):
            last = statement
    return last


def after(plain: Plain) -> int:
    """Return the line before which ``prepare`` belongs; 0: nothing is made before the loop."""
    last = last_made(plain)
    return (last.end_lineno or last.lineno) + 1 if last is not None else 0


def scaled(call: ast.Call) -> bool:
    """Return whether a loss is scaled by hand, which is Accelerate's task then."""
    loss = receiver(call)
    return loss is not None and bool(names_in(loss) & {"scale", "scaler"})
