"""A kept run in a row: what it was given, how it ended, the last of its numbers."""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import events as ev
from . import history
from .errors import MissingExtra
from .folder import RunFolder, is_watched
from .names import is_secret
from .plan import Call, Cell
from .reopen import initial_state
from .tail import last_bytes

TAIL_BYTES = 1 << 16
"""Bytes at the end of a rank's events among which its last numbers are looked for."""

MOST_RANKS = 16
"""Ranks of which the last numbers are read, and averaged."""

_LONGEST = 200
"""Characters of a text that still counts as a parameter, not as data."""


@dataclass(frozen=True)
class Digest:
    """What is known of a run at a glance.

    `created` is in seconds since the epoch; `seconds` None while nobody knows how long it took.
    `parameters` are the plain arguments of the training function, `metrics` the means over ranks
    of what each said last.
    """

    name: str
    status: str
    created: float
    ranks: int
    seconds: float | None = None
    engine: str = ""
    mixed_precision: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def digest(folder: RunFolder) -> Digest:
    """Read a run's digest from its folder; a few blocks, whatever it wrote.

    Raises `FileNotFoundError` where there is no run, `NbtrainError` where it cannot be read.
    """
    manifest = folder.read_manifest()
    state = initial_state(manifest, folder.manifest)
    ended = [e for e in _tail(folder.launcher_events) if isinstance(e, ev.Finished)]
    if ended:
        status, seconds = ended[-1].status, max(0.0, ended[-1].time - state.created)
    else:
        status, seconds = "running" if is_watched(folder) else "lost", None
    given = manifest.get("parameters")
    return Digest(
        folder.path.name,
        status,
        state.created,
        state.world_size,
        seconds,
        str(manifest.get("engine") or ""),
        str(manifest.get("mixed_precision") or ""),
        given if isinstance(given, dict) else {},
        history.last(_rows(folder, state.world_size)),
    )


def _rows(folder: RunFolder, ranks: int) -> list[history.Row]:
    said = (list(_tail(folder.events(rank))) for rank in range(min(ranks, MOST_RANKS)))
    return history.merged(said)


def _tail(path: Any) -> Iterator[ev.Event]:
    for line in last_bytes(path, TAIL_BYTES).split(b"\n"):
        event = ev.from_line(line)
        if event is not None:
            yield event


def parameters(task: Call | Cell) -> dict[str, Any]:
    """Return the plain arguments (numbers, short texts) a training function will get, by name."""
    found = _of_call(task) if isinstance(task, Call) else _of_cell(task)
    return {n: v for n, v in found.items() if _is_plain(v) and not is_secret(n, v)}


def _of_call(call: Call) -> dict[str, Any]:
    try:
        bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    except Exception:  # no signature, or arguments that do not fit it: the ranks will tell
        return dict(call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _of_cell(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in cell.parameters:
        if parameter.name in cell.namespace:
            found[parameter.name] = cell.namespace[parameter.name]
            continue
        try:
            found[parameter.name] = literal_eval(parameter.default or "")
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue  # an expression: its value is known in the ranks alone
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST
    if type(value) is int:
        return value.bit_length() < 64
    return value is None or type(value) in (bool, float)


def frame(digests: Sequence[Digest]) -> Any:
    """Return a row a run as a pandas DataFrame.

    Columns are run, status, created (UTC), seconds, ranks, engine, mixed_precision, then a column
    a parameter and a metric; a metric that is called like a parameter is ``NAME (last)``.

    Raises `MissingExtra` where pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra(
            'a table of runs is a DataFrame and needs pandas: pip install "nbtrain[history]"'
        ) from error
    given = dict.fromkeys(name for run in digests for name in run.parameters)
    said = dict.fromkeys(name for run in digests for name in run.metrics)
    columns: dict[str, list[Any]] = {
        "run": [run.name for run in digests],
        "status": [run.status for run in digests],
        "created": list(pd.to_datetime([run.created for run in digests], unit="s", utc=True)),
        "seconds": [run.seconds for run in digests],
        "ranks": [run.ranks for run in digests],
        "engine": [run.engine for run in digests],
        "mixed_precision": [run.mixed_precision for run in digests],
    }
    taken = {*columns, *given}
    columns |= {
        _apart(name, columns): [run.parameters.get(name) for run in digests] for name in given
    }
    columns |= {
        _apart(name, taken, "last"): [run.metrics.get(name) for run in digests] for name in said
    }
    return pd.DataFrame(columns)


def _apart(name: str, taken: Any, what: str = "given") -> str:
    return f"{name} ({what})" if name in taken else name
