"""Defines what happens in a run: each kind of event, and its line of JSON.

What `from_line` returns has the types that its fields declare, so nobody checks an event again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from ..findings import Finding
from . import clock

Measured = Annotated[float, "measured"]
"""A number of the training's own, which may be NaN or infinite, or a whole number of any size."""

Values = Mapping[str, float | str]
"""Measured numbers and texts, by name."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rank, or to the run."""

    kind: ClassVar[str] = ""
    """How files name the class: its own name in lower case, but for those that say another."""
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
    """The host it is on, where that is not the launcher's."""


@dataclass(frozen=True)
class Started(Event):
    """The rank is about to run the user's code."""

    pid: int = 0


@dataclass(frozen=True)
class Progress(Event):
    """A progress bar moved."""

    bar: int = 0
    """Which of the rank's bars."""
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
    """The optimizer steps that were made then; 0: none was seen."""


@dataclass(frozen=True)
class TrainingCounts:
    """How far a training has come, counted since its start. None: not known."""

    steps: int = 0
    """Optimizer steps."""
    elapsed: float = 0.0
    """Seconds since the first batch."""
    waited: float = 0.0
    """How many of the elapsed seconds were spent waiting for the loader."""
    samples: int | None = None
    loss: Measured | None = None
    """The last loss whose value is known."""
    has_diverged: bool = False
    """Whether a step was made with a loss that is not finite, and none since was finite."""
    lr: float | None = None
    precision: str = ""
    """'no', 'bf16', 'fp16', 'fp8', or 'bf16 weights' where nothing casts them; "": not known."""
    epoch: int | None = None
    """From 1, as are `batch` and `batches`, of the loader that feeds the optimizer."""
    batch: int | None = None
    batches: int | None = None
    allocated: int | None = None
    """Bytes of GPU memory, as torch counts them; `reserved` and `peak` too."""
    reserved: int | None = None
    peak: int | None = None
    loops: tuple[tuple[str, int, int, int], ...] = ()
    """Where the training stands in all that it will do, from the outside in: a loop's name, rounds
    that are done, of how many, and the number of the first. Empty where that is not all known."""
    epochs: int | None = None
    """The number of the last epoch."""
    training: int = 1
    """As in `EpochEnd`."""
    losses: tuple[tuple[int, Measured, str], ...] = ()
    """Losses since the last report, each with its step: of the first steps, and where several
    optimizers step in turn, which the third member then names."""


@dataclass(frozen=True)
class TrainingUpdate(TrainingCounts, Event, kind="training"):
    """The rank's training goes on; seen in torch, without a call by the user."""

    rests: bool = False
    """Whether these are the last counts of a training that has not gone on since."""


@dataclass(frozen=True)
class EpochEnd(Event, kind="epoch"):
    """An epoch is over: the next has taken its first step, or the code has ended."""

    epoch: int = 0
    """As the loop counts it."""
    steps: int = 0
    """Optimizer steps since the start."""
    seconds: float = 0.0
    """With its validation."""
    loss: Measured | None = None
    """The mean of its losses; on a GPU, of those that were read."""
    training: int = 1
    """Which one of the function's it is of: a fold trains another model, from its first epoch."""


JOINING = "joining"
"""The phase of a rank that is becoming one of several, which it waits for."""


@dataclass(frozen=True)
class NotFinite(Event, kind="not_finite"):
    """A rank's loss is not a number, or infinite, for the first time.

    An event of the run.
    """

    loss_rank: int = 0
    step: int = 0
    """Steps that were done before; -1: not known."""
    loss: str = ""
    """``nan``, ``inf`` or ``-inf``: JSON has none of them."""


_LOSS = re.compile(
    r"((train(ing)?|step|epoch)[/_. -])*loss([/_. -](train(ing)?|step|epoch))*", re.I
)


@lru_cache(4096)
def is_training_loss(name: str) -> bool:
    """Whether a metric of this name is the training's loss: one of the validation may be nan."""
    return _LOSS.fullmatch(name) is not None


@dataclass(frozen=True)
class Phase(Event):
    """The rank began something other than training: 'joining', 'saving', 'compiling'.

    It is '' when that is done.
    """

    phase: str = ""


