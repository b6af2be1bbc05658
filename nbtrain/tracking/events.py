"""Defines the events of a run, and their lines of JSON.

The fields of an event that `from_line` returns have the declared types, so no reader checks them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from ..findings import Finding
from ..system.text import MAX_TIME_S
from . import clock

Measured = Annotated[float, "measured"]
"""A number that the training computes: it may be NaN or infinite."""

LossBin = tuple[int, Measured, str, int, Measured, Measured]
"""Losses that a curve shows as one: the last step, the mean, the name, how many, least, most."""

Values = Mapping[str, float | str]
"""Numbers and texts by name."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rank, or to the run."""

    kind: ClassVar[str] = ""
    """The name of the class in files: lower case, unless the class declares another."""
    time: float
    """Seconds since the epoch."""
    rank: int
    """-1: the run."""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind or cls.__name__.lower()


@dataclass(frozen=True)
class Spawned(Event):
    """The launcher made the rank's process."""

    pid: int = 0
    node: str = ""
    """Its host, if that is not the launcher's."""


@dataclass(frozen=True)
class Started(Event):
    """The rank is about to run the user's code."""

    pid: int = 0


@dataclass(frozen=True)
class Progress(Event):
    """A progress bar moved."""

    bar: int = 0
    """The number of the bar in its rank."""
    n: float = 0
    total: float | None = None
    elapsed: float = 0.0
    """Seconds."""
    description: str = ""
    unit: str = "it"
    closed: bool = False
    kept: bool = True
    """Whether the bar stays on the screen once it is closed (tqdm's `leave`)."""


@dataclass(frozen=True)
class Metrics(Event):
    """The user logged values, at an optional step."""

    step: int | None = None
    values: Values = field(default_factory=dict)
    at: int = 0
    """The number of optimizer steps before; 0 if none was observed."""


@dataclass(frozen=True)
class TrainingCounts:
    """Counts of a training since its start. None: unknown."""

    steps: int = 0
    """Optimizer steps."""
    elapsed: float = 0.0
    """Seconds since the first batch."""
    waited: float = 0.0
    """The part of these seconds spent waiting for the loader."""
    samples: int | None = None
    loss: Measured | None = None
    """The last loss that was read."""
    has_diverged: bool = False
    """Whether the losses of the last steps were not finite."""
    lr: float | None = None
    precision: str = ""
    """'no', 'bf16', 'fp16', 'fp8', or 'bf16 weights' without autocast; "": unknown."""
    epoch: int | None = None
    """From 1, as `batch` and `batches`, of the loader whose batches are trained on."""
    batch: int | None = None
    batches: int | None = None
    allocated: int | None = None
    """Bytes of GPU memory, as torch counts them, as `reserved` and `peak`."""
    reserved: int | None = None
    peak: int | None = None
    loops: tuple[tuple[str, int, int, int], ...] = ()
    """The loops around a step, from the outermost in: name, rounds done, all rounds, and the number
    of the first. Empty unless all of it is known."""
    epochs: int | None = None
    """The number of the last epoch."""
    training: int = 1
    """As in `EpochEnd`."""
    losses: tuple[tuple[int, Measured, str], ...] = ()
    """Losses since the last report, each with its step and a name. The name is not "" only if
    several optimizers take turns."""
    loss_bins: tuple[LossBin, ...] = ()
    """Others since then, where there are too many to report each."""


@dataclass(frozen=True)
class TrainingUpdate(TrainingCounts, Event, kind="training"):
    """The counts of a rank's training, observed in torch."""

    rests: bool = False
    """Whether the training has not continued since these counts."""

    def all_losses(self) -> list[LossBin]:
        """Return the losses since the last report in the order of their steps, as bins."""
        single = ((step, loss, name, 1, loss, loss) for step, loss, name in self.losses)
        return sorted((*self.loss_bins, *single), key=itemgetter(0))


@dataclass(frozen=True)
class EpochEnd(Event, kind="epoch"):
    """An epoch has ended: the next made its first step, or the code returned."""

    epoch: int = 0
    """The number that the loop gives it."""
    steps: int = 0
    """Optimizer steps since the start."""
    seconds: float = 0.0
    """Including its validation."""
    loss: Measured | None = None
    """The mean of its losses. On a GPU not all are read."""
    training: int = 1
    """The number of the training in the function: each fold of a cross-validation is one."""


JOINING = "joining"
"""The phase of a rank that forms a process group and waits for the other ranks."""


