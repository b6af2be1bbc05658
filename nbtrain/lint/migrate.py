"""A plain PyTorch loop on several ranks: each would train alone. What to change, line by line.

The edits are those of Accelerate's migration guide (huggingface.co/docs/accelerate,
basic_tutorials/migration), and given only where it is certain what they do: one function with
model, optimizer and loader in sight. Else a single note says that the ranks do not train together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from . import placement
from .facts import Unit, called, dotted, is_function, receiver
from .notes import Edit, Note
from .plain import (
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
from .program import Program, defines_backward, note, note_at
from .spans import Span, deleted, first_line, indent, replaced, span, stands_alone

_ALONE = "this loop knows nothing of other ranks: each would train alone, on all of the data"


def migration(program: Program) -> list[Note]:
    """Return the notes that make a plain loop train distributed; one without edits in doubt."""
    if program.accelerated or program.rankish:
        return []
    if any(DISTRIBUTED.fullmatch(name) for name in program.names):
        return []
    backwards = [
        (unit, call)
        for unit, call in program.calls()
        if called(call) == "backward" and receiver(call) is not None and not call.args
        if not defines_backward(call, unit) and not program.skipped(call, unit)
    ]
    if not backwards or not steps_an_optimizer(program):
        return []
    unit, first = backwards[0]
    scopes = {u.scope(call).node for u, call in backwards}
    by_hand = any(scaled(call) for _, call in backwards)
    if len(scopes) == 1 and not by_hand:
        plain = recognise(unit, [call for _, call in backwards])
        if plain is not None and is_certain(plain, program):
            changes = Changes(plain)
            if changes.collect():
                return list(changes.notes())
    return [note(unit, first, "migrate", f"{_ALONE}; train with Accelerate or DDP")]


@dataclass
class Changes:
    """The edits of one loop, as they are found; `notes` puts them into the order of lines."""

    plain: Plain
    inserts: list[tuple[int, str, str]] = field(default_factory=list)
    spans: list[tuple[Span, str]] = field(default_factory=list)
    gone: list[tuple[ast.stmt, str]] = field(default_factory=list)

    def collect(self) -> bool:
        """Find all edits; False if one of them cannot be made."""
        return (
            self._accelerator()
            and self._parameters()
            and self._backward()
            and self._clipping()
            and self._placements()
            and self._unwrap()
        )

    def notes(self) -> Iterator[Note]:
        """Yield one note for each line that comes, goes or changes."""
        unit = self.plain.unit
        found: list[Note] = []
        for line, text, message in self.inserts:
            column = len(text) - len(text.lstrip()) + 1
            edit = Edit(line, insert=text)
            found.append(replace(note_at(unit, line, column, "migrate", message), edits=(edit,)))
        for statement, message in self.gone:
            one = note(unit, statement, "migrate", message)
            found.append(replace(one, edits=deleted(statement)))
        for line in dict.fromkeys(change.line for change, _ in self.spans):
            here = [(change, message) for change, message in self.spans if change.line == line]
            edit = replaced(line, [change for change, _ in here], unit)
            first = min(here, key=lambda pair: pair[0].start)
            one = note_at(unit, line, first[0].start + 1, "migrate", first[1])
            found.append(replace(one, edits=(edit,)))
        yield from sorted(found, key=lambda one: one.line)

    def _accelerator(self) -> bool:
        """Import it, make it, and let everything go through ``prepare``."""
        plain, unit = self.plain, self.plain.unit
        top = _start(unit.module.body)
        body = getattr(plain.scope.node, "body", [])
        start = _start(body, past_imports=True)
        if top is None or start is None or first_line(start) == _head_line(plain.scope.node):
            return False
        if any(not _whole_lines(one, unit) for one in (start, *plain.before, plain.outermost)):
            return False
        text = "from accelerate import Accelerator"
        self.inserts.append(
            (first_line(top), text, f"{_ALONE}; with Accelerate they train one model: add `{text}`")
        )
        margin = indent(start, unit)
        made = "accelerator = Accelerator()"
        self.inserts.append((first_line(start), margin + made, f"add `{made}`, in every rank"))
        for name in placement.outside_devices(plain):
            text = f"{name} = accelerator.device"
            self.inserts.append(
                (first_line(start), margin + text, f"add `{text}`: each rank has its own")
            )
        names = ", ".join(plain.names)
        text = f"{names} = accelerator.prepare({names})"
        last = last_made(plain)
        beside = last or (start if plain.block is body else plain.outermost)
        line = after(plain) if last is not None else first_line(beside)
        self.inserts.append((line, indent(beside, unit) + text, f"add `{text}`"))
        return True

    def _parameters(self) -> bool:
        """Hand in what the function would read from the notebook: it is to be rebound here."""
        plain, unit, node = self.plain, self.plain.unit, self.plain.scope.node
        if isinstance(node, ast.Module):
            return True
        names = [name for name in plain.names if not plain.bindings(name)]
        if not names:
            return True
        if not (is_function(node) and unit.is_cell and node is unit.entry):
            return False
        head = re.match(rf"\s*(async\s+)?def\s+{node.name}\s*\(\s*", unit.lines[node.lineno - 1])
        if head is None or plain.scope.declared & set(names):
            return False
        more = unit.lines[node.lineno - 1][head.end() : head.end() + 1] not in (")", "")
        text = ", ".join(names) + (", " if more else "")
        change = Span(node.lineno, head.end(), head.end(), text)
        self.spans.append((change, f"take {', '.join(f'`{n}`' for n in names)} as parameters"))
        return True

    def _backward(self) -> bool:
        for call in self.plain.backwards:
            told = receiver(call)
            text = ast.get_source_segment("\n".join(self.plain.unit.lines), told) if told else None
            if not text:
                return False
            more = "".join(f", {ast.unparse(keyword)}" for keyword in call.keywords)
            new = f"accelerator.backward({text}{more})"
            if not self._change(call, new, f"write `{new}`"):
                return False
        return True

    def _clipping(self) -> bool:
        for call in self._own_calls():
            name = called(call)
            known = {"parameters", "max_norm", "norm_type", "clip_value"}
            if name not in ("clip_grad_norm_", "clip_grad_value_"):
                continue
            if not {keyword.arg for keyword in call.keywords} <= known:
                continue
            if not self._change(call.func, f"accelerator.{name}", f"write `accelerator.{name}`"):
                return False
        return True

    def _placements(self) -> bool:
        """Let Accelerate place the model and the batches; what else is placed asks it where."""
        plain = self.plain
        gone = placement.model_lines(plain) + placement.batch_lines(plain)
        for statement in gone:
            self.gone.append((statement, "delete this line: Accelerate places it"))
        for statement, name in placement.own_devices(plain):
            if placement.used_beside(plain, name, gone):
                text = "accelerator.device"
                if not self._change(statement.value, text, f"write `{name} = {text}`"):
                    return False
            else:
                self.gone.append((statement, "delete this line: Accelerate knows the device"))
        skipped = {id(one) for statement, _ in self.gone for one in ast.walk(statement)}
        skipped |= {id(n) for s, _ in placement.own_devices(plain) for n in ast.walk(s)}
        for change in placement.pinned_spans(plain, skipped):
            if change is None:
                return False
            self.spans.append((change, "write `accelerator.device`: each rank has its own"))
        return True

    def _unwrap(self) -> bool:
        """Ask the model inside the wrapper where the wrapper has no answer."""
        plain = self.plain
        start = after(plain)
        for use in plain.uses(plain.model):
            if use.lineno >= start and _leaves_wrapped(use, plain.unit):
                text = f"accelerator.unwrap_model({plain.model})"
                if not self._change(use, text, f"write `{text}` here"):
                    return False
        return True

    def _own_calls(self) -> list[ast.Call]:
        unit, scope = self.plain.unit, self.plain.scope
        return [call for call in unit.calls if unit.scope(call) is scope]

    def _change(self, node: ast.expr, text: str, message: str) -> bool:
        change = span(node, self.plain.unit, text)
        if change is not None:
            self.spans.append((change, message))
        return change is not None


def _start(body: list[ast.stmt], past_imports: bool = False) -> ast.stmt | None:
    """Return the first statement after the docstring, ``global`` and what must come first."""
    for place, one in enumerate(body):
        text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        future = isinstance(one, ast.ImportFrom) and one.module == "__future__"
        imports = past_imports and isinstance(one, (ast.Import, ast.ImportFrom))
        declares = isinstance(one, (ast.Global, ast.Nonlocal))
        if not ((place == 0 and text) or future or imports or declares):
            return one
    return None


def _head_line(node: ast.AST) -> int:
    return node.lineno if is_function(node) else 0


def _whole_lines(statement: ast.stmt, unit: Unit) -> bool:
    return isinstance(statement, (ast.FunctionDef, ast.ClassDef)) or stands_alone(statement, unit)


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
