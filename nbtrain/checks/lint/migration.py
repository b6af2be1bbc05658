"""Finds a plain PyTorch loop, and what to change, line by line, so that all ranks train together.

The edits are those of Accelerate's migration guide (huggingface.co/docs/accelerate,
basic_tutorials/migration), and given only where their effect is certain: one function with
model, optimizer and loader in sight. Else a single finding says that each rank trains alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ...findings import Edit, Finding
from .program import Program
from .rules import pinned_strings
from .source_index import Unit, called, devices_of, dotted, is_function, names_in, receiver
from .training_loop import Loop, loop_of, loops_around, role

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
"""What a loop may ask of the model inside the wrapper."""

_MEASURED = re.compile(
    r"loss|acc|best|patience|metric|val|score|nan|stop|err|counter", re.IGNORECASE
)
_ALONE = "each rank would train a separate model"
_COMMAND = "`%%nbtrain migrate` on top of its cell shows what to change, as a diff"
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
    """Return the source with the edits made; their lines are those of the source as given."""
    lines = source.split("\n")
    by_line: dict[int, list[Edit]] = {}
    for edit in edits:
        by_line.setdefault(edit.line, []).append(edit)
    for line, changes in sorted(by_line.items(), reverse=True):  # so that numbers stay valid
        inserted = [edit.insert for edit in changes if edit.insert is not None]
        deletes = any(edit.delete for edit in changes)
        lines[line - 1 : line - 1 + deletes] = inserted
    return "\n".join(lines)


def migration(program: Program) -> Iterator[Finding]:
    """A plain loop: a finding whose edits let it train on all ranks; in doubt one without edits."""
    nodes = [node for unit in program.units for node in unit.nodes]
    # A class of the notebook's own that derives from nothing is no library's Trainer.
    plain = {n.name for n in nodes if isinstance(n, ast.ClassDef) and not (n.bases or n.keywords)}
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if any(map(_DISTRIBUTED.fullmatch, program.names - plain)) or texts & {"RANK", "LOCAL_RANK"}:
        return
    backwards = [
        (unit, call)
        for unit, call in program.calls("backward")
        if receiver(call) is not None and not call.args
        if not program.skipped(call, unit)
    ]
    if program.accelerated or not backwards or not _steps_an_optimizer(program):
        return
    unit, first = backwards[0]
    loop = loop_of(first, unit)
    text = f"this loop does not use the other ranks: {_ALONE}"
    if not loops_around(first, unit):
        text = f"this step does not use the other ranks: {_ALONE}"
    try:
        _require(loop is not None, len(backwards) == 1, not unit.place.endswith(".py"))
        assert loop is not None
        edits = _Migration(loop, program).edits()
        yield unit.finding(first, "migrate", f"{text}, on all of the data; {_COMMAND}", edits=edits)
    except _UncertainError:
        yield unit.finding(first, "migrate", f"{text}; use Accelerate or DDP")


def _steps_an_optimizer(program: Program) -> bool:
    """Return whether an optimizer, and nothing else, is certain to be stepped somewhere."""
    for unit, call in program.calls("step"):
        owner = receiver(call)
        if owner is not None and any("opt" in dotted(o).lower() for o in (owner, *call.args)):
            return True
        if isinstance(owner, ast.Name) and role(owner, unit) == "optimizer":
            return True
    return False


class _Migration:
    """The edits of one loop. Raises `_UncertainError` where one of them is not certain."""

    def __init__(self, loop: Loop, program: Program) -> None:
        self.loop, self.unit, self.program = loop, loop.unit, program
        self.scope = loop.unit.scope(loop.backward)
        self.bound = loop.unit.bound[self.scope]
        _require(len(loop.models) == 1, loop.optimizers, loop.loaders)
        (self.model,) = loop.models
        schedulers = filter(self._is_scheduler, loop.stepped)
        self.names = (self.model, *loop.optimizers, *loop.loaders, *schedulers)
        """What goes through ``prepare``, in the guide's order."""
        self.spans: dict[int, list[tuple[int, int, str]]] = {}
        """(start, end, new text) of what changes within each line."""

    def edits(self) -> tuple[Edit, ...]:
        """Return the lines to insert, and those to replace."""
        self._check_shape()
        self._check_control()
        inserted = self._insertions()
        self._hand_in_what_is_rebound()
        backward = self.loop.backward
        start = self.unit.character(backward.lineno, backward.col_offset)
        self._change(backward.lineno, start, start, "accelerator.backward(")
        self._rewrite_end(backward, f"{_more(backward)})")
        for call in self.loop.calls:
            if called(call) in _CLIPPING and {k.arg for k in call.keywords} <= _CLIPPED:
                self._replace(call.func, f"accelerator.{called(call)}")
        self._place()
        self._unwrap()
        replaced: list[Edit] = []
        for line, spans in self.spans.items():
            text = self.unit.lines[line - 1]
            _require(all(first[1] <= second[0] for first, second in pairwise(sorted(spans))))
            for start, end, new in sorted(spans, reverse=True):
                text = text[:start] + new + text[end:]
            replaced.append(Edit(line, delete=True, insert=text))
        return (*inserted, *replaced)

    def _check_shape(self) -> None:
        """Require one model that is called once a step, in a function that runs once."""
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
        _require(sum(dotted(call.func) == self.model for call in inner) == 1)
        _require(not any(dotted(a) == self.model for call in inner for a in call.args))
        if node is not self.unit.entry and is_function(node):
            calls = list(self.program.calls(node.name))
            _require(len(calls) == 1, node in self.program.everywhere)
            _require(not any(loops_around(call, unit) for unit, call in calls))

    def _check_control(self) -> None:
        """Require that nothing which a rank measures on its own data steers the loop.

        A rank that leaves it earlier, or takes another learning rate, leaves the others waiting or
        with other parameters.
        """
        made = (binding.value for bound in self.bound.values() for binding in bound)
        _require(not any("Plateau" in called(value) for value in made))
        for node in ast.walk(self.loop.around[-1]):
            if isinstance(node, (ast.If, ast.While)):
                inside = [n for statement in node.body for n in ast.walk(statement)]
                leaves = any(isinstance(n, _LEAVES) for n in inside)
                _require(not leaves or not any(map(_MEASURED.search, names_in(node.test))))

    def _is_scheduler(self, name: str) -> bool:
        """Return whether a name is a learning rate scheduler that the innermost loop steps."""
        made = [binding.value for binding in self.bound.get(name, [])]
        inside = self.loop.around[0] in self.unit.ancestors(self.loop.stepped[name])
        if not inside or len(made) != 1 or not isinstance(made[0], ast.Call):
            return False
        given = [*made[0].args, *(keyword.value for keyword in made[0].keywords)]
        return any(dotted(argument) in self.loop.optimizers for argument in given)

    def _insertions(self) -> list[Edit]:
        """Import Accelerate, make the Accelerator, and let everything go through ``prepare``."""
        unit, outermost = self.unit, self.loop.around[-1]
        body = getattr(self.scope, "body", [])
        top, start = _start(unit.module.body), _start(body, past_imports=True)
        if top is None or start is None:
            raise _UncertainError
        _require(_stands_alone(start, unit), _stands_alone(outermost, unit))
        margin, names = _indent(start, unit), ", ".join(self.names)
        made = ["accelerator = Accelerator()"]
        made += [f"{name} = {_RANK_DEVICE}" for name in self._outside_devices()]
        prepared = f"{_indent(outermost, unit)}{names} = accelerator.prepare({names})"
        return [
            Edit(_first_line(top), insert="from accelerate import Accelerator"),
            *(Edit(_first_line(start), insert=margin + text) for text in made),
            Edit(outermost.lineno, insert=prepared),
        ]

    def _hand_in_what_is_rebound(self) -> None:
        """Make parameters of the notebook's variables: ``prepare`` assigns to them here."""
        unit, node = self.unit, self.scope
        names = [name for name in self.names if name not in self.bound]
        if isinstance(node, ast.Module) or not names:
            return
        outside = all(unit.home(n, node) is None and n in unit.namespace for n in names)
        if not (outside and is_function(node) and unit.is_cell and node is unit.entry):
            raise _UncertainError
        line = unit.lines[node.lineno - 1]
        head = re.match(rf"\s*(async\s+)?def\s+{node.name}\s*\(\s*", line)
        if head is None or any(isinstance(n, ast.Global) for n in ast.walk(node)):
            raise _UncertainError
        more = ", " if line[head.end() : head.end() + 1] not in (")", "") else ""
        self._change(node.lineno, head.end(), head.end(), ", ".join(names) + more)

    def _place(self) -> None:
        """Let every device that the source writes out be the rank's own."""
        unit = self.unit
        for node in unit.nodes:
            match node:
                case ast.Assign(targets=[ast.Name()]) if _is_device(node.value):
                    if unit.scope(node) is self.scope:
                        self._replace(node.value, _RANK_DEVICE)
        for call in self._calls():
            keywords = {keyword.arg for keyword in call.keywords}
            if called(call) == "cuda" and not call.args and keywords <= {"non_blocking"}:
                self._rewrite_end(call, f".to({_RANK_DEVICE}{_more(call)})")
            for argument in filter(_is_device, devices_of(call)):
                self._replace(argument, _RANK_DEVICE)

    def _outside_devices(self) -> list[str]:
        """Return the variables of the notebook, and parameters, that say where batches go."""
        names = [device for call in self._calls() for device in devices_of(call)]
        outside: dict[str, None] = {}
        for name in (name for name in names if isinstance(name, ast.Name)):
            kind, own = self.unit.kind(name), self.bound.get(name.id, [])
            is_device = name.id == "device" if kind is None else kind.startswith("device")
            if is_device and not any(isinstance(b.statement, ast.Assign) for b in own):
                outside[name.id] = None
        return list(outside)

    def _calls(self) -> list[ast.Call]:
        """Return the calls of the loop's function, and of what is defined in it."""
        return [call for call in self.unit.calls if self.scope in self.unit.ancestors(call)]

    def _unwrap(self) -> None:
        """Ask the model inside the wrapper for what the wrapper does not have."""
        start, innermost = self.loop.around[-1].lineno, self.loop.around[0]
        home = self.unit.home(self.model, self.scope)
        for use in (load for load in self.unit.loads if load.id == self.model):
            if self.unit.home(use.id, self.unit.scope(use)) is not home:
                continue  # another variable of that name
            above, around = self.unit.parents.get(use), list(self.unit.ancestors(use))
            is_after = use.lineno >= start or self.unit.scope(use) is not self.scope
            is_call = isinstance(above, ast.Call) and above.func is use
            attribute = above.attr if isinstance(above, ast.Attribute) else ""
            if self.scope in around and is_after and not is_call and attribute not in _FORWARDED:
                # A part of the model that is trained by itself goes around the wrapper.
                _require(innermost not in around or attribute in _UNWRAPPED)
                self._replace(use, f"accelerator.unwrap_model({self.model})")

    def _change(self, line: int, start: int, end: int, text: str) -> None:
        self.spans.setdefault(line, []).append((start, end, text))

    def _replace(self, node: ast.expr, text: str) -> None:
        _require(node.end_lineno == node.lineno)
        start = self.unit.character(node.lineno, node.col_offset)
        end = self.unit.character(node.lineno, node.end_col_offset or 0)
        self._change(node.lineno, start, end, text)

    def _rewrite_end(self, call: ast.Call, text: str) -> None:
        """Write `text` in place of the ``.name(…)`` of ``x.name(…)``."""
        owner, line = receiver(call), call.end_lineno or 0
        if owner is None or owner.end_lineno != line:
            raise _UncertainError
        start = self.unit.character(line, owner.end_col_offset or 0)
        end = self.unit.character(line, call.end_col_offset or 0)
        tail = self.unit.lines[line - 1][start:]
        dot = start + len(tail) - len(tail.lstrip(" )"))  # behind the parentheses around x
        self._change(line, dot, end, text)


_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Raise)


def _more(call: ast.Call) -> str:
    """Return the keywords of a call as those that follow another argument."""
    return "".join(f", {ast.unparse(keyword)}" for keyword in call.keywords)


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


def _stands_alone(statement: ast.stmt, unit: Unit) -> bool:
    """Return whether a statement shares none of its lines with another."""
    start = unit.character(statement.lineno, statement.col_offset)
    before = unit.lines[statement.lineno - 1][:start]
    last = statement.end_lineno or statement.lineno
    after = unit.lines[last - 1][unit.character(last, statement.end_col_offset or 0) :].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _indent(statement: ast.stmt, unit: Unit) -> str:
    """Return the white space a statement's line begins with."""
    line = unit.lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _first_line(statement: ast.stmt) -> int:
    """Return a statement's first line, its decorators' included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