@dataclass(frozen=True)
class NotFinite(Event, kind="not_finite"):
    """A rank's loss was NaN or infinite for the first time. An event of the run."""

    loss_rank: int = 0
    step: int = 0
    """The number of steps before; -1: unknown."""
    loss: str = ""
    """``nan``, ``inf`` or ``-inf``, which JSON numbers cannot be."""


_LOSS = re.compile(
    r"((train(ing)?|step|epoch)[/_. -])*loss([/_. -](train(ing)?|step|epoch))*", re.I
)


@lru_cache(4096)
def is_training_loss(name: str) -> bool:
    """Whether a metric of this name is the loss of the training, and not of a validation."""
    return _LOSS.fullmatch(name) is not None


@dataclass(frozen=True)
class Phase(Event):
    """The rank began another phase than training: 'joining', 'saving', 'compiling'; '' ends it."""

    phase: str = ""


@dataclass(frozen=True)
class Debugger(Event):
    """A debugger waits for commands in the rank. Without an address, it has ended."""

    address: str = ""
    """Its socket."""
    place: str = ""
    """The line of the code."""


@dataclass(frozen=True)
class WorkSample(Event, kind="work"):
    """The rank's data and how it trains together with others: after its first steps, at its end."""

    steps: int = 0
    losses: tuple[float, ...] = ()
    """The first losses."""
    batches: tuple[str, ...] = ()
    """Checksums of the first batches; "" for a batch that cannot be read."""
    splits_data: bool = False
    """Whether the sampler of the first loader gives each rank different samples."""
    last_loss: Measured | None = None
    is_last: bool = False
    """Whether the rank's code has ended."""
    has_joined: bool = False
    """Whether the rank is in a process group with others."""
    is_wrapped: str = ""
    """Whether a model is data-parallel over all ranks ('whole'), or over some ('part')."""
    has_exchanged: bool = True
    """Whether there were collectives between its steps; True if that is unknown."""
    asks_rank: bool = False
    """Whether the source uses the rank."""
    gathers: bool = False
    """Whether values of all ranks were gathered before the loss, which may be made of them."""
    is_excused: bool = False
    """Whether ranks may share the training in another way, or the code wants no notes."""
    file: str = ""
    """The file of the user's line that makes the steps."""
    line: int = 0
    library: str = ""
    """The library that makes the step, if one does: 'lightning'."""
    weights: str = ""
    """At the end: shapes and a checksum of some trained parameters; "" if they are sharded or were
    deleted."""


@dataclass(frozen=True)
class Compiled(Event):
    """The number of programs that torch_xla has compiled for the rank, and the time that took."""

    programs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Group(Event):
    """The rank is about to join a process group other than the default one."""

    name: str = ""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hang(Event):
    """Ranks make no progress, and why. An empty text: they make progress again."""

    text: str = ""
    stuck: tuple[int, ...] = ()
    """The ranks that others wait for; empty if unknown, as `waiting`."""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Resources(Event):
    """The launcher measured a rank and its child processes."""

    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    """Bytes (USS, or RSS if that cannot be read)."""
    gpu: int | None = None
    """The index of its device."""
    gpu_memory: int | None = None
    """Bytes that it uses there."""


@dataclass(frozen=True)
class TensorMemory(Event, kind="held"):
    """The rank counted the bytes of its models and optimizers on one type of device."""

    on: str = ""
    weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0


@dataclass(frozen=True)
class GpuMemory(Event, kind="cards"):
    """The launcher measured the host's GPUs: before the ranks start, and after they ended."""

    gpus: tuple[tuple[int, str, int], ...] = ()
    """(index, name, used bytes) of each."""


@dataclass(frozen=True)
class Host(Event):
    """A host's memory and GPUs were measured."""

    used: int = 0
    """Bytes of memory in use."""
    limit: int = 0
    """Bytes of memory that can be used."""
    whose: str = ""
    """The source of the limit: 'container' or 'host'."""
    gpus: tuple[tuple[int, str, int, int, float | None], ...] = ()
    """(index, name, used bytes, total bytes, utilization in % or None) of each."""
    node: str = ""
    """The host's name if it is not the launcher's."""


TRACEBACK_FOLLOWS = "nbtrain: the exception that ended this rank:"
"""After this line of a rank's log, there is only the exception that the notebook raises."""


