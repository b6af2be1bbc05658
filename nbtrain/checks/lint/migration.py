"""Finds a plain PyTorch loop, and what to change, line by line, so that all ranks train together.

The edits are those of Accelerate's migration guide (huggingface.co/docs/accelerate,
basic_tutorials/migration), and given only where their effect is certain: one function with
model, optimizer and loader in sight. For any other loop, the comparison of ranks reports after
the first steps that each rank trains alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ...findings import Edit, Finding
from .rules import devices_of, notebook_device, pinned_strings, saves_of_every_rank
from .source import (
    MISSING,
    Source,
    called_name,
    dotted_name,
    first_line,
    is_function,
    loops_around,
    names_in,
    receiver,
)
from .training_loop import Loop, find_loop

_DISTRIBUTED = re.compile(
    r"distributed|dist|init_process_group|DistributedDataParallel|DDP|FullyShardedDataParallel"
    r"|FSDP|fully_shard|DataParallel|DistributedSampler|all_reduce|[fF]abric|lightning"
    r"|pytorch_lightning|L|pl|\w*Trainer|TrainingArguments|deepspeed|hvd|horovod|accelerate"
    r"|Accelerator|PartialState|accelerator|notebook_launcher|xm|torch_xla|local_rank|world_size"
    r"|rank|process_index|get_rank|ray|jax|flax|tensorflow|keras|ignite|idist|colossalai|composer"
)
"""Names that show that a program already knows of several ranks, or is no plain loop."""

_FORWARDED = frozenset(
    {"train", "eval", "parameters", "named_parameters", "zero_grad", "to", "cuda", "modules"}
    | {"named_modules", "buffers", "children", "training"}
)
"""What the wrapper that `prepare` puts around a model offers just as the model does."""

_UNWRAPPED = frozenset({"state_dict", "save_pretrained", "generate", "config"})
"""What a loop may use of the model inside the wrapper."""

_MEASURED = re.compile(
    r"loss|acc|best|patience|metric|val|score|nan|stop|err|counter", re.IGNORECASE
)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_CLIPPED = frozenset({"parameters", "max_norm", "norm_type", "clip_value"})
"""What the Accelerator's own functions for clipping take."""

_RANK_DEVICE = "accelerator.device"


class _UncertainError(Exception):
    """The loop has to be changed by hand."""


def _require(*conditions: object) -> None:
    """Raise `_UncertainError` unless all of this holds."""
    if not all(conditions):
        raise _UncertainError


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    """Return the source with all edits made.

    The line numbers of the edits are those of the source as given.
    """
    lines = source.split("\n")
    by_line: dict[int, list[Edit]] = {}
    for edit in edits:
        by_line.setdefault(edit.line, []).append(edit)
    for line, changes in sorted(by_line.items(), reverse=True):  # so that numbers stay valid
        inserted = [edit.insert for edit in changes if edit.insert is not None]
        deletes = any(edit.delete for edit in changes)
        lines[line - 1 : line - 1 + deletes] = inserted
    return "\n".join(lines)


def find_migration(source: Source, names: set[str]) -> Finding | None:
    """Return a finding whose edits make a plain loop train on all ranks, if they are certain.

    Returns None if one of `names`, the names in all sources of the task, belongs to a library for
    several ranks (``Trainer``, ``Accelerator``, ``dist``), if there is not exactly one
    ``loss.backward()``, if that is in a ``.py`` file, or on any doubt.
    """
    # A class of the notebook's own that derives from nothing is no library's Trainer.
    classes = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
    plain = {node.name for node in classes if not (node.bases or node.keywords)}
    texts = {node.value for node in source.nodes if isinstance(node, ast.Constant)}
    if any(map(_DISTRIBUTED.fullmatch, names - plain)) or texts & {"RANK", "LOCAL_RANK"}:
        return None
    backwards = [
        call
        for call in source.calls
        if called_name(call) == "backward" and receiver(call) is not None and not call.args
        if source.runs(call)
    ]
    loop = find_loop(backwards[0], source) if len(backwards) == 1 else None
    if loop is None or source.place.endswith(".py"):
        return None
    try:
        edits = _Migration(loop).edits()
    except _UncertainError:
        return None
    return source.finding(
        loop.backward,
        "migrate",
        "this loop does not use the other ranks: each rank would train a separate model, on all "
        "of the data; `%%nbtrain migrate` on top of its cell shows what to change, as a diff",
        edits=edits,
    )


