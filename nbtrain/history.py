"""Everything a run's ranks reported, complete, as rows: from its files, not from its picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import events as ev
from .errors import MissingExtra
from .folder import RunFolder
from .pace import number, whole
from .tail import read_events

KEYS = ("step", "rank", "time")

Row = dict[str, Any]
"""A step, a rank, a time in seconds since the epoch, and the values said then, by name."""


def rows(folder: RunFolder, world_size: int) -> list[Row]:
    """Return a row for each thing that was logged or seen, in the order of time.

    What is seen unasked (loss, lr, epoch, steps/s, samples) is in rows of its own. Where the user
    logs a metric of the same name, the user's is the one that stays.
    """
    logged: list[Row] = []
    seen: list[Row] = []
    for rank in range(world_size):
        said = list(read_events(folder.events(rank)))
        logged.extend(_logged(said, rank))
        seen.extend(_seen(said, rank))
    taken = {name for row in logged for name in row} - set(KEYS)
    folder.check_it_is_there()  # what was deleted meanwhile was read in part
    left = ({k: v for k, v in row.items() if k not in taken} for row in seen)
    found = [*logged, *(row for row in left if not row.keys() <= set(KEYS))]
    return sorted(found, key=lambda row: float(row["time"]))


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
    names = dict.fromkeys(name for row in found for name in row if name not in KEYS)
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in found] for name in (*KEYS, *names)
    }
    table = pd.DataFrame(columns)
    return table.astype({"step": "Int64", "rank": "int64", "time": "float64"})
