"""Recognise a plain PyTorch training loop, with everything of it that Accelerate must know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import values
from .facts import MISSING, Binding, Scope, Unit, called, dotted, is_function, names_in, receiver
from .prepared import iterated, loops_around
from .program import Program, block_of, is_loader_call, is_optimizer_call, models_of

DISTRIBUTED = re.compile(
    r"distributed|dist|init_process_group|DistributedDataParallel|DDP|FullyShardedDataParallel"
    r"|FSDP|fully_shard|DataParallel|DistributedSampler|all_reduce|[fF]abric|lightning"
    r"|pytorch_lightning|L|pl|\w*Trainer|TrainingArguments|deepspeed|hvd|horovod|accelerate"
    r"|Accelerator|PartialState|accelerator|notebook_launcher|xm|torch_xla|local_rank|world_size"
    r"|rank|process_index|get_rank|ray|jax|flax|tensorflow|keras|ignite|idist|colossalai|composer"
)
"""Names that show that a program already knows of several ranks, or is no plain loop."""

KEPT = frozenset(
    {"train", "eval", "parameters", "named_parameters", "zero_grad", "to", "cuda", "modules"}
    | {"named_modules", "buffers", "children", "training"}
)
"""What the wrapper that `prepare` puts around a model offers just as the model does."""

UNWRAPPED = frozenset({"state_dict", "load_state_dict", "save_pretrained", "generate", "config"})
"""What must be asked of the model inside the wrapper."""


@dataclass(frozen=True)
class Plain:
    """A loop that can be migrated: its place, and the names of what `prepare` is to get.

    `block` is the list of statements that `outermost`, its outermost ``for``, stands in.
    """

    unit: Unit
    scope: Scope
    block: list[ast.stmt]
    outermost: ast.stmt
    model: str
    optimizers: tuple[str, ...]
    loaders: tuple[str, ...]
    schedulers: tuple[str, ...]
    backwards: tuple[ast.Call, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What goes through ``prepare``, in the guide's order."""
        return (self.model, *self.optimizers, *self.loaders, *self.schedulers)

    @property
    def before(self) -> list[ast.stmt]:
        """The statements that come before the loop, in its block and those around it."""
        found: list[ast.stmt] = []
        below: ast.AST = self.outermost
        for above in self.unit.ancestors(self.outermost):
            block = block_of(below, above)
            found = block[: block.index(below)] + found if isinstance(below, ast.stmt) else found
            if above is self.scope.node:
                break
            below = above
        return found

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
    for unit, call in program.calls():
        told = receiver(call)
        if called(call) != "step" or told is None:
            continue
        if any("opt" in dotted(one).lower() for one in (told, *call.args)):
            return True
        if isinstance(told, ast.Name):
            if program.captured(told.id, told, unit) == "optimizer":
                return True
            if any(is_optimizer_call(b.value) for b in unit.bindings(told.id, told)):
                return True
    return False


def recognise(unit: Unit, backwards: Sequence[ast.Call]) -> Plain | None:
    """Return the loop around these calls with all its parts; None if one is not certain."""
    around = [loops_around(call, unit) for call in backwards]
    if not all(around) or len({loops[-1] for loops in around}) != 1:
        return None
    outermost, scope = around[0][-1], unit.scope(backwards[0])
    calls = [c for c in _calls_in(outermost) if unit.scope(c) is scope]
    innermost = [c for loops in around for c in _calls_in(loops[0])]
    stepped = {name.id: name for c in calls if (name := _stepped(c)) is not None}
    optimizers = [n for n, use in stepped.items() if _is_optimizer(use, scope, unit)]
    models = _models(optimizers, calls, scope, unit)
    loaders = dict.fromkeys(
        name.id
        for loops in around
        for loop in loops
        for name in (iterated(loop.iter) if isinstance(loop, ast.For) else [])
        if _is_loader(name, unit)
    )
    stepped_inside = {name.id for c in innermost if (name := _stepped(c)) is not None}
    schedulers = [n for n in stepped if n in stepped_inside and _schedules(n, optimizers, scope)]
    others = [name for name in stepped if "opt" in name.lower() and name not in optimizers]
    if len(models) != 1 or not optimizers or others or not loaders:
        return None
    return Plain(
        unit,
        scope,
        block_of(outermost, unit.parents[outermost]),
        outermost,
        models[0],
        tuple(optimizers),
        tuple(loaders),
        tuple(schedulers),
        tuple(backwards),
    )


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _stepped(call: ast.Call) -> ast.Name | None:
    told = receiver(call)
    return told if called(call) == "step" and isinstance(told, ast.Name) else None


def _is_parameter(bound: Sequence[Binding]) -> bool:
    return len(bound) == 1 and isinstance(bound[0].statement, ast.arg)


def _is_optimizer(use: ast.Name, scope: Scope, unit: Unit) -> bool:
    value = unit.value(use.id, use)
    if value is not MISSING:
        return values.kind(value) == "optimizer"
    bound = scope.bound.get(use.id, [])
    if _is_parameter(bound):
        return use.id.lower().startswith("opt")
    return bool(bound) and all(is_optimizer_call(one.value) for one in bound)


def _is_loader(name: ast.Name, unit: Unit) -> bool:
    value = unit.value(name.id, name)
    if value is not MISSING:
        return values.kind(value) == "loader"
    bound = unit.bindings(name.id, name)
    if _is_parameter(bound):
        return re.search(r"loader|(^|_)dl($|_)", name.id) is not None
    return bool(bound) and all(is_loader_call(one.value) for one in bound)