class _Migration:
    """The edits of one loop. Raises `_UncertainError` where one of them is not certain."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.source = loop, loop.source
        self.scope = loop.source.scope(loop.backward)
        self.bound = loop.source.bound[self.scope]
        _require(len(loop.models) == 1, loop.optimizers, loop.loaders)
        (self.model,) = loop.models
        schedulers = filter(self._is_scheduler, loop.stepped)
        self.names = (self.model, *loop.optimizers, *loop.loaders, *schedulers)
        """What goes through ``prepare``, in the guide's order."""
        self.spans: dict[int, list[tuple[int, int, str]]] = {}
        """(start, end, new text) of what changes within each line."""

    def edits(self) -> tuple[Edit, ...]:
        """Return the edits that insert and replace lines. To be called once.

        Raises `_UncertainError` if one of them is not certain.
        """
        self._check_shape()
        self._check_control()
        inserted = self._insert_accelerator()
        self._add_rebound_parameters()
        backward = self.loop.backward
        start = self.source.column(backward.lineno, backward.col_offset)
        self._change(backward.lineno, start, start, "accelerator.backward(")
        self._rewrite_end(backward, f"{_more(backward)})")
        for call in self.loop.calls:
            if called_name(call) in _CLIPPING and {k.arg for k in call.keywords} <= _CLIPPED:
                self._replace(call.func, f"accelerator.{called_name(call)}")
        self._replace_devices()
        self._unwrap_model()
        self._save_once()
        replaced: list[Edit] = []
        for line, spans in self.spans.items():
            text = self.source.lines[line - 1]
            _require(all(first[1] <= second[0] for first, second in pairwise(sorted(spans))))
            for start, end, new in sorted(spans, reverse=True):
                text = text[:start] + new + text[end:]
            replaced.append(Edit(line, delete=True, insert=text))
        return (*inserted, *replaced)

    def _check_shape(self) -> None:
        """Raise `_UncertainError` unless the loop has the shape that the edits assume.

        One model that is called once in a step, no GradScaler, everything made before the loop, and
        a function that runs once.
        """
        loop, node = self.loop, self.scope
        loss = receiver(loop.backward)
        _require(
            loss is not None and not names_in(loss) & {"scale", "scaler"},  # Accelerate's task then
            not isinstance(node, (ast.ClassDef, ast.Lambda)),
            not [n for n in loop.stepped if "opt" in n.lower() and n not in loop.optimizers],
        )
        for name in self.names:  # made before the loop, not again in each epoch
            made = (binding.statement for binding in self.bound.get(name, []))
            _require(all(getattr(s, "lineno", 0) < loop.around[-1].lineno for s in made))
        # A function that gets the model may go around the wrapper.
        inner = [n for n in ast.walk(loop.around[0]) if isinstance(n, ast.Call)]
        _require(sum(dotted_name(call.func) == self.model for call in inner) == 1)
        _require(not any(dotted_name(a) == self.model for call in inner for a in call.args))
        if node is not self.source.entry and is_function(node):
            calls = [call for call in self.source.calls if called_name(call) == node.name]
            _require(len(calls) == 1, node in self.source.everywhere)
            _require(not loops_around(calls[0], self.source))

    def _check_control(self) -> None:
        """Raise `_UncertainError` if a value that a rank measures on its own data steers the loop.

        A rank that leaves it earlier, or takes another learning rate, leaves the others waiting or
        with other parameters.
        """
        made = (binding.value for bound in self.bound.values() for binding in bound)
        _require(not any("Plateau" in called_name(value) for value in made))
        for node in ast.walk(self.loop.around[-1]):
            if isinstance(node, (ast.If, ast.While)):
                inside = [n for s in (*node.body, *node.orelse) for n in ast.walk(s)]
                leaves = isinstance(node, ast.While) or any(isinstance(n, _LEAVES) for n in inside)
                _require(not leaves or not any(map(_MEASURED.search, names_in(node.test))))

    def _is_scheduler(self, name: str) -> bool:
        """Return whether a name is a learning rate scheduler that the innermost loop steps."""
        made = [binding.value for binding in self.bound.get(name, [])]
        inside = self.loop.around[0] in self.source.ancestors(self.loop.stepped[name])
        if not inside or len(made) != 1 or not isinstance(made[0], ast.Call):
            return False
        given = [*made[0].args, *(keyword.value for keyword in made[0].keywords)]
        return any(dotted_name(argument) in self.loop.optimizers for argument in given)

    def _insert_accelerator(self) -> list[Edit]:
        """Return edits that import Accelerate, make the Accelerator and call ``prepare``.

        Device names from outside are set to its device. Raises `_UncertainError` without a place
        for a statement, and if a statement there shares its line with another one.
        """
        source, outermost = self.source, self.loop.around[-1]
        top = _first_statement(source.module.body)
        start = _first_statement(getattr(self.scope, "body", []), past_imports=True)
        if top is None or start is None:
            raise _UncertainError
        _require(_has_own_lines(start, source), _has_own_lines(outermost, source))
        names = ", ".join(self.names)
        made = ["accelerator = Accelerator()"]
        made += [f"{name} = {_RANK_DEVICE}" for name in self._outside_devices()]
        prepared = f"{_indent(outermost, source)}{names} = accelerator.prepare({names})"
        return [
            Edit(first_line(top), insert="from accelerate import Accelerator"),
            *(Edit(first_line(start), insert=_indent(start, source) + text) for text in made),
            Edit(outermost.lineno, insert=prepared),
        ]

    def _add_rebound_parameters(self) -> None:
        """Put parameters first in the function's head, for variables that ``prepare`` assigns.

        These are the notebook's own variables. The parameters have no defaults. Does nothing in a
        cell without a function, or if no such variable is assigned. Raises `_UncertainError` if a
        name is not the notebook's, if the function belongs to an earlier cell or has a ``global``
        statement, or if its head cannot be edited as one line.
        """
        source, node = self.source, self.scope
        names = [name for name in self.names if name not in self.bound]
        if isinstance(node, ast.Module) or not names:
            return
        for name in names:
            _require(source.scope_of_name(name, node) is None, name in source.namespace)
        if not is_function(node) or node is not source.entry or node is source.tree:
            raise _UncertainError  # an earlier cell has its calls elsewhere
        line = source.lines[node.lineno - 1]
        head = re.match(rf"\s*(async\s+)?def\s+{node.name}\s*\(\s*", line)
        if head is None or any(isinstance(n, ast.Global) for n in ast.walk(node)):
            raise _UncertainError
        more = ", " if line[head.end() : head.end() + 1] not in (")", "") else ""
        self._change(node.lineno, head.end(), head.end(), ", ".join(names) + more)

    def _replace_devices(self) -> None:
        """Record changes that write ``accelerator.device`` for devices in the loop's function.

        These are assigned devices, ``device=…``, the first argument of ``.to``, and ``.cuda()``.
        Raises `_UncertainError` for a device that is written over several lines.
        """
        for node in self.source.nodes:
            match node:
                case ast.Assign(targets=[ast.Name()]) if _is_device(node.value):
                    if self.source.scope(node) is self.scope:
                        self._replace(node.value, _RANK_DEVICE)
        for call in self._calls():
            keywords = {keyword.arg for keyword in call.keywords}
            if called_name(call) == "cuda" and not call.args and keywords <= {"non_blocking"}:
                self._rewrite_end(call, f".to({_RANK_DEVICE}{_more(call)})")
            for argument in filter(_is_device, devices_of(call)):
                self._replace(argument, _RANK_DEVICE)

    def _outside_devices(self) -> list[str]:
        """Return names that the loop's function uses as devices, and gets from outside.

        These are variables of the notebook that hold a device, and names ``device`` of unknown
        value.
        """
        names = [device for call in self._calls() for device in devices_of(call)]
        outside: dict[str, None] = {}
        for name in (name for name in names if isinstance(name, ast.Name)):
            is_unknown = self.source.value(name) is MISSING
            is_device = name.id == "device" if is_unknown else notebook_device(self.source, name)
            own = self.bound.get(name.id, [])
            if is_device and not any(isinstance(b.statement, ast.Assign) for b in own):
                outside[name.id] = None
        return list(outside)

    def _calls(self) -> list[ast.Call]:
        """Return the calls of the loop's function, and of what is defined in it."""
        return [call for call in self.source.calls if self.scope in self.source.ancestors(call)]

    def _unwrap_model(self) -> None:
        """Record changes that unwrap the model where the wrapper lacks an attribute.

        Raises `_UncertainError` if the innermost loop passes the model on, or uses a part of it
        that is trained by itself.
        """
        source, model = self.source, self.model
        start, innermost = self.loop.around[-1].lineno, self.loop.around[0]
        for use in (node for node in source.nodes if isinstance(node, ast.Name)):
            if use.id != model or not isinstance(use.ctx, ast.Load):
                continue
            scope = source.scope(use)
            if source.scope_of_name(model, scope) is not source.scope_of_name(model, self.scope):
                continue  # another variable of that name
            parent, around = source.parents.get(use), list(source.ancestors(use))
            is_after = use.lineno >= start or scope is not self.scope
            is_call = isinstance(parent, ast.Call) and parent.func is use
            attribute = parent.attr if isinstance(parent, ast.Attribute) else ""
            if self.scope in around and is_after and not is_call and attribute not in _FORWARDED:
                # A part of the model that is trained by itself goes around the wrapper.
                _require(innermost not in around or attribute in _UNWRAPPED)
                self._replace(use, f"accelerator.unwrap_model({model})")

    def _save_once(self) -> None:
        """Record changes so that only the main process writes a file of `torch.save`.

        What is written into a buffer or into a file of each rank stays, and what is written
        elsewhere, where no Accelerator is known. If the source loads or opens a file, all saves
        stay: other ranks may load what the main process has not written yet, and each rank empties
        a file that it opens to write.
        """
        if any(called_name(call) in ("load", "open") for call in self.source.calls):
            return
        for call in saves_of_every_rank(self.source):
            keywords = {keyword.arg for keyword in call.keywords}
            is_plain = len(call.args) <= 2 and keywords <= {"obj", "f"}
            if is_plain and dotted_name(call.func) == "torch.save" and call in self._calls():
                self._replace(call.func, "accelerator.save")

    def _change(self, line: int, start: int, end: int, text: str) -> None:
        self.spans.setdefault(line, []).append((start, end, text))

    def _replace(self, node: ast.expr, text: str) -> None:
        """Record that `text` replaces an expression of the source.

        Raises `_UncertainError` for an expression over several lines.
        """
        _require(node.end_lineno == node.lineno)
        start = self.source.column(node.lineno, node.col_offset)
        end = self.source.column(node.lineno, node.end_col_offset or 0)
        self._change(node.lineno, start, end, text)

    def _rewrite_end(self, call: ast.Call, text: str) -> None:
        """Record that `text` replaces the ``.name(…)`` of a call ``x.name(…)``.

        Raises `_UncertainError` if that part is not on one line.
        """
        owner, line = receiver(call), call.end_lineno or 0
        if owner is None or owner.end_lineno != line:
            raise _UncertainError
        start = self.source.column(line, owner.end_col_offset or 0)
        end = self.source.column(line, call.end_col_offset or 0)
        tail = self.source.lines[line - 1][start:]
        dot = start + len(tail) - len(tail.lstrip(" )"))  # behind the parentheses around x
        self._change(line, dot, end, text)


