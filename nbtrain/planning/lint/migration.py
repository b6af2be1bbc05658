"""A plain PyTorch loop on several ranks: each would train alone. What to change, line by line.

The edits are those of Accelerate's migration guide (huggingface.co/docs/accelerate,
basic_tutorials/migration), and given only where their effect is certain: one function with
model, optimizer and loader in sight. Else a single finding says that each rank trains alone.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Sequence
from itertools import pairwise

from ...findings import Edit, Finding, Place
from . import value_kinds
from .edits import first_line, indent, stands_alone
from .prepare_rule import loops_around
from .program import Program, defines_backward
from .rules import pinned_strings, shown
from .source_index import MISSING, Unit, called, devices_of, dotted, is_function, receiver
from .training_loop import (
    DISTRIBUTED,
    UNWRAPPED,
    Plain,
    after,
    is_certain,
    last_made,
    recognise,
    scaled,
    steps_an_optimizer,
)

_ALONE = (
    "this loop does not use the other ranks: each rank would train a model of its own, on all of "
    "the data"
)
_STEP_ALONE = "this step does not use the other ranks: each rank would train a model of its own"
RANK_DEVICE = "accelerator.device"
_COMMAND = "`%%nbtrain migrate` on top of the cell shows its changes as a diff"
_CLIPPING = frozenset({"parameters", "max_norm", "norm_type", "clip_value"})
"""What the Accelerator's own functions for clipping take."""


class _UncertainError(Exception):
    """One of the edits cannot be made: the loop has to be changed by hand."""


def migration(program: Program) -> list[Finding]:
    """Return the findings whose edits let a plain loop train on all ranks; in doubt one without."""
    if program.accelerated or program.rankish:
        return []
    known = program.names - _plain_classes(program)
    if any(DISTRIBUTED.fullmatch(name) for name in known):
        return []
    backwards = [
        (unit, call)
        for unit, call in program.calls
        if called(call) == "backward" and receiver(call) is not None and not call.args
        if not defines_backward(call, unit) and not program.skipped(call, unit)
    ]
    if not backwards or not steps_an_optimizer(program):
        return []
    unit, first = backwards[0]
    plain = recognise(first, unit) if len(backwards) == 1 and not scaled(first) else None
    if plain is not None and is_certain(plain, program):
        with contextlib.suppress(_UncertainError):
            return _Changes(plain).findings()
    alone = _ALONE if loops_around(first, unit) else _STEP_ALONE
    return [unit.finding(first, "migrate", f"{alone}; use Accelerate or DDP")]


def _plain_classes(program: Program) -> set[str]:
    """Return the classes of the source that derive from nothing: no library's Trainer."""
    nodes = (node for unit in program.units for node in unit.nodes)
    return {n.name for n in nodes if isinstance(n, ast.ClassDef) and not (n.bases or n.keywords)}


