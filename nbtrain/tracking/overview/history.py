"""Reads everything that a run's ranks reported, as rows and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from ...errors import MissingExtra
from .. import events as ev
from ..event_log import read_events
from ..run_folder import RunFolder

KEYS = ("step", "rank", "time")

Row = dict[str, Any]
"""A step, a rank, a time in seconds since the epoch, and the values that were reported, by name."""


def rows(folder: RunFolder, world_size: int) -> list[Row]:
    """Return one row for each report of a run, in the order of time.

    What is observed in torch (loss, lr, epoch, steps/s, samples) has its own rows. If the user logs
    a metric of the same name, only the logged one is returned. Raises `NbtrainError` if the folder
    was deleted.
    """
    read = merge_rows(list(read_events(folder.events(rank))) for rank in range(world_size))
    read += [*changes(read_events(folder.launcher_events))]
    read.sort(key=_time)
    folder.check_exists()  # of a folder that was just deleted, only a part was read
    return read


def merge_rows(by_rank: Iterable[Sequence[ev.Event]]) -> list[Row]:
    """Return the rows of the events of ranks 0, 1, … in order of time.

    A name that is logged hides an observed one of the same name. A row without any value is left
    out.
    """
    logged: list[Row] = []
    observed: list[Row] = []
    for rank, events in enumerate(by_rank):
        logged.extend(_logged_rows(events, rank))
        observed.extend(_observed_rows(events, rank))
    names = {name for row in logged for name in row} - set(KEYS)
    rest = ({k: v for k, v in row.items() if k not in names} for row in observed)
    all_rows = [*logged, *(row for row in rest if not row.keys() <= set(KEYS))]
    return sorted(all_rows, key=_time)


def _time(row: Row) -> float:
    return float(row["time"])


def changes(events: Iterable[ev.Event]) -> Iterator[Row]:
    """Yield a row of rank 0 for each change that the user made in the training of all ranks."""
    for event in events:
        if isinstance(event, ev.Steered) and event.change:
            yield {"step": event.step, "rank": 0, "time": event.time, "change": event.label}


def _logged_rows(events: Iterable[ev.Event], rank: int) -> Iterator[Row]:
    """Yield a row for each call of `log` in `events`, which must all be of `rank`.

    `rank` only fills a column. A metric with the name of a column gets " (logged)" appended. The
    step is that of the call, else the number of optimizer steps before it, or None.
    """
    for event in events:
        if isinstance(event, ev.Metrics):
            named = event.values.items()
            values = {f"{k} (logged)" if k in KEYS else k: value for k, value in named}
            step = event.at or None if event.step is None else event.step
            yield {"step": step, "rank": rank, "time": event.time, **values}


def _observed_rows(events: Iterable[ev.Event], rank: int) -> Iterator[Row]:
    """Yield the rows of what was observed: losses, learning rate, steps per second."""
    before = ev.TrainingUpdate(0.0, rank)
    for event in events:
        if isinstance(event, ev.TrainingUpdate):
            row: Row = {"step": event.steps, "rank": rank, "time": event.time}
            for step, loss, name, *_ in event.all_losses():
                yield {**row, "step": step, name or "loss": loss}
            row |= {
                "loss": None if event.losses else event.loss,
                "lr": event.lr,
                "epoch": event.epoch,
            }
            steps, seconds = event.steps - before.steps, event.elapsed - before.elapsed
            rate = steps / seconds if seconds > 0 and steps >= 0 else None
            row |= {"samples": event.samples, "steps/s": rate}
            before = event
            yield {key: value for key, value in row.items() if value is not None}


def last(rows: Iterable[Row]) -> dict[str, float]:
    """Return the mean over ranks of the last number that each reported, by name."""
    newest: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in KEYS and is_number(value):
                newest.setdefault(name, {})[row["rank"]] = float(value)
    return {name: sum(ranks.values()) / len(ranks) for name, ranks in newest.items()}


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value can be drawn and averaged; a bool can."""
    return isinstance(value, (int, float))


def frame(rows: Sequence[Row]) -> Any:
    """Return rows as a pandas DataFrame. Raises `MissingExtra` if pandas is not installed."""
    frame = table(rows, "run.history", KEYS)
    for name, kind in zip(KEYS, ("Int64", "int64", "float64"), strict=True):
        frame[name] = frame[name].astype(kind)  # `frame.astype` would copy each of the others
    return frame


def table(rows: Sequence[Row], name: str, first: Sequence[str]) -> Any:
    """Return rows as a pandas DataFrame, with the columns `first` before all others.

    Without pandas, raises `MissingExtra` with `name` as the table's name.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra(
            f'{name} is a DataFrame and needs pandas: pip install "nbtrain[history]"'
        ) from error
    columns: dict[str, dict[int, Any]] = {name: {} for name in first}
    for at, row in enumerate(rows):  # one pass, because there may be one name per row
        for name, value in row.items():
            columns.setdefault(name, {})[at] = _valid(value)
    return pd.DataFrame({_valid(n): _column(known, len(rows)) for n, known in columns.items()})


def _column(known: dict[int, Any], size: int) -> Any:
    """Return a column's values in the order of rows; NaN or None for a row without a value.

    `known` has the values by row. A column of numbers with gaps is an array, any other a list.
    """
    import numpy as np  # pandas takes a hundred times as long for None as for NaN

    if len(known) < size and {*map(type, known.values())} <= {int, float}:
        column = np.full(size, np.nan)
        column[[*known]] = [*known.values()]
        return column
    return [known.get(at) for at in range(size)]


def _valid(value: Any) -> Any:
    """Return the value with lone surrogates as escapes, because Arrow cannot store them."""
    text = isinstance(value, str)
    return value.encode("utf-8", "backslashreplace").decode() if text else value
