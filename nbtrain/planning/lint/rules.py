"""The rules: each looks at the whole program and yields findings. In doubt, none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from ...findings import Finding
from ..task_values import is_class, module_of
from . import value_kinds
from .program import Program, defines_backward
from .source_index import MISSING, Unit, called, devices_of, dotted, is_function, names_in, receiver

_PINNED = value_kinds.ACCELERATORS
_LOSS = re.compile(r"loss|err|cost|objective|elbo|energy|nll|penalty", re.IGNORECASE)
_DEVICE_TYPES = frozenset({"GradScaler", "autocast", "custom_fwd", "custom_bwd"})
"""What takes a device *type*: "cuda" is right there."""


def backward(program: Program) -> Iterator[Finding]:
    """``loss.backward()`` in a program that has an Accelerator."""
    if not program.accelerated:
        return
    calls = [(unit, call) for unit, call in program.calls if called(call) == "backward"]
    proper = any(program.is_accelerator(receiver(call), unit) for unit, call in calls)
    stepping = {u.scope(call).node for u, call in program.calls if called(call) == "step"}
    if not stepping:  # of an optimizer or a library that is not read: nothing is known
        return
    reading = {
        above
        for unit in program.units
        for node in unit.nodes
        if isinstance(node, ast.Attribute) and node.attr == "grad"
        for above in unit.ancestors(node)
    }
    for unit, call in calls:
        loss = receiver(call)
        statement = next((a for a in unit.ancestors(call) if isinstance(a, ast.stmt)), call)
        if (
            loss is None
            or call.args
            or program.is_accelerator(loss, unit)
            or (proper and unit.scope(call).node not in stepping)
            or unit.parents.get(statement) in reading  # gradients wanted for themselves: FGSM
            or not _is_loss(loss, unit)
            or defines_backward(call, unit)
            or any(isinstance(a, ast.arguments) for a in unit.ancestors(call))  # a default
            or program.runs_on_one_rank(call, unit)
            or _is_apart(unit.function_around(call), unit, program)
        ):
            continue
        yield unit.finding(
            call,
            "backward",
            "`.backward()` bypasses Accelerate, which scales the loss for fp16 and for gradient "
            f"accumulation; write `accelerator.backward({shown(loss)})`",
        )


def _is_apart(function: ast.AST, unit: Unit, program: Program) -> bool:
    """Return whether a function trains by itself beside Accelerate, for comparison.

    It makes the optimizer that it steps; others call ``prepare``, and neither it nor what makes
    its optimizer does.
    """
    nodes = list(ast.walk(function)) if is_function(function) else []
    stepped = [receiver(n) for n in nodes if isinstance(n, ast.Call) and called(n) == "step"]
    made = [b for name in stepped if isinstance(name, ast.Name) for b in unit.bindings(name)]
    if not made or any(isinstance(b.statement, ast.arg) or b.statement not in nodes for b in made):
        return False
    values = [getattr(b.statement, "value", None) for b in made]
    makers = [m for value in values for _, m in program.functions.get(called(value), [])]
    prepares = [call for _, call in program.calls if called(call).startswith("prepare")]
    own = {node for part in (function, *makers) for node in ast.walk(part)}
    return bool(prepares) and own.isdisjoint(prepares)


def _is_loss(loss: ast.expr, unit: Unit) -> bool:
    match loss:
        case ast.Name(id="self" | "cls" | "engine" | "model_engine"):
            return False
        case ast.Name(id=name):
            bound = unit.bindings(loss)
            if any(called(binding.value)[:1].isupper() for binding in bound):
                return False
            is_local = bound and not any(isinstance(b.statement, ast.arg) for b in bound)
            return bool(is_local or _LOSS.search(name))
        case ast.Attribute(attr=name):
            return _LOSS.search(name) is not None
        case ast.Call():
            return called(loss) != "super"
    return isinstance(loss, (ast.BinOp, ast.Subscript, ast.UnaryOp))


def shown(loss: ast.expr | None) -> str:
    """Return the source of a loss, for a message."""
    text = ast.unparse(loss) if loss is not None else ""
    return text if 0 < len(text) <= 40 and "\n" not in text else "loss"


def pinned_device(program: Program, host: str) -> Iterator[Finding]:
    """A device that is the same on every rank."""
    nodes = (node for unit in program.units for node in unit.nodes)
    if any(isinstance(n, ast.Constant) and n.value == "CUDA_VISIBLE_DEVICES" for n in nodes):
        return
    chosen = any(_chooses_device(call) for _, call in program.calls)
    makers = [(u, call) for u, call in program.calls if host != "cpu" and _CHOOSERS(called(call))]
    instead = _own_device(program)
    for unit in program.units:
        for node, text in _pinned(unit):
            is_own = chosen or any(_is_before(maker, node, unit) for maker in makers)
            if (is_own and ":" not in text) or program.skipped(node, unit):
                continue
            if _asks_before(node, unit, host):
                continue  # no rank comes to it
            yield unit.finding(
                node,
                "device",
                f"{text} is hard-coded, so that every rank would use the same; write `{instead}`",
            )


def _own_device(program: Program) -> str:
    """Return what a rank writes for its device."""
    if program.accelerated:
        return "accelerator.device"
    number = "local_rank" if "local_rank" in program.names else "os.environ['LOCAL_RANK']"
    return f'f"cuda:{{{number}}}"'


_CHOOSERS = re.compile(r"Accelerator|PartialState|\w*TrainingArguments").fullmatch
"""What makes a rank's own GPU the current one, where ranks train on GPUs."""