class _Changes:
    """The edits of a loop. Raises `_UncertainError` where one of them cannot be made."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.unit = plain, plain.unit
        self.inserted: list[Finding] = []
        self.spans: dict[int, list[tuple[int, int, str, str]]] = {}
        """(start, end, new text, message) of what changes within each line."""

    def findings(self) -> list[Finding]:
        """Return a finding for each line that is added or changed."""
        self._add_accelerator()
        self._add_parameters()
        backward, head = self.plain.backward, "accelerator.backward("
        more = "".join(f", {ast.unparse(keyword)}" for keyword in backward.keywords)
        self._rewrite(backward, head, "", f"write `{head}{shown(receiver(backward))}{more})`")
        self._clip()
        self._place()
        self._unwrap()
        changed: list[Finding] = []
        for line, spans in self.spans.items():
            text = self.unit.lines[line - 1]
            if any(first[1] > second[0] for first, second in pairwise(sorted(spans))):
                raise _UncertainError  # one within another
            for start, end, new, _ in sorted(spans, reverse=True):
                text = text[:start] + new + text[end:]
            first, *_, message = min(spans)
            changed.append(self._finding(message, first, Edit(line, delete=True, insert=text)))
        return [*self.inserted, *changed]

    def _finding(self, message: str, start: int, edit: Edit) -> Finding:
        place = Place(self.unit.place, edit.line, start + 1)
        return Finding("migrate", message, place=place, edits=(edit,))

    def _insert(self, line: int, margin: str, text: str, message: str) -> None:
        edit = Edit(line, insert=margin + text)
        self.inserted.append(self._finding(message, len(margin), edit))

    def _replace(self, node: ast.expr, text: str, message: str) -> None:
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            raise _UncertainError
        start = self.unit.character(node.lineno, node.col_offset)
        end = self.unit.character(node.lineno, node.end_col_offset)
        self.spans.setdefault(node.lineno, []).append((start, end, text, message))

    def _rewrite(self, call: ast.Call, head: str, method: str, message: str) -> None:
        """Write `head` before ``x.name(…)``, and `method` instead of its ``.name(``."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        line, offset = owner.end_lineno or 0, owner.end_col_offset or 0
        name = re.compile(rf"([\s)]*)\.\s*{called(call)}\s*\(\s*")
        match = name.match(self.unit.lines[line - 1], self.unit.character(line, offset))
        if match is None:  # on several lines
            raise _UncertainError
        new = method + (", " if call.keywords else "")
        self.spans.setdefault(line, []).append((match.end(1), match.end(), new, message))
        if head:
            start = self.unit.character(call.lineno, call.col_offset)
            self.spans.setdefault(call.lineno, []).append((start, start, head, message))

    def _add_accelerator(self) -> None:
        """Import it, make it, and let everything go through ``prepare``."""
        plain, unit = self.plain, self.unit
        top = _start(unit.module.body)
        body = getattr(plain.scope.node, "body", [])
        start = _start(body, past_imports=True)
        if top is None or start is None:
            raise _UncertainError
        if not all(stands_alone(s, unit) for s in (start, *plain.before, plain.loops[-1])):
            raise _UncertainError
        text = "from accelerate import Accelerator"
        message = f"{_ALONE}; with Accelerate they train one model ({_COMMAND}): add `{text}`"
        self._insert(first_line(top), "", text, message)
        line, margin = first_line(start), indent(start, unit)
        text = "accelerator = Accelerator()"
        self._insert(line, margin, text, f"add `{text}`: every rank needs its own")
        for name in self._outside_devices():
            text = f"{name} = {RANK_DEVICE}"
            self._insert(line, margin, text, f"add `{text}`: each rank has its own")
        names = ", ".join(plain.names)
        text = f"{names} = accelerator.prepare({names})"
        last = last_made(plain)
        if last is not None:
            line, margin = after(plain), indent(last, unit)
        elif plain.loops[-1] not in body:
            line, margin = plain.loops[-1].lineno, indent(plain.loops[-1], unit)
        self._insert(line, margin, text, f"add `{text}`")

    def _add_parameters(self) -> None:
        """Hand in what the function would read from the notebook: it is to be rebound here."""
        plain, unit, node = self.plain, self.unit, self.plain.scope.node
        names = [name for name in plain.names if not plain.bindings(name)]
        if isinstance(node, ast.Module) or not names:
            return
        outside = all(unit.home(n, plain.scope) is None and n in unit.namespace for n in names)
        if not (outside and is_function(node) and unit.is_cell and node is unit.entry):
            raise _UncertainError
        line = unit.lines[node.lineno - 1]
        head = re.match(rf"\s*(async\s+)?def\s+{node.name}\s*\(\s*", line)
        if head is None or plain.scope.declared & set(names):
            raise _UncertainError
        more = ", " if line[head.end() : head.end() + 1] not in (")", "") else ""
        span = (head.end(), head.end(), ", ".join(names) + more)
        message = f"add `{', '.join(names)}` to the parameters"
        self.spans.setdefault(node.lineno, []).append((*span, message))

    def _clip(self) -> None:
        for call in self.unit.calls:
            name = called(call)
            if name not in ("clip_grad_norm_", "clip_grad_value_"):
                continue
            known = {keyword.arg for keyword in call.keywords} <= _CLIPPING
            if known and self.unit.scope(call) is self.plain.scope:
                self._replace(call.func, f"accelerator.{name}", f"write `accelerator.{name}`")

    def _place(self) -> None:
        """Let every device that the source writes out be the rank's own."""
        plain, unit, text = self.plain, self.unit, RANK_DEVICE
        for node in unit.nodes:
            if isinstance(node, ast.Assign) and unit.scope(node) is plain.scope:
                name = dotted(node.targets[0])
                if len(node.targets) == 1 and name.isidentifier() and _is_device(node.value):
                    self._replace(node.value, text, f"write `{name} = {text}`")
        message = f"write `{text}`: each rank has its own"
        for call in unit.calls:
            if plain.scope.node not in unit.ancestors(call):
                continue
            keywords = {keyword.arg for keyword in call.keywords}
            if called(call) == "cuda" and not call.args and keywords <= {"non_blocking"}:
                self._rewrite(call, "", f".to({text}", message)
            for argument in filter(_is_device, devices_of(call)):
                self._replace(argument, text, message)

    def _outside_devices(self) -> list[str]:
        """Return the variables of the notebook, and parameters, that say where batches go."""
        plain, unit = self.plain, self.unit
        names: dict[str, None] = {}
        for call in unit.calls:
            for device in devices_of(call) if plain.scope.node in unit.ancestors(call) else ():
                if isinstance(device, ast.Name) and self._holds_outside_device(device):
                    names[device.id] = None
        return list(names)

    def _holds_outside_device(self, name: ast.Name) -> bool:
        value, bound = self.unit.value(name), self.unit.bindings(name)
        if any(isinstance(b.statement, ast.Assign) for b in self.plain.bindings(name.id)):
            return False
        if value is not MISSING:
            return value_kinds.device_type(value) != ""
        written = bool(bound) and all(_is_device(binding.value) for binding in bound)
        return written or name.id == "device"

    def _unwrap(self) -> None:
        """Ask the model inside the wrapper where the wrapper has no answer."""
        plain = self.plain
        text = f"accelerator.unwrap_model({plain.model})"
        for use in plain.uses(plain.model):
            if use.lineno >= after(plain) and _leaves_wrapped(use, self.unit):
                self._replace(use, text, f"write `{text}` here")


def _is_device(value: ast.expr | None) -> bool:
    """Return whether an expression is a device that the source writes out."""
    is_made = isinstance(value, ast.Call) and dotted(value.func) == "torch.device"
    return is_made or any(pinned_strings(value))


def _start(body: Sequence[ast.stmt], past_imports: bool = False) -> ast.stmt | None:
    """Return the first statement after the docstring, ``global`` and what must come first."""
    passed: tuple[type[ast.stmt], ...] = (ast.Global, ast.Nonlocal)
    if past_imports:
        passed = (*passed, ast.Import, ast.ImportFrom)
    for place, statement in enumerate(body):
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not ((place == 0 and text) or future or isinstance(statement, passed)):
            return statement
    return None


def _leaves_wrapped(use: ast.Name, unit: Unit) -> bool:
    """Return whether the model goes out of the loop here: returned, saved, asked for weights."""
    above = unit.parents.get(use)
    if isinstance(above, ast.Attribute):
        return above.attr in UNWRAPPED
    if isinstance(above, ast.Call):
        return dotted(above.func) == "torch.save" and use in above.args
    while isinstance(above, (ast.Tuple, ast.List, ast.Dict)):
        above = unit.parents.get(above)
    return isinstance(above, ast.Return)