@dataclass(frozen=True)
class Output(Event):
    """The rank wrote lines to stdout or stderr. Read from its log, not stored as an event."""

    lines: tuple[str, ...] = ()
    passed: int = 0
    """The number of lines before them that were skipped."""


@dataclass(frozen=True)
class Displayed(Event):
    """The rank displayed a figure, a table, or the value of a cell."""

    data: Values = field(default_factory=dict)
    """The content by MIME type; binary content in base64."""
    name: str = ""
    """It replaces the display of this name, if there is one."""
    clears: bool = False
    """Whether it replaces everything that the rank displayed before."""


Evidence = tuple[tuple[str, str], ...]
"""Findings about the end of a rank, each as a code, which may be "", and a text."""

OUT_OF_MEMORY, NOT_MEMORY = "out of memory", "not memory"
"""Codes of a rank that was killed: by the system to free memory, or for another reason."""

OS_EXIT = "os._exit"
"""The `error_type` of a rank that called ``os._exit``, which raises nothing."""


@dataclass(frozen=True)
class Failing(Event):
    """The user's code raised; the rank is about to report it."""

    error: str = ""
    error_type: str = ""
    """The name of the exception's class; `OS_EXIT` for a call of ``os._exit``."""


@dataclass(frozen=True)
class Ended(Event):
    """The user's code ended."""

    error: str | None = None
    """The exception that it raised; None if it returned."""
    result: str | None = None
    evidence: Evidence = ()
    """What the rank found out about the cause (`nbtrain.worker.failure_evidence`)."""
    error_type: str = ""
    """As in `Failing`."""
    collectives: tuple[tuple[int, str, str, bool], ...] = ()
    """The last collectives of its default process group: number, name, shape as ``3x4``, and
    whether it is pending. Of a rank that returned, only the last number."""
    checksum: str = ""
    """Of the pickled result, because `result` may be equal for different results."""


NO_VARIABLE = "no-variable"
"""The code of a name in ``--out`` without a variable."""

OTHER_VARIABLE = "other-variable"
"""The code of an argument that was updated although the variable of its name is another model."""

SAME = "same"
"""The code of a model whose values did not change."""

IN_PART = "in-part"
"""The code of weights that were loaded in part."""

RETURNED = "the return value"
"""The name of the return value, among the names of saved values."""


@dataclass(frozen=True)
class ArtifactSaved(Event, kind="saved"):
    """The rank saved a value for the notebook."""

    name: str = ""
    what: str = "value"
    """'model', 'optimizer', 'scheduler' or 'value'."""
    parameters: int = 0
    """The number of a model's parameters."""
    size: int = 0
    """Bytes."""
    trouble: str = ""
    """Why it could not be saved."""
    code: str = ""
    """The code of the trouble: `NO_VARIABLE`, a system error such as "ENOSPC", or ""."""
    not_finite: str = ""
    """The first parameter of a model that is NaN or infinite."""
    lost: bool = False
    """Whether it could not be written into the run's folder, so that it is lost."""
    stamp: str = ""
    """Identifies a file of weights as the rank closed it; changes when the file is written."""
    adapters: str = ""
    """The names of PEFT adapters that the rank added to the model."""


@dataclass(frozen=True)
class ArtifactLoaded(Event, kind="loaded"):
    """The notebook loaded a value that rank 0 had saved."""

    name: str = ""
    trouble: str = ""
    """Why it could not be loaded."""
    code: str = ""
    """With a trouble `NO_VARIABLE`, `IN_PART` or ""; without `OTHER_VARIABLE`, `SAME` or ""."""


@dataclass(frozen=True)
class Exited(Event):
    """The rank's process ended."""

    returncode: int | None = 0
    """Negative for a signal, None if unknown."""
    verdict: str = ""
    """The rank's last status: done, failed or stopped."""
    cause: str = ""
    """Why it died, if more is known than the return code."""
    evidence: Evidence = ()
    """The facts behind the cause."""
    code: str = ""
    """The cause for programs: `OUT_OF_MEMORY`, `NOT_MEMORY`, 'disk full', or ""."""


@dataclass(frozen=True)
class Attempt(Event):
    """All ranks start again."""

    number: int = 1
    """The first attempt is 1."""
    reason: str = ""


@dataclass(frozen=True)
class StepBoundary(Event, kind="boundary"):
    """The rank waits after an optimizer step, to carry out a request at the same step as others."""

    request: int = 0
    """The number of the request in this run."""
    calls: int = 0
    """Optimizer steps of its task, of any optimizer: the ranks agree on this number."""
    step: int = 0
    """The number of the step, as `TrainingCounts.steps`."""
    bars: int = 0
    """The number of bars that the training iterates over."""
    detail: str = ""
    """What the rank has for the request: present values, or why it refuses."""
    is_refused: bool = False