def _chooses_device(call: ast.Call) -> bool:
    """Return whether a call makes a plain "cuda" each rank's own: ``set_device(local_rank)``."""
    path = dotted(call.func)
    sets = path.endswith(("cuda.set_device", "accelerator.set_device_index"))
    is_constant = not call.args or isinstance(call.args[0], ast.Constant)
    return (sets and not is_constant) or called(call) == "init_device_mesh"


def _is_before(maker: tuple[Unit, ast.Call], node: ast.expr, unit: Unit) -> bool:
    """Return whether a call comes before a node; in doubt it does."""
    other, call = maker
    if other is not unit or unit.scope(call) is not unit.scope(node):
        return True
    return call.lineno < node.lineno


def _asks_before(node: ast.AST, unit: Unit, host: str) -> bool:
    """Return whether a node is evaluated only where there is an accelerator, or an old torch."""
    tests = [a.test for a in unit.ancestors(node) if isinstance(a, (ast.If, ast.IfExp))]
    asks = host == "cpu" and any(not names_in(test).isdisjoint(_ASKS) for test in tests)
    return asks or any(ast.unparse(test) == "hasattr(torch, 'accelerator')" for test in tests)


_ASKS = frozenset({"is_available", "device_count", "is_cuda_available", "is_torch_cuda_available"})


