"""Where a plain loop puts its model and batches: the lines that go, and those that change."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from . import values
from .facts import MISSING, called, dotted, receiver
from .plain import Plain
from .prepared import loops_around
from .program import block_of
from .rules import pinned_strings
from .spans import Span, span, stands_alone


def _own_statements(plain: Plain) -> list[ast.stmt]:
    unit = plain.unit
    return [n for n in unit.nodes if isinstance(n, ast.stmt) and unit.scope(n) is plain.scope]


def _is_device_name(name: ast.Name, plain: Plain) -> bool:
    """Return whether a variable holds a device."""
    value = plain.unit.value(name.id, name)
    if value is not MISSING:
        return values.device_type(value) != ""
    bound = plain.unit.bindings(name.id, name)
    if bound and all(one.value is not None and is_device(one.value) for one in bound):
        return True
    return name.id == "device"


def is_device(value: ast.expr) -> bool:
    """Return whether an expression is a device that the source writes out."""
    if dotted(value.func if isinstance(value, ast.Call) else None) == "torch.device":
        return True
    return any(True for _ in pinned_strings(value))


def _placed(value: ast.expr | None, plain: Plain, names: bool = True) -> str:
    """Return the name that ``x.to(device)`` or ``x.cuda()`` puts somewhere; '' for anything else.

    `names`: whether a device held by a variable counts.
    """
    if not isinstance(value, ast.Call) or not isinstance(told := receiver(value), ast.Name):
        return ""
    if called(value) == "cuda" and not value.args:
        return told.id
    if called(value) != "to" or not value.args:
        return ""
    where = value.args[0]
    by_name = names and isinstance(where, ast.Name) and _is_device_name(where, plain)
    return told.id if by_name or is_device(where) else ""


def model_lines(plain: Plain) -> list[ast.stmt]:
    """Return the statements that do nothing but put the model on a device."""
    return [s for s in _own_statements(plain) if _only_places(s, plain) == {plain.model}]


def _only_places(statement: ast.stmt, plain: Plain, names: bool = True) -> set[str]:
    """Return what a statement puts in place, if it does nothing else and can be deleted."""
    found: set[str] = set()
    if isinstance(statement, ast.Expr):
        found = {_placed(statement.value, plain, names)}
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        found = {
            target.id if isinstance(target, ast.Name) and placed == target.id else ""
            for target, placed in ((t, _placed(v, plain, names)) for t, v in pairs)
        }
    if not found or "" in found or not stands_alone(statement, plain.unit):
        return set()
    alone = len(block_of(statement, plain.unit.parents[statement])) == 1
    return set() if alone else found


def batch_lines(plain: Plain) -> list[ast.stmt]:
    """Return the statements that put the loader's batches on a hard-coded device.

    Those that go to ``device`` stay, as in the guide: they will name the right one.
    """
    found: list[ast.stmt] = []
    for loop in loops_around(plain.backwards[0], plain.unit):
        if not isinstance(loop, ast.For):
            continue
        data = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        for statement in ast.walk(loop):
            if not isinstance(statement, ast.Assign) or statement in found:
                continue
            if isinstance(statement.value, ast.Name) and statement.value.id in data:
                names = (n for t in statement.targets for n in ast.walk(t))
                data |= {n.id for n in names if isinstance(n, ast.Name)}  # inputs, targets = batch
            placed = _only_places(statement, plain, names=False)
            if placed and placed <= data:
                found.append(statement)
    return found


def own_devices(plain: Plain) -> list[tuple[ast.Assign, str]]:
    """Return the statements ``device = "cuda"`` of the loop's own scope, with the name."""
    found: list[tuple[ast.Assign, str]] = []
    for statement in _own_statements(plain):
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name) and is_device(statement.value):
            found.append((statement, target.id))
    return found


def used_beside(plain: Plain, name: str, gone: Collection[ast.stmt]) -> bool:
    """Return whether a name is read anywhere but in the statements that go."""
    within = {id(inner) for statement in gone for inner in ast.walk(statement)}
    return any(id(use) not in within for use in plain.uses(name))


def outside_devices(plain: Plain) -> list[str]:
    """Return the variables of the notebook, and parameters, that say where batches go."""
    own = {name for _, name in own_devices(plain)}
    gone = model_lines(plain)
    names: dict[str, None] = {}
    for call in plain.unit.calls:
        arguments = [k.value for k in call.keywords if k.arg == "device"]
        if called(call) == "to":
            arguments += call.args[:1]
        for where in arguments:
            if not (isinstance(where, ast.Name) and where.id not in own):
                continue
            inside = plain.scope.node in plain.unit.ancestors(call)
            if inside and _is_device_name(where, plain):
                names[where.id] = None
    return [name for name in names if used_beside(plain, name, gone)]


def pinned_spans(plain: Plain, skipped: Collection[int]) -> Iterator[Span | None]:
    """Yield the changes that let every other hard-coded device be the rank's own."""
    unit = plain.unit
    for call in unit.calls:
        if id(call) in skipped or plain.scope.node not in unit.ancestors(call):
            continue
        if called(call) == "cuda" and not call.args and isinstance(call.func, ast.Attribute):
            yield _cuda_span(call, call.func.value, plain)
            continue
        where = [k.value for k in call.keywords if k.arg == "device"]
        where += call.args[:1] if called(call) == "to" else []
        for argument in where:
            if is_device(argument):
                yield span(argument, unit, "accelerator.device")


def _cuda_span(call: ast.Call, told: ast.expr, plain: Plain) -> Span | None:
    """Return the change of ``.cuda(…)`` to ``.to(accelerator.device, …)``."""
    whole, start = span(call, plain.unit, ""), span(told, plain.unit, "")
    if whole is None or start is None:
        return None
    text = plain.unit.lines[whole.line - 1][start.end : whole.end]
    found = re.search(r"\.\s*cuda\s*\(\s*", text)
    new = ".to(accelerator.device" + (", " if call.keywords else "")
    at = start.end
    return Span(whole.line, at + found.start(), at + found.end(), new) if found else None