def _schedules(name: str, optimizers: Sequence[str], scope: Scope) -> bool:
    """Return whether a name is a learning rate scheduler of one of the optimizers."""
    bound = scope.bound.get(name, [])
    made = bound[0].value if len(bound) == 1 else None
    if not isinstance(made, ast.Call) or "Plateau" in called(made):
        return False
    given = (*made.args, *(keyword.value for keyword in made.keywords))
    return any(isinstance(a, ast.Name) and a.id in optimizers for a in given)


def _models(
    optimizers: Sequence[str], calls: Sequence[ast.Call], scope: Scope, unit: Unit
) -> list[str]:
    """Return whose parameters the optimizers have; what the loop calls if those are handed in."""
    made = [one.value for name in optimizers for one in scope.bound.get(name, [])]
    if made and all(isinstance(value, ast.Call) for value in made):
        found = [name for v in made if isinstance(v, ast.Call) for name in models_of(v)]
        return list(dict.fromkeys(found))
    found = [c.func.id for c in calls if isinstance(c.func, ast.Name) and _is_model(c.func, unit)]
    return list(dict.fromkeys(found))


def _is_model(name: ast.Name, unit: Unit) -> bool:
    value = unit.value(name.id, name)
    bound = unit.bindings(name.id, name)
    given = [one for one in bound if isinstance(one.statement, ast.arg)]
    others = [one.value for one in bound if one not in given]
    moved = all(isinstance(v, ast.Call) and dotted(receiver(v)) == name.id for v in others)
    if given and others and moved and unit.scope(given[0].statement).node is unit.entry:
        value = unit.arguments.get(name.id, MISSING)  # model = model.to(device)
    if value is not MISSING:
        return values.kind(value) == "model" and not re.search("loss|crit|metric", name.id)
    return bool(given) and moved and name.id in ("model", "net", "network")


def _runs_once(plain: Plain, program: Program) -> bool:
    """Return whether the loop's function is what the ranks call, or called once from there."""
    node, unit = plain.scope.node, plain.unit
    if node is unit.entry or isinstance(node, ast.Module):
        return True
    calls = [(u, c) for u, c in program.calls() if is_function(node) and called(c) == node.name]
    if len(calls) != 1:
        return False
    where, call = calls[0]
    scope = where.scope(call).node
    at_start = scope is where.entry or isinstance(scope, ast.Module)
    return at_start and not loops_around(call, where) and not program.guarded(call, where)


_MEASURED = re.compile(
    r"loss|acc|best|patience|metric|val|score|nan|stop|err|counter", re.IGNORECASE
)


def _goes_its_own_way(plain: Plain) -> bool:
    """Return whether what a rank measures on its own data steers the loop: ranks would part.

    One that leaves the loop earlier, or takes another learning rate, leaves the others waiting or
    with other parameters.
    """
    made = (one.value for bound in plain.scope.bound.values() for one in bound)
    if any("Plateau" in called(value) for value in made):
        return True
    for node in ast.walk(plain.outermost):
        if isinstance(node, (ast.If, ast.While)) and any(
            map(_MEASURED.search, names_in(node.test))
        ):
            inner = (n for one in node.body for n in ast.walk(one))
            if any(isinstance(n, (ast.Break, ast.Continue, ast.Return, ast.Raise)) for n in inner):
                return True
    return False


def is_certain(plain: Plain, program: Program) -> bool:
    """Return whether the loop will do under Accelerate what it does alone."""
    unit, names = plain.unit, plain.names
    if not _runs_once(plain, program):
        return False
    if _goes_its_own_way(plain):
        return False
    if not plain.block or isinstance(plain.scope.node, (ast.ClassDef, ast.Lambda)):
        return False
    before = plain.before
    for name in names:
        for one in plain.bindings(name):
            known = one.statement in before or isinstance(one.statement, ast.arg)
            if not name.isidentifier() or not known:
                return False
    forwards = 0
    for call in _calls_in(loops_around(plain.backwards[0], unit)[0]):
        if isinstance(call.func, ast.Name) and call.func.id == plain.model:
            forwards += 1
        if any(isinstance(a, ast.Name) and a.id == plain.model for a in call.args):
            return False  # the function may go around the wrapper
    start = after(plain)
    return forwards == len(plain.backwards) == 1 and all(
        _survives(use, unit) for use in plain.uses(plain.model) if use.lineno >= start
    )


def _survives(use: ast.Name, unit: Unit) -> bool:
    above = unit.parents.get(use)
    return not isinstance(above, ast.Attribute) or above.attr in KEPT | UNWRAPPED


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
            and inner.attr not in KEPT
        }
        made = any(one.statement is statement for n in plain.names for one in plain.bindings(n))
        if made or plain.model in touched or touched & set(plain.optimizers):
            last = statement
    return last


def after(plain: Plain) -> int:
    """Return the line before which ``prepare`` belongs; 0: nothing is made before the loop."""
    last = last_made(plain)
    return (last.end_lineno or last.lineno) + 1 if last is not None else 0


def scaled(call: ast.Call) -> bool:
    """Return whether a loss is scaled by hand, which is Accelerate's task then."""
    told = receiver(call)
    return told is not None and bool(names_in(told) & {"scale", "scaler"})