@dataclass(frozen=True)
class Debugger(Event):
    """A debugger waits in the rank for somebody to answer; without an address, the code goes on."""

    address: str = ""
    """The socket that it listens at."""
    place: str = ""
    """Where in the code it stands."""


@dataclass(frozen=True)
class WorkSample(Event, kind="work"):
    """What a rank trains on and with whom, after its first steps, and again at its end."""

    steps: int = 0
    losses: tuple[float, ...] = ()
    """The first ones."""
    batches: tuple[str, ...] = ()
    """Checksums of the first ones that loaders gave; "" for one that cannot be read."""
    splits_data: bool = False
    """Whether the first of these loaders gives each rank other samples, by its sampler."""
    last_loss: Measured | None = None
    is_last: bool = False
    """Whether the rank's code has ended."""
    has_joined: bool = False
    """Whether the rank is in a process group with others."""
    is_wrapped: str = ""
    """Whether a model is data-parallel over all ranks ('whole'), or over some ('part')."""
    has_exchanged: bool = True
    """Whether there were collectives between its steps, as far as that is known."""
    asks_rank: bool = False
    """Whether the source asks for the rank."""
    gathers: bool = False
    """Whether the source, or a collective before the loss, gathers values of all ranks: the loss
    may be made of them."""
    is_excused: bool = False
    """Whether ranks may share the training in another way, or the code asks for no notes."""
    file: str = ""
    """Where the user's code takes the steps, as `line`."""
    line: int = 0
    library: str = ""
    """What calls the step, where that is known: 'lightning'."""
    weights: str = ""
    """At the end: shapes and a checksum of some trained parameters; "" where they are sharded, or
    gone."""


@dataclass(frozen=True)
class Compiled(Event):
    """Torch_xla compiled programs for the rank: how many since its start, in how long."""

    programs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Group(Event):
    """The rank is about to join a process group other than the default one."""

    name: str = ""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hang(Event):
    """Ranks make no progress, and the launcher has looked why; an empty text ends that."""

    text: str = ""
    stuck: tuple[int, ...] = ()
    """The ranks that others wait for; empty, as `waiting` is, where nobody knows."""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Resources(Event):
    """The launcher measured what a rank and its child processes use, from outside."""

    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    """Bytes of its own (USS, or RSS where that cannot be read)."""
    gpu: int | None = None
    """The index of its device."""
    gpu_memory: int | None = None
    """Bytes it holds there."""


@dataclass(frozen=True)
class TensorMemory(Event, kind="held"):
    """The rank counted the bytes of its models and optimizers on one kind of device."""

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
    """Bytes of memory, of the limit that counts."""
    limit: int = 0
    whose: str = ""
    """What sets the limit: 'container' or 'host'."""
    gpus: tuple[tuple[int, str, int, int, float | None], ...] = ()
    """(index, name, used bytes, total bytes, utilization in % or None) of each."""
    node: str = ""
    """The host's name, where it is not the launcher's."""


TRACEBACK_FOLLOWS = "nbtrain: the exception that ended this rank:"
"""The line of a rank's log after which there is nothing but what the notebook raises anyway."""


@dataclass(frozen=True)
class Output(Event):
    """The rank wrote lines to stdout or stderr. Read from its log, not stored as an event."""

    lines: tuple[str, ...] = ()
    passed: int = 0
    """How many more lines there were before them."""


@dataclass(frozen=True)
class Displayed(Event):
    """The rank displayed something rich: a figure, a table, the value of a cell."""

    data: Values = field(default_factory=dict)
    """Its forms, by MIME type; binary ones in base64."""
    name: str = ""
    """It takes the place of one of that name, if there is one."""
    clears: bool = False
    """Whether it takes the place of all that the rank displayed before."""


Evidence = tuple[tuple[str, str], ...]
"""Findings about the end of a rank, each as its code ("" where no program asks) and its text."""

OUT_OF_MEMORY, NOT_MEMORY = "out of memory", "not memory"
"""Of a rank that was killed: the system did it to free memory, or memory was not the reason."""

