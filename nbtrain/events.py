"""What happens in a run: the kinds of event, and the line of JSON that each of them is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Something that happened at `time` (seconds since the epoch) to `rank` (-1: the run)."""

    kind: ClassVar[str] = ""
    time: float
    rank: int


@dataclass(frozen=True)
class Spawned(Event):
    """The launcher made the rank's process, on another `node` if it is named."""

    kind: ClassVar[str] = "spawned"
    pid: int = 0
    node: str = ""


@dataclass(frozen=True)
class Started(Event):
    """The rank is about to run the user's code."""

    kind: ClassVar[str] = "started"
    pid: int = 0


@dataclass(frozen=True)
class Progress(Event):
    """Where a progress bar stands: `n` of `total` units after `elapsed` seconds."""

    kind: ClassVar[str] = "progress"
    bar: int = 0
    n: float = 0
    total: float | None = None
    elapsed: float = 0.0
    description: str = ""
    unit: str = "it"
    closed: bool = False
    kept: bool = True


@dataclass(frozen=True)
class Metrics(Event):
    """Values the user logged, at an optional step."""

    kind: ClassVar[str] = "metrics"
    step: int | None = None
    values: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Training(Event):
    """How the rank's training goes, seen without being told; counts are since its start.

    `steps` are optimizer steps, `samples` what the batches held. `epoch` (from 1) and `batch` of
    `batches` say where the loader that feeds the optimizer stands, `waited` how many of the
    `elapsed` seconds since its first batch were spent waiting for it. `loss` is the last one
    whose value is known. What is not known is None.
    """

    kind: ClassVar[str] = "training"
    steps: int = 0
    elapsed: float = 0.0
    waited: float = 0.0
    samples: int | None = None
    loss: float | None = None
    lr: float | None = None
    epoch: int | None = None
    batch: int | None = None
    batches: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None


@dataclass(frozen=True)
class Phase(Event):
    """What the rank is busy with, where it is not training: 'saving', 'compiling'; '' again."""

    kind: ClassVar[str] = "phase"
    phase: str = ""


@dataclass(frozen=True)
class Compiled(Event):
    """How many programs torch_xla has compiled for the rank since its start, in how long."""

    kind: ClassVar[str] = "compiled"
    programs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Group(Event):
    """The rank is about to join a process group other than the default one."""

    kind: ClassVar[str] = "group"
    name: str = ""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hang(Event):
    """What was found where ranks made no progress, in words; none once they make some again.

    `stuck` are those that the others wait for, `waiting` these others. Both are empty where
    nobody knows who waits for whom.
    """

    kind: ClassVar[str] = "hang"
    text: str = ""
    stuck: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Resources(Event):
    """What a rank and its child processes take, seen from outside.

    `cpu` in cores, `memory` in bytes of its own (USS, or RSS where that cannot be read), `gpu`
    the index of its device and `gpu_memory` the bytes it holds there.
    """

    kind: ClassVar[str] = "resources"
    cpu: float | None = None
    memory: int | None = None
    gpu: int | None = None
    gpu_memory: int | None = None


@dataclass(frozen=True)
class Held(Event):
    """The bytes that the rank's models and optimizers hold in the memory of a kind of device."""

    kind: ClassVar[str] = "held"
    on: str = ""
    weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0


@dataclass(frozen=True)
class Cards(Event):
    """What each GPU of the host holds before the ranks start, and again when they are gone.

    Each of `gpus` is (index, name, used bytes).
    """

    kind: ClassVar[str] = "cards"
    gpus: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True)
class Host(Event):
    """What the host has left: bytes of memory used of the limit that counts (`whose`), and GPUs.

    Each of `gpus` is (index, name, used bytes, total bytes, utilization in % or None). `node` is
    the host's name, where it is not the launcher's.
    """

    kind: ClassVar[str] = "host"
    used: int = 0
    limit: int = 0
    whose: str = ""
    gpus: tuple[tuple[int, str, int, int, float | None], ...] = ()
    node: str = ""


@dataclass(frozen=True)
class Output(Event):
    """Lines the rank wrote to stdout or stderr. Read from its log, not stored as an event.

    `passed` is how many more lines there were before them.
    """

    kind: ClassVar[str] = "output"
    lines: tuple[str, ...] = ()
    passed: int = 0


