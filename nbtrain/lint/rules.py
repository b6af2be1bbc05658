"""The rules: each looks at the whole program and yields notes. In doubt, none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from . import values
from .facts import MISSING, Unit, called, dotted, receiver
from .notes import Note
from .program import Program, defines_backward, note

_PINNED = values.ACCELERATORS
_LOSS = re.compile(r"loss|err|cost|objective|elbo|energy|nll|penalty", re.IGNORECASE)
_DEVICE_TYPES = frozenset({"GradScaler", "autocast", "custom_fwd", "custom_bwd"})
"""What takes a device *type*: "cuda" is right there."""


def backward(program: Program) -> Iterator[Note]:
    """``loss.backward()`` in a program that has an Accelerator."""
    if not program.accelerated:
        return
    calls = [(unit, call) for unit, call in program.calls() if called(call) == "backward"]
    proper = any(program.is_accelerator(receiver(call), unit) for unit, call in calls)
    stepping = {u.scope(call).node for u, call in program.calls() if called(call) == "step"}
    reading = {
        above
        for unit in program.units
        for node in unit.nodes
        if isinstance(node, ast.Attribute) and node.attr == "grad"
        for above in unit.ancestors(node)
    }
    for unit, call in calls:
        told = receiver(call)
        if told is None or call.args or program.is_accelerator(told, unit):
            continue
        if (
            (proper and unit.scope(call).node not in stepping)
            or not _is_loss(told, unit)
            or defines_backward(call, unit)
            or _block(call, unit) in reading  # gradients wanted for themselves: FGSM, saliency
            or program.runs_on_one_rank(call, unit)
        ):
            continue
        yield note(
            unit,
            call,
            "backward",
            "`.backward()` on the loss goes past Accelerate: no scaling for fp16 or for gradient "
            f"accumulation; write `accelerator.backward({_shown(told)})`",
        )


def _is_loss(told: ast.expr, unit: Unit) -> bool:
    if isinstance(told, ast.Name):
        if told.id in ("self", "cls", "engine", "model_engine"):
            return False
        bound = unit.bindings(told.id, told)
        if any(called(one.value)[:1].isupper() for one in bound):
            return False
        if not bound or any(isinstance(one.statement, ast.arg) for one in bound):
            return _LOSS.search(told.id) is not None
        return True
    if isinstance(told, ast.Attribute):
        return _LOSS.search(told.attr) is not None
    if isinstance(told, ast.Call):
        return called(told) != "super"
    return isinstance(told, (ast.BinOp, ast.Subscript, ast.UnaryOp))


def _block(call: ast.Call, unit: Unit) -> ast.AST | None:
    """Return what the statement of a call stands in."""
    statement = next((a for a in unit.ancestors(call) if isinstance(a, ast.stmt)), None)
    return unit.parents.get(statement) if statement is not None else None


def _shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 and "\n" not in text else "loss"


def pinned_device(program: Program) -> Iterator[Note]:
    """A device that is the same on every rank."""
    constants = {
        node.value
        for unit in program.units
        for node in unit.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    if "CUDA_VISIBLE_DEVICES" in constants:
        return
    # torch.cuda.set_device(local_rank) makes a plain "cuda" each rank's own.
    chosen = any(
        dotted(call.func).endswith("cuda.set_device") and call.args and not _constant(call.args[0])
        for _, call in program.calls()
    )
    instead = "accelerator.device" if program.accelerated else 'f"cuda:{local_rank}"'
    for unit in program.units:
        for node, text in _pinned(unit):
            if (chosen and ":" not in text) or program.skipped(node, unit):
                continue
            yield note(
                unit,
                node,
                "device",
                f"{text} is hard-coded: every rank would use that one; write `{instead}`",
            )


def _constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _pinned(unit: Unit) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that pin a device, and the device."""
    for call in unit.calls:
        name, path = called(call), dotted(call.func)
        arguments = [k.value for k in call.keywords if k.arg == "device"]
        if name == "to" and isinstance(call.func, ast.Attribute):
            arguments += call.args[:1]
        elif path.endswith("cuda.set_device"):
            if call.args and isinstance(call.args[0], ast.Constant):
                yield call, f"cuda:{call.args[0].value!r}"
            continue
        elif name == "cuda" and isinstance(call.func, ast.Attribute) and len(call.args) <= 1:
            index = call.args[0] if call.args else None
            if index is None and not call.keywords:
                yield call, "cuda"
            elif isinstance(index, ast.Constant) and isinstance(index.value, int):
                yield call, f"cuda:{index.value}"
            continue
        elif path == "torch.device" and len(call.args) == 1:
            arguments += call.args
        elif path == "torch.device" and len(call.args) == 2 and _constant(call.args[1]):
            yield call, "that device"
            continue
        if name not in _DEVICE_TYPES:
            for argument in arguments:
                yield from pinned_strings(argument)
    yield from _device_variables(unit)