_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Raise)


def _more(call: ast.Call) -> str:
    """Return the keywords of a call as those that follow another argument."""
    return "".join(f", {ast.unparse(keyword)}" for keyword in call.keywords)


def _is_device(value: ast.expr | None) -> bool:
    """Return whether an expression is a device that the source writes out."""
    is_made = isinstance(value, ast.Call) and dotted_name(value.func) == "torch.device"
    return is_made or any(pinned_strings(value))


def _first_statement(body: Sequence[ast.stmt], past_imports: bool = False) -> ast.stmt | None:
    """Return the first statement after a docstring, ``global`` and ``__future__`` imports.

    With `past_imports`, also after other imports. None without such a statement.
    """
    passed: tuple[type[ast.stmt], ...] = (ast.Global, ast.Nonlocal)
    if past_imports:
        passed = (*passed, ast.Import, ast.ImportFrom)
    for place, statement in enumerate(body):
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not ((place == 0 and text) or future or isinstance(statement, passed)):
            return statement
    return None


def _has_own_lines(statement: ast.stmt, source: Source) -> bool:
    """Return whether a statement shares its lines with no other statement."""
    start = source.column(statement.lineno, statement.col_offset)
    before = source.lines[statement.lineno - 1][:start]
    last = statement.end_lineno or statement.lineno
    after = source.lines[last - 1][source.column(last, statement.end_col_offset or 0) :].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _indent(statement: ast.stmt, source: Source) -> str:
    """Return the white space a statement's line begins with."""
    line = source.lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]