def _pinned(unit: Unit) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that pin a device, and the device."""
    for call in unit.calls:
        name, path, arguments = called(call), dotted(call.func), devices_of(call)
        last = call.args[-1] if call.args else None
        index = last.value if isinstance(last, ast.Constant) else None
        sets = path.endswith("cuda.set_device")
        if sets or (path == "torch.device" and len(call.args) == 1):
            arguments += call.args
        if path == "torch.device" and len(call.args) == 2 and type(index) is int:
            for _, device in pinned_strings(call.args[0]):
                yield call, f"{device}:{index}"
        elif (sets or name == "cuda") and receiver(call) and type(index) is int:
            yield call, f"cuda:{index}"
        elif name == "cuda" and receiver(call) and not call.args and not call.keywords:
            yield call, "cuda"
        for argument in arguments if name not in _DEVICE_TYPES else ():
            yield from pinned_strings(argument)
    yield from _device_variables(unit)


def pinned_strings(argument: ast.expr | None) -> Iterator[tuple[ast.expr, str]]:
    """Yield the pinned devices an argument may be: itself, or a branch of ``a if … else b``."""
    if isinstance(argument, ast.IfExp):
        yield from pinned_strings(argument.body)
        yield from pinned_strings(argument.orelse)
    elif isinstance(argument, ast.Constant):
        text = argument.value
        if isinstance(text, str) and _PINNED.fullmatch(text):
            yield argument, text


def _device_variables(unit: Unit) -> Iterator[tuple[ast.expr, str]]:
    """Yield the strings of ``device = "cuda"`` where that variable then places something."""
    used = {(use.id, unit.home(use.id, unit.scope(use))) for use in _placing_names(unit)}
    for node in unit.nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and (target.id, unit.scope(node)) in used:
                yield from pinned_strings(node.value)


def _placing_names(unit: Unit) -> Iterator[ast.Name]:
    """Yield the names that say where something goes."""
    for call in unit.calls:
        first = call.args[:1] if dotted(call.func) == "torch.device" else []
        for argument in devices_of(call) + first:
            if isinstance(argument, ast.Name):
                yield argument


def captured_accelerator(program: Program) -> Iterator[Finding]:
    """An Accelerator that the notebook made, before there were ranks."""
    nodes = [(unit, node) for unit in program.units for node in unit.nodes]
    made_here = {n.attr for _, n in nodes if isinstance(n, ast.Attribute) and not _is_load(n)}
    reported: set[str] = set()
    for unit, node in nodes:
        if not _is_load(node) or getattr(node, "attr", "") in made_here:
            continue
        name = ast.unparse(node) if program.captured(node, unit) == "accelerator" else ""
        if name and name not in reported:
            reported.add(name)
            yield unit.finding(
                node,
                "accelerator",
                f"`{name}` was created in the notebook, for one process; create it here, in "
                "every rank (`accelerator = Accelerator()`)",
            )


def _is_load(node: ast.AST) -> TypeGuard[ast.expr]:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def captured_device(program: Program, host: str) -> Iterator[Finding]:
    """A device that the notebook chose, before there were ranks."""
    reported: set[str] = set()
    for unit in program.units:
        for use in _placing_names(unit):
            name = use.id
            value = unit.value(use)
            kind = "" if value is MISSING else value_kinds.device_type(value)
            on_cpu = kind == "cpu" and (host == "cpu" or "device" not in name.lower())
            if not kind or on_cpu or name in reported or program.skipped(use, unit):
                continue
            reported.add(name)
            yield unit.finding(
                use,
                "captured-device",
                f"`{name}` is a {kind} device of the notebook, the same for every rank; use "
                f"`{_own_device(program)}`",
            )


_NOT_MODELS = re.compile(r"Tokenizer|Processor|Config|Extractor|Scheduler|Criteria|Metric|Loss$")
_MODELS = re.compile(r"Model|For[A-Z]|Net$|Pipeline|Transformer|LLM|BERT|Bert|GPT")


def built_model(program: Program) -> Iterator[Finding]:
    """A model built by each rank where the host has memory for one only."""
    for unit, call in model_calls(program):
        yield unit.finding(
            call,
            "model-per-rank",
            "every rank would build this model, and this host does not have the memory; build it "
            "once in the notebook and pass it as a parameter",
        )


def model_calls(program: Program) -> Iterator[tuple[Unit, ast.Call]]:
    """Return the calls that build a model, or load one."""
    own = _model_classes(program)
    for unit, call in program.calls:
        loads = called(call) in ("from_pretrained", "from_config")
        cls = receiver(call) if loads else call.func
        name = dotted(cls).rpartition(".")[2]
        is_model = (loads and _MODELS.search(name)) or _builds(cls, unit, own)
        if not is_model or _NOT_MODELS.search(name):
            continue
        if not _within_model(call, unit, own) and not program.skipped(call, unit):
            yield unit, call


def _model_classes(program: Program) -> set[str]:
    """Return the classes defined in the sources that derive from a Module, as written."""
    known: set[str] = {"Module", "PreTrainedModel"}
    nodes = [n for unit in program.units for n in unit.nodes if isinstance(n, ast.ClassDef)]
    for _ in range(5):
        for node in nodes:
            if any(dotted(base).rpartition(".")[2] in known for base in node.bases):
                known.add(node.name)
    return known - {"Module"}


def _builds(function: ast.expr | None, unit: Unit, own: set[str]) -> bool:
    if dotted(function) in own:
        return True
    cls = _named(function, unit)
    if not is_class(cls):
        return False
    # Torch's own parts are small: layers, losses. What they are put together to is not.
    whole = value_kinds.name_of(cls).startswith(("Sequential", "Transformer"))
    small = module_of(cls).startswith("torch.nn") and not whole
    return not small and value_kinds.kind_of_class(cls) == "model"


def _named(node: ast.expr | None, unit: Unit) -> Any:
    """Return the notebook's ``a``, or ``b`` of its module ``a``; anything else is no class."""
    if isinstance(node, ast.Attribute):
        return value_kinds.member(_named(node.value, unit), node.attr)
    return unit.value(node) if isinstance(node, ast.Name) else None


def _within_model(call: ast.Call, unit: Unit, own: set[str]) -> bool:
    """Return whether a call makes a part of another model, or one without memory."""
    for above in unit.ancestors(call):
        if isinstance(above, ast.ClassDef) and above.name in own:
            return True
        if isinstance(above, (ast.With, ast.AsyncWith)):
            items = ast.dump(ast.Tuple([item.context_expr for item in above.items]))
            if "meta" in items or "init_empty_weights" in items:
                return True
    return False


def doubled(program: Program) -> Iterator[Finding]:
    """An object that is made distributed by hand and then again by ``prepare``."""
    for unit, call in program.calls:
        if called(call) != "prepare" or not program.is_accelerator(receiver(call), unit):
            continue
        for argument in call.args:
            bound = unit.bindings(argument) if isinstance(argument, ast.Name) else []
            values = [binding.value for binding in bound]
            made = [value for value in values if value and value.lineno < call.lineno]
            by_hand = _by_hand(made[-1], unit) if made else ""
            if by_hand:
                yield unit.finding(
                    argument,
                    "doubled",
                    f"`{ast.unparse(argument)}` already has a {by_hand}, and `prepare` adds "
                    "another; leave that to `prepare`",
                )


def _by_hand(value: ast.expr, unit: Unit) -> str:
    if called(value) in ("DistributedDataParallel", "DDP"):
        return "DistributedDataParallel"
    keywords = value.keywords if isinstance(value, ast.Call) else []
    for keyword in keywords if called(value) == "DataLoader" else ():
        sampler = keyword.value
        made = (
            [b.value for b in unit.bindings(sampler)]
            if isinstance(sampler, ast.Name)
            else [sampler]
        )
        if (
            keyword.arg == "sampler"
            and made
            and all(called(m) == "DistributedSampler" for m in made)
        ):
            return "DistributedSampler"
    return ""
