"""Everything a run's ranks reported, complete, as rows: from its files, not from its picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from . import events as ev
from .errors import MissingExtra
from .folder import RunFolder
from .pace import number, whole
from .tail import read_events

KEYS = ("step", "rank", "time")

Curve = list[tuple[float, float]]

Row = dict[str, Any]
"""A step, a rank, a time in seconds since the epoch, and the values said then, by name."""


def rows(folder: RunFolder, world_size: int) -> list[Row]:
    """Return a row for each thing that was logged or seen, in the order of time.

    What is seen unasked (loss, lr, epoch, steps/s, samples) is in rows of its own. Where the user
    logs a metric of the same name, the user's is the one that stays.
    """
    found = merged(list(read_events(folder.events(rank))) for rank in range(world_size))
    folder.check_it_is_there()  # what was deleted meanwhile was read in part
    return found


def merged(said: Iterable[Sequence[ev.Event]]) -> list[Row]:
    """Return the rows of what ranks said, given rank by rank."""
    logged: list[Row] = []
    seen: list[Row] = []
    for rank, events in enumerate(said):
        logged.extend(_logged(events, rank))
        seen.extend(_seen(events, rank))
    taken = {name for row in logged for name in row} - set(KEYS)
    left = ({k: v for k, v in row.items() if k not in taken} for row in seen)
    found = [*logged, *(row for row in left if not row.keys() <= set(KEYS))]
    return sorted(found, key=lambda row: float(row["time"]))


def last(found: Iterable[Row]) -> dict[str, float]:
    """Return the mean over ranks of the number each said last, by name."""
    said: dict[str, dict[int, float]] = {}
    for row in found:
        for name, value in row.items():
            if name not in KEYS and is_number(value):
                said.setdefault(name, {})[row["rank"]] = float(value)
    return {name: sum(ranks.values()) / len(ranks) for name, ranks in said.items()}


def names(found: Sequence[Row]) -> list[str]:
    """Return the names that have numbers, in the order in which they came up."""
    said = dict.fromkeys(name for row in found for name, value in row.items() if is_number(value))
    return [name for name in said if name not in KEYS]


def curves(found: Sequence[Row], name: str) -> dict[int, Curve]:
    """Return each rank's points (step, value), by rank; without a step, they are counted."""
    drawn: dict[int, Curve] = {}
    for row in found:
        value = row.get(name)
        if is_number(value):
            curve = drawn.setdefault(row["rank"], [])
            curve.append((len(curve) if row["step"] is None else row["step"], float(value)))
    return dict(sorted(drawn.items()))


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value can be drawn or averaged; a bool can."""
    return isinstance(value, (int, float))


def _logged(events: Iterable[ev.Event], rank: int) -> Iterator[Row]:
    for event in events:
        if isinstance(event, ev.Metrics):
            said = event.values if isinstance(event.values, Mapping) else {}
            values = {_column(name): value for name, value in said.items()}
            yield {"step": _step(event.step), "rank": rank, "time": event.time, **values}


def _step(value: Any) -> int | None:
    step = whole(value)
    return step if step is not None and abs(step) < 1 << 53 else None


def _column(name: str) -> str:
    return f"{name} (logged)" if name in KEYS else name


def _seen(events: Iterable[ev.Event], rank: int) -> Iterator[Row]:
    before: ev.Training | None = None
    for event in events:
        if not isinstance(event, ev.Training):
            continue
        row: Row = {"step": _step(event.steps), "rank": rank, "time": event.time}
        row |= {"loss": event.loss, "lr": event.lr, "epoch": event.epoch}
        row |= {"samples": event.samples, "steps/s": _rate(before, event)}
        before = event
        yield {key: value for key, value in row.items() if value is not None}


def _rate(before: ev.Training | None, event: ev.Training) -> float | None:
    done, gone = number(event.steps), number(event.elapsed)
    if done is None or gone is None:
        return None
    if before is not None:
        done -= number(before.steps) or 0
        gone -= number(before.elapsed) or 0
    return done / gone if gone > 0 and done >= 0 else None


def frame(found: Sequence[Row]) -> Any:
    """Return rows as a pandas DataFrame. Raises `MissingExtra` where pandas is not installed."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra(
            'run.history is a DataFrame and needs pandas: pip install "nbtrain[history]"'
        ) from error
    said = dict.fromkeys(name for row in found for name in row if name not in KEYS)
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in found] for name in (*KEYS, *said)
    }
    table = pd.DataFrame(columns)
    return table.astype({"step": "Int64", "rank": "int64", "time": "float64"})