def pinned_strings(argument: ast.expr) -> Iterator[tuple[ast.expr, str]]:
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
        arguments = [k.value for k in call.keywords if k.arg == "device"]
        if called(call) == "to" or dotted(call.func) == "torch.device":
            arguments += call.args[:1]
        for argument in arguments:
            if isinstance(argument, ast.Name):
                yield argument


def captured_accelerator(program: Program) -> Iterator[Note]:
    """An Accelerator that the notebook made, before there were ranks."""
    told: set[str] = set()
    for unit in program.units:
        for name in unit.loads:
            if name.id not in told and program.captured(name.id, name, unit) == "accelerator":
                told.add(name.id)
                yield note(
                    unit,
                    name,
                    "accelerator",
                    f"`{name.id}` was made in the notebook, for one process: make it here, in "
                    "every rank (`accelerator = Accelerator()`)",
                )


def captured_device(program: Program, host: str) -> Iterator[Note]:
    """A device that the notebook chose, before there were ranks."""
    told: set[str] = set()
    for unit in program.units:
        for use in _placing_names(unit):
            name = use.id
            value = unit.value(name, use)
            found = "" if value is MISSING else values.device_type(value)
            on_cpu = found == "cpu" and (host == "cpu" or "device" not in name.lower())
            if not found or on_cpu or name in told or program.skipped(use, unit):
                continue
            told.add(name)
            instead = (
                "accelerator.device" if program.accelerated else 'torch.device("cuda", local_rank)'
            )
            yield note(
                unit,
                use,
                "captured-device",
                f"`{name}` is the notebook's {found} device, the same for every rank; use "
                f"`{instead}`",
            )


_NOT_MODELS = re.compile(r"Tokenizer|Processor|Config|Extractor|Scheduler|Criteria|Metric|Loss$")
_MODELS = re.compile(r"Model|For[A-Z]|Net$|Pipeline|Transformer|LLM|BERT|Bert|GPT")


def built_model(program: Program) -> Iterator[Note]:
    """A model built by each rank where the host has memory for one only."""
    for unit, call in model_calls(program):
        yield note(
            unit,
            call,
            "model-per-rank",
            "every rank would build this model, which this host has no memory for: build it once "
            "in the notebook and hand it in as a parameter",
        )


def model_calls(program: Program) -> Iterator[tuple[Unit, ast.Call]]:
    """Return the calls that build a model, or load one."""
    own = _model_classes(program)
    for unit, call in program.calls():
        name = called(call)
        if name in ("from_pretrained", "from_config"):
            cls = dotted(receiver(call)).rpartition(".")[2]
            is_model = _MODELS.search(cls) is not None or _builds(receiver(call), unit, own)
            is_model = is_model and not _NOT_MODELS.search(cls)
        else:
            is_model = _builds(call.func, unit, own) and not _NOT_MODELS.search(name)
        if not is_model or _within_model(call, unit, own) or program.skipped(call, unit):
            continue
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
    path = dotted(function)
    if not path or function is None:
        return False
    if path in own:
        return True
    first, *rest = path.split(".")
    value = unit.value(first, function)
    for attribute in rest:
        value = values.member(value, attribute)
    if value is MISSING or not values.is_class(value):
        return False
    module, name = values.ancestry(value)[0]
    # Torch's own parts are small: layers, losses. What they are put together to is not.
    small = module.startswith("torch.nn") and not name.startswith(("Sequential", "Transformer"))
    return not small and values.kind_of_class(value) == "model"


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


def doubled(program: Program) -> Iterator[Note]:
    """An object that is made distributed by hand and then again by ``prepare``."""
    for unit, call in program.calls():
        if called(call) != "prepare" or not program.is_accelerator(receiver(call), unit):
            continue
        for argument in call.args:
            if not isinstance(argument, ast.Name):
                continue
            made = [one.value for one in unit.bindings(argument.id, argument) if one.value]
            made = [value for value in made if value.lineno < call.lineno]
            by_hand = _by_hand(made[-1], unit) if made else ""
            if by_hand:
                yield note(
                    unit,
                    argument,
                    "doubled",
                    f"`{argument.id}` has a {by_hand} already, and `prepare` adds another: leave "
                    "it to `prepare`",
                )


def _by_hand(value: ast.expr, unit: Unit) -> str:
    if called(value) in ("DistributedDataParallel", "DDP"):
        return "DistributedDataParallel"
    if called(value) != "DataLoader" or not isinstance(value, ast.Call):
        return ""
    for keyword in value.keywords:
        if keyword.arg != "sampler":
            continue
        made: list[ast.expr | None] = [keyword.value]
        if isinstance(keyword.value, ast.Name):
            made = [one.value for one in unit.bindings(keyword.value.id, keyword.value)]
        if made and all(called(one) == "DistributedSampler" for one in made):
            return "DistributedSampler"
    return ""