@dataclass(frozen=True)
class Steered(Event):
    """A request of the user: all ranks have carried it out after one step, or none has.

    An event of the run.
    """

    request: int = 0
    """As in `StepBoundary`."""
    token: str = ""
    """Names the request to the process that made it."""
    action: str = ""
    """``finish``, ``turn``, ``peek`` or ``keep``."""
    status: str = ""
    """``pending``, ``applied`` or ``called off``."""
    step: int | None = None
    """The number of the step, in all attempts, if it was carried out."""
    steps: int | None = None
    """The number of steps that the whole training would have, if it is known."""
    by: str = ""
    """Who requested it."""
    label: str = ""
    """What is changed, for a mark in a chart: ``lr 0.0003``; "" for nothing."""
    text: str = ""
    """All of this for people."""
    before: str = ""
    """What was changed, as it was before: ``lr 0.1``."""
    settings: Values = field(default_factory=dict)
    """The new values by name, as ``%nbtrain turn`` takes them: ``back``, ``/3``, ``0.9,0.95``."""
    optimizer: str = ""
    """The number or the class of the optimizer that was changed; "" for all."""
    group: int | None = None
    """The parameter group that was changed. All groups without one."""
    attempt: int = 1
    """The attempt whose ranks have carried it out."""
    calls: int = 0
    """How many steps the optimizers of a rank had made in that attempt, each of them counted."""

    @property
    def change(self) -> str:
        """The change and its step, ``lr 0.0003 at step 812``; "" if nothing was changed."""
        is_made = self.label and self.step is not None
        return f"{self.label} at step {self.step:,}" if is_made else ""


SettingRow = tuple[int, str, str, float, float | None, float | None, bool, bool]
"""A setting of a training: the number of its optimizer, or -1 for all of them and for a knob; a
label for people; its name; the largest present value of the groups, to 4 digits; the bounds of a
knob; whether the user has changed it; and whether groups have different values."""


@dataclass(frozen=True)
class SettingsSeen(Event, kind="settings"):
    """The settings that a slider can change in the training of all ranks. Replaces the last one."""

    turns: int = 0
    """The number of requests for new settings that the rank has carried out."""
    settings: tuple[SettingRow, ...] = ()


@dataclass(frozen=True)
class Stopping(Event):
    """The launcher started to end the ranks."""

    reason: str = ""


@dataclass(frozen=True)
class RunNote(Event, kind="note"):
    """Something may be wrong with the run, which continues."""

    text: str = ""
    flaw: str = ""
    code: str = ""
    """As in `Finding`; missing in older runs."""

    @classmethod
    def of(cls, finding: Finding) -> RunNote:
        """Return the event of a finding, with the current time."""
        return cls(clock.now(), -1, finding.full_text, finding.flaw, finding.code)


@dataclass(frozen=True)
class Waiting(Event):
    """The run waits before its ranks start; an empty text ends that."""

    text: str = ""


@dataclass(frozen=True)
class Deadline(Event):
    """When something other than the run ends it, such as the time limit of a cluster's job."""

    ends: float = 0.0
    """Seconds since 1970, as `time`."""
    whose: str = ""
    """What has the limit: ``the Slurm job 12``."""


ABANDONED = "abandoned"
"""The code of a run that ended with its kernel or by a signal, and not at the user's request."""


@dataclass(frozen=True)
class Finished(Event):
    """Every rank has ended."""

    status: str = ""
    """How the run ended."""
    message: str = ""
    flaw: str = ""
    """Why the result is wrong although the run ended without an error, in a few words."""
    code: str = ""
    """A kind of `FailureReport`, 'hang', 'deadlock', `ABANDONED`, or ""."""
    remedy: str = ""
    """What to do about the message."""


KINDS: Mapping[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}

_MAX_EXACT_INT = 1 << sys.float_info.mant_dig
"""A float has each integer up to this one exactly; counts of steps and bytes are smaller."""

Check = Callable[[Any], Any]
"""Converts a decoded value to the type of its field. Raises `TypeError` or `ValueError`."""


_PLAIN = {float, bool, str}


def _check_int(value: Any) -> int:
    if type(value) is int and -_MAX_EXACT_INT < value < _MAX_EXACT_INT:
        return value
    raise TypeError