OS_EXIT = "os._exit"
"""The `error_type` of a rank that leaves its process, which raises nothing."""


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
    """What it raised; None: it returned."""
    result: str | None = None
    evidence: Evidence = ()
    """What the rank saw of the cause (`nbtrain.worker.failure_evidence`)."""
    error_type: str = ""
    """As in `Failing`."""
    collectives: tuple[tuple[int, str, str, bool], ...] = ()
    """The last ones that it called in its default process group: number, name, shape as ``3x4``,
    and whether it is still pending. Of a rank that returned, only the last number; without a group
    nothing."""
    checksum: str = ""
    """Of the pickled result: what is short in the same way need not be equal. Older runs: none."""


NO_VARIABLE = "no-variable"
"""The code of a value of ``--out`` that was not returned, as there was no variable."""

OTHER_VARIABLE = "other-variable"
"""The code of an argument that was updated, where a variable of its name is another model."""

SAME = "same"
"""The code of a model in which no value changed: the ranks have only cast it."""

IN_PART = "in-part"
"""The code of weights that were loaded only in part."""

RETURNED = "the return value"
"""The name of what the function returned, among what a rank saved."""


@dataclass(frozen=True)
class ArtifactSaved(Event, kind="saved"):
    """The rank saved something for the notebook."""

    name: str = ""
    what: str = "value"
    """'model', 'optimizer', 'scheduler' or 'value'."""
    parameters: int = 0
    """Of a model."""
    size: int = 0
    """Bytes."""
    trouble: str = ""
    """Why it could not be saved."""
    code: str = ""
    """Of the trouble: `NO_VARIABLE`, the name of a system error ("ENOSPC"), or ""."""
    not_finite: str = ""
    """The first parameter of a model that is nan or inf."""
    lost: bool = False
    """Whether the run's folder could not take it: it is nowhere any more."""
    stamp: str = ""
    """Of a file of weights, when the rank closed it: it changes once somebody writes to it."""
    adapters: str = ""
    """Names of PEFT's adapters that the rank has put into the model."""


@dataclass(frozen=True)
class ArtifactLoaded(Event, kind="loaded"):
    """The notebook loaded what rank 0 had saved."""

    name: str = ""
    trouble: str = ""
    """Why it could not be loaded."""
    code: str = ""
    """`NO_VARIABLE`, `IN_PART` or "" of a trouble; else `OTHER_VARIABLE`, `SAME` or ""."""


@dataclass(frozen=True)
class Exited(Event):
    """The rank's process ended."""

    returncode: int | None = 0
    """Negative for a signal, None if unknown."""
    verdict: str = ""
    """The rank's last status: done, failed or stopped."""
    cause: str = ""
    """What it died of, where more is known than the return code shows."""
    evidence: Evidence = ()
    """What speaks for that cause."""
    code: str = ""
    """The cause for programs: `OUT_OF_MEMORY`, `NOT_MEMORY`, 'disk full', or ""."""


@dataclass(frozen=True)
class Attempt(Event):
    """All ranks start again."""

    number: int = 1
    """The first attempt is 1."""
    reason: str = ""


@dataclass(frozen=True)
class Stopping(Event):
    """The launcher began to end the ranks."""

    reason: str = ""


@dataclass(frozen=True)
class RunNote(Event, kind="note"):
    """Something is wrong with the run or its surroundings, but the run goes on."""

    text: str = ""
    flaw: str = ""
    code: str = ""
    """As `Finding` has them all; older runs have no code."""

    @classmethod
    def of(cls, finding: Finding) -> RunNote:
        """Return the event of a finding that was made now."""
        return cls(clock.now(), -1, finding.shown, finding.flaw, finding.code)


@dataclass(frozen=True)
class Waiting(Event):
    """The run waits for something before its ranks start; "" when that has come."""

    text: str = ""


ABANDONED = "abandoned"
"""The code of a run that was interrupted by its kernel's end, or by a signal: no user asked."""


@dataclass(frozen=True)
class Finished(Event):
    """Every rank has ended."""

    status: str = ""
    """How the run ended."""
    message: str = ""
    flaw: str = ""
    """What makes the result of a run wrong that ended without an error, in a few words."""
    code: str = ""
    """Why it ended so, for programs: a kind of `FailureReport`, 'hang', 'deadlock', `ABANDONED`; or
    ""."""
    remedy: str = ""
    """What to do about the message."""


