"""The rules about ``backward`` and about devices. In doubt, they find nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...findings import Finding
from .program import Program, outermost
from .source_index import Unit, called, devices_of, dotted, is_function, names_in, receiver
from .value_kinds import ACCELERATORS


def backward(program: Program) -> Iterator[Finding]:
    """``loss.backward()`` in a training step of a program that has an Accelerator."""
    if not program.accelerated:
        return
    stepping = {unit.scope(call) for unit, call in program.calls("step")}
    for unit, call in program.calls("backward"):
        loss, scope, top = receiver(call), unit.scope(call), outermost(call, unit)
        if (
            loss is None
            or call.args
            or scope not in stepping
            or dotted(loss) in ("self", "cls")
            or called(loss) == "super"
            or program.is_accelerator(loss, unit)
            or program.skipped(call, unit)
            or (is_function(top) and top not in program.everywhere)
            or _is_apart(scope, unit, program)
        ):
            continue
        yield unit.finding(
            call,
            "backward",
            "`.backward()` bypasses Accelerate, which scales the loss for fp16 and for gradient "
            f"accumulation; write `accelerator.backward({_shown(loss)})`",
        )


def _is_apart(scope: ast.AST, unit: Unit, program: Program) -> bool:
    """Return whether a function trains by itself beside Accelerate, for comparison.

    Others call ``prepare``; it does not, nor does what makes its optimizer, which no caller gives
    it.
    """
    preparing = {u.scope(c) for u, c in program.calls() if called(c).startswith("prepare")}
    owners = [receiver(c) for c in unit.calls if called(c) == "step" and unit.scope(c) is scope]
    names = [owner for owner in owners if isinstance(owner, ast.Name)]
    bound = [binding.statement for name in names for binding in unit.bindings(name)]
    makers = {called(getattr(statement, "value", None)) for statement in bound}
    is_given = any(isinstance(statement, ast.arg) for statement in bound)
    is_prepared = scope in preparing or makers & {getattr(node, "name", "") for node in preparing}
    return bool(preparing and bound) and not is_given and not is_prepared


def _shown(loss: ast.expr) -> str:
    """Return the source of a loss, for a message."""
    text = ast.unparse(loss)
    return text if 0 < len(text) <= 40 and "\n" not in text else "loss"


_CHOOSERS = re.compile(r"Accelerator|PartialState|\w*TrainingArguments").fullmatch
"""What makes a rank's own GPU the current one, where ranks train on GPUs."""

_TAKE_A_TYPE = frozenset({"GradScaler", "autocast", "custom_fwd", "custom_bwd"})
"""What takes the type of a device: "cuda" is right there."""

_ASKS = frozenset({"is_available", "device_count", "is_cuda_available", "is_torch_cuda_available"})


def devices(program: Program, host: str) -> Iterator[Finding]:
    """A device that is the same on every rank: written out, or chosen in the notebook.

    `host` is what the ranks train on, "cpu" or "cuda".
    """
    instead = "accelerator.device"
    if not program.accelerated:
        number = "local_rank" if "local_rank" in program.names else "os.environ['LOCAL_RANK']"
        instead = f'f"cuda:{{{number}}}"'
    for unit, node, text in _pinned(program, host):
        if not program.skipped(node, unit):
            text = (
                f"{text} is hard-coded, so every rank would use the same device; write `{instead}`"
            )
            yield unit.finding(node, "device", text)
    reported: set[str] = set()
    for unit, name in ((u, name) for u in program.units for name in _placing_names(u)):
        _, is_device, kind = (unit.kind(name) or "").partition("device: ")
        on_cpu = kind == "cpu" and (host == "cpu" or "device" not in name.id.lower())
        if is_device and not on_cpu and name.id not in reported and not program.skipped(name, unit):
            reported.add(name.id)
            text = (
                f"`{name.id}` is a {kind} device of the notebook, so every rank would use the same"
            )
            yield unit.finding(name, "device", f"{text}; use `{instead}`")


def _pinned(program: Program, host: str) -> Iterator[tuple[Unit, ast.expr, str]]:
    """Yield what pins every rank to one device, and the device.

    A plain "cuda" is each rank's own where something chose the rank's GPU.
    """
    nodes = (node for unit in program.units for node in unit.nodes)
    if any(isinstance(n, ast.Constant) and n.value == "CUDA_VISIBLE_DEVICES" for n in nodes):
        return
    calls = [call for _, call in program.calls()]
    is_chosen = any(map(_chooses_device, calls))
    is_chosen |= host != "cpu" and any(_CHOOSERS(called(call)) for call in calls)
    for unit in program.units:
        for node, text in _written(unit):
            if (":" in text or not is_chosen) and not _asks_before(node, unit, host):
                yield unit, node, text


def _chooses_device(call: ast.Call) -> bool:
    """Return whether a call makes a plain "cuda" each rank's own: ``set_device(local_rank)``."""
    sets = dotted(call.func).endswith(("cuda.set_device", "accelerator.set_device_index"))
    is_constant = not call.args or isinstance(call.args[0], ast.Constant)
    return (sets and not is_constant) or called(call) == "init_device_mesh"


def _asks_before(node: ast.AST, unit: Unit, host: str) -> bool:
    """Return whether a node is evaluated only where there is an accelerator, or an old torch."""
    tests = [a.test for a in unit.ancestors(node) if isinstance(a, (ast.If, ast.IfExp))]
    asks = host == "cpu" and any(not names_in(test).isdisjoint(_ASKS) for test in tests)
    return asks or any(ast.unparse(test) == "hasattr(torch, 'accelerator')" for test in tests)


def _written(unit: Unit) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that write a device out, and the device."""
    for call in unit.calls:
        name, path, arguments = called(call), dotted(call.func), devices_of(call)
        if path.endswith("cuda.set_device") or (path == "torch.device" and len(call.args) == 1):
            arguments += call.args
        if name == "cuda" and receiver(call) and not call.args and not call.keywords:
            yield call, "cuda"
        for index in call.args[-1:] if name == "cuda" or path.endswith("cuda.set_device") else ():
            if isinstance(index, ast.Constant) and type(index.value) is int:
                yield call, f"cuda:{index.value}"
        for argument in arguments if name not in _TAKE_A_TYPE else ():
            yield from pinned_strings(argument)
    # device = "cuda", where that variable then places something
    used = {(name.id, unit.home(name.id, unit.scope(name))) for name in _placing_names(unit)}
    for node in unit.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if (name, unit.scope(node)) in used:
                yield from pinned_strings(node.value)


def pinned_strings(argument: ast.expr | None) -> Iterator[tuple[ast.expr, str]]:
    """Yield the pinned devices an argument may be: itself, or a branch of ``a if … else b``."""
    if isinstance(argument, ast.IfExp):
        yield from pinned_strings(argument.body)
        yield from pinned_strings(argument.orelse)
    elif isinstance(argument, ast.Constant):
        text = argument.value
        if isinstance(text, str) and ACCELERATORS.fullmatch(text):
            yield argument, text


def _placing_names(unit: Unit) -> Iterator[ast.Name]:
    """Yield the names that say where something goes."""
    for call in unit.calls:
        first = call.args[:1] if dotted(call.func) == "torch.device" else []
        for argument in devices_of(call) + first:
            if isinstance(argument, ast.Name):
                yield argument