@dataclass(frozen=True)
class Failing(Event):
    """The user's code raised; the report of it follows."""

    kind: ClassVar[str] = "failing"
    error: str = ""


@dataclass(frozen=True)
class Ended(Event):
    """The user's code ended: it returned (`error` is None), or raised. `evidence`: `witness`."""

    kind: ClassVar[str] = "ended"
    error: str | None = None
    result: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved(Event):
    """The rank left something for the notebook: a 'model', 'optimizer' or 'value', `size` bytes.

    A model has so many `parameters`. `trouble` says why it could not.
    """

    kind: ClassVar[str] = "saved"
    name: str = ""
    what: str = "value"
    parameters: int = 0
    size: int = 0
    trouble: str = ""


@dataclass(frozen=True)
class Loaded(Event):
    """The notebook took what rank 0 left; `trouble` says why it could not."""

    kind: ClassVar[str] = "loaded"
    name: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Exited(Event):
    """The rank's process is gone; `returncode` is negative for a signal, None if unknown.

    `cause` says in words what it died of, where more is known than the return code tells, and
    `evidence` what speaks for it.
    """

    kind: ClassVar[str] = "exited"
    returncode: int | None = 0
    verdict: str = ""
    cause: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attempt(Event):
    """All ranks start again: the `number`-th attempt (the first is 1), because of `reason`."""

    kind: ClassVar[str] = "attempt"
    number: int = 1
    reason: str = ""


@dataclass(frozen=True)
class Stopping(Event):
    """The launcher began to end the ranks, because of `reason`."""

    kind: ClassVar[str] = "stopping"
    reason: str = ""


@dataclass(frozen=True)
class Note(Event):
    """Something that is wrong with the run's surroundings, in words, while it goes on."""

    kind: ClassVar[str] = "note"
    text: str = ""


@dataclass(frozen=True)
class Waiting(Event):
    """The run waits for something before its ranks start; "" when it has come."""

    kind: ClassVar[str] = "waiting"
    text: str = ""


@dataclass(frozen=True)
class Elsewhere(Event):
    """Another node of the run failed; it will not try again if that is `final`."""

    kind: ClassVar[str] = "elsewhere"
    text: str = ""
    final: bool = False


@dataclass(frozen=True)
class Finished(Event):
    """Every rank is gone; `status` is how the run ended."""

    kind: ClassVar[str] = "finished"
    status: str = ""
    message: str = ""


KINDS: Mapping[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}
_JSON: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "Mapping": (dict,),
    "tuple": (list,),
    "None": (type(None),),
}
_UNKNOWN = type(None)
_HUGE = 1 << 63
"""Whole numbers that no step, no byte count and no float arithmetic has to do with."""

FOREVER = 1e11
"""Seconds since the epoch that no clock tells."""


def _types(annotation: str) -> frozenset[type]:
    """Return what JSON makes of values of a type: ``"int | None"`` gives int and NoneType."""
    names = re.sub(r"\[.*\]", "", annotation).split(" | ")
    return frozenset(cls for name in names for cls in _JSON[name])


_FIELDS = {cls: {f.name: _types(str(f.type)) for f in fields(cls)} for cls in KINDS.values()}
_decode = json.JSONDecoder().decode
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def to_line(event: Event) -> bytes:
    """Encode one event as a line of JSON."""
    return (encode({"kind": event.kind, **asdict(event)}) + "\n").encode()


def from_line(line: bytes) -> Event | None:
    """Decode one line; None for a broken one or for a kind that this version does not know.

    A value of a wrong type is unknown, where its field may be; elsewhere the line makes no sense.
    """
    try:
        record: dict[str, Any] = _decode(line.decode())
        cls = KINDS[record.pop("kind")]
        event = cls(**_sound(record, _FIELDS[cls]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return event if abs(event.time) < FOREVER else None  # neither does NaN


def _sound(record: Mapping[str, Any], types: Mapping[str, frozenset[type]]) -> dict[str, Any]:
    """Return the fields that are known, of their types. Raises `TypeError`."""
    sound = {}
    for name, value in record.items():
        allowed = types.get(name)
        if allowed is None:
            continue
        kind = type(value)
        if kind in allowed and (kind is not int or -_HUGE < value < _HUGE):
            sound[name] = tuple(value) if kind is list else value
        elif _UNKNOWN in allowed:
            sound[name] = None
        else:
            raise TypeError(name)
    return sound