KINDS: Mapping[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}

FOREVER = 1e11
"""Seconds since the epoch that no clock shows."""

_LARGEST = 1 << 53
"""Whole numbers up to which a float is exact; no step and no byte count is larger."""

Check = Callable[[Any], Any]
"""Returns a decoded value as its field has it. Raises `TypeError`, or `ValueError`."""


_PLAIN = {float, bool, str}


def _whole(value: Any) -> int:
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    raise TypeError


def _finite(value: Any) -> float:
    if type(value) is float and value - value == 0.0:  # no NaN, no infinity
        return value
    return _whole(value)


def _values(value: Any) -> Values:
    if _PLAIN.issuperset(map(type, value.values())):
        return value  # type: ignore[no-any-return]
    return {
        k: v
        for k, v in value.items()
        if type(v) in _PLAIN or (type(v) is int and -_LARGEST < v < _LARGEST)
    }


def _measured(value: Any) -> float:
    return value if type(value) in (float, bool) else _whole(value)


def _of(*types: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) in types:
            return value
        raise TypeError

    return check


def _evidence(value: Any) -> Evidence:
    """Up to version 0.2, evidence was texts alone."""
    pairs = (["", each] if type(each) is str else each for each in _list(value))
    fit = (pair for pair in pairs if type(pair) is list and len(pair) == 2)
    return tuple((code, text) for code, text in fit if type(code) is type(text) is str)


_CHECKS: Mapping[Any, Check] = {
    int: _whole,
    float: _finite,
    str: _of(str),
    bool: _of(bool),
    Measured: _measured,
    Values: _values,
    Evidence: _evidence,
}
_list = _of(list)


def _check(hint: Any) -> Check:
    """Return the check of a type."""
    if hint in _CHECKS:
        return _CHECKS[hint]
    args = get_args(hint)
    if get_origin(hint) is not tuple:  # X | None: what is no X is not known
        return _or_none(_check(args[0]))
    if args[1] is Ellipsis:
        member = _or_none(_check(args[0]))
        return lambda value: tuple([m for m in map(member, _list(value)) if m is not None])
    checks = list(map(_check, args))
    return lambda value: tuple([c(v) for c, v in zip(checks, _list(value), strict=True)])


def _or_none(check: Check) -> Check:
    def checked(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except (TypeError, ValueError):
            return None

    return checked


def _fields(cls: type[Event]) -> tuple[type[Event], dict[str, Any], dict[str, Check]]:
    """Return a class, its defaults, and the checks of its fields."""
    hints = get_type_hints(cls, include_extras=True)
    return cls, vars(cls(0.0, 0)), {f.name: _check(hints[f.name]) for f in fields(cls)}


_FIELDS = {kind: _fields(cls) for kind, cls in KINDS.items()}
_decode = json.JSONDecoder().decode
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def to_line(event: Event) -> bytes:
    """Encode one event as a line of JSON."""
    return (encode({"kind": event.kind, **asdict(event)}) + "\n").encode()


def from_line(line: bytes) -> Event | None:
    """Decode one line; None for a broken one or for a kind that this version does not know.

    A value of a wrong type becomes None where its field may be; elsewhere the line is no event.
    Members of a tuple that have a wrong type are left out, and so are fields of a later version.
    """
    try:
        record: dict[str, Any] = _decode(line.decode())
        cls, defaults, checks = _FIELDS[record["kind"]]
        event = object.__new__(cls)  # a frozen class sets its fields one by one, which takes long
        values = vars(event)
        values.update(defaults)
        for name, value in record.items():
            if name in checks:
                values[name] = checks[name](value)
        is_dated = "rank" in record and abs(record["time"]) < FOREVER
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return event if is_dated else None


def not_updated(value: ArtifactSaved | ArtifactLoaded) -> str:
    """Say that a value of the notebook was not updated, or only in part, and the reason."""
    name, trouble = value.name, value.trouble
    if name == RETURNED:
        return f"{name} cannot be read: {trouble}"
    if value.code == NO_VARIABLE:
        return f"{name} was not returned: {trouble}"
    in_part = value.code == IN_PART
    return f"{name} was {'updated only in part' if in_part else 'not updated'}: {trouble}"