def _check_finite(value: Any) -> float:
    if type(value) is float and value - value == 0.0:  # no NaN, no infinity
        return value
    return _check_int(value)


def _check_values(value: Any) -> Values:
    """Return the metrics whose values are numbers, truth values or texts."""
    if _PLAIN.issuperset(map(type, value.values())):
        return value  # type: ignore[no-any-return]
    return {
        k: v
        for k, v in value.items()
        if type(v) in _PLAIN or (type(v) is int and -_MAX_EXACT_INT < v < _MAX_EXACT_INT)
    }


def _check_measured(value: Any) -> float:
    return value if type(value) in (float, bool) else _check_int(value)


def _check_type(*types: type) -> Check:
    """Return a check that accepts values of exactly these types."""

    def check(value: Any) -> Any:
        if type(value) in types:
            return value
        raise TypeError

    return check


def _check_evidence(value: Any) -> Evidence:
    """Return evidence as pairs of a code and a text; leave out what is no such pair.

    Up to version 0.2, it had only texts: their code is "". Raises `TypeError` for what is no list.
    """
    pairs = (["", each] if type(each) is str else each for each in _list(value))
    fit = (pair for pair in pairs if type(pair) is list and len(pair) == 2)
    return tuple((code, text) for code, text in fit if type(code) is type(text) is str)


_CHECKS: Mapping[Any, Check] = {
    int: _check_int,
    float: _check_finite,
    str: _check_type(str),
    bool: _check_type(bool),
    Measured: _check_measured,
    Values: _check_values,
    Evidence: _check_evidence,
}
_list = _check_type(list)


def _make_check(hint: Any) -> Check:
    """Return what converts a decoded value to a type hint, or raises as `Check` does.

    A wrong value becomes None for ``X | None``, and is left out of a ``tuple[X, ...]``. Other hints
    must be in `_CHECKS`.
    """
    if hint in _CHECKS:
        return _CHECKS[hint]
    args = get_args(hint)
    if get_origin(hint) is not tuple:  # X | None: a value of another type is unknown
        return _or_none(_make_check(args[0]))
    if args[1] is Ellipsis:
        member = _or_none(_make_check(args[0]))
        return lambda value: tuple([m for m in map(member, _list(value)) if m is not None])
    checks = list(map(_make_check, args))
    return lambda value: tuple([c(v) for c, v in zip(checks, _list(value), strict=True)])


def _or_none(check: Check) -> Check:
    """Return a check that replaces a wrong value by None."""

    def check_or_none(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except (TypeError, ValueError):
            return None

    return check_or_none


def _fields(cls: type[Event]) -> tuple[type[Event], dict[str, Any], dict[str, Check]]:
    """Return the class, the defaults of its fields, and their checks."""
    hints = get_type_hints(cls, include_extras=True)
    return cls, vars(cls(0.0, 0)), {f.name: _make_check(hints[f.name]) for f in fields(cls)}


_FIELDS = {kind: _fields(cls) for kind, cls in KINDS.items()}
_decode = json.JSONDecoder().decode
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def to_line(event: Event) -> bytes:
    """Encode one event as a line of JSON."""
    return (encode({"kind": event.kind, **asdict(event)}) + "\n").encode()


def from_line(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is broken or its kind is unknown.

    A value of a wrong type becomes unknown if its field can be; otherwise the line is no event.
    Members of a tuple with a wrong type are left out, and so are fields of later versions.
    """
    try:
        record: dict[str, Any] = _decode(line.decode())
        cls, defaults, checks = _FIELDS[record["kind"]]
        event = object.__new__(cls)  # faster than `__init__`, which sets each field by a call
        values = vars(event)
        values.update(defaults)
        for name, value in record.items():
            if name in checks:
                values[name] = checks[name](value)
        is_dated = "rank" in record and abs(record["time"]) < MAX_TIME_S
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return event if is_dated else None


def describe_failed_update(value: ArtifactSaved | ArtifactLoaded) -> str:
    """Describe that a value of the notebook was not updated, or only in part, and why."""
    name, trouble = value.name, value.trouble
    if name == RETURNED:
        return f"{name} cannot be read: {trouble}"
    if value.code == NO_VARIABLE:
        return f"{name} was not returned: {trouble}"
    in_part = value.code == IN_PART
    return f"{name} was {'updated only in part' if in_part else 'not updated'}: {trouble}"
