"""The functions that training code calls: `log`, `progress`, `rank`, `world_size`.

Inside a rank these append events to the rank's own file. Outside a run they do the harmless
thing, so that the same function runs under ``torchrun`` or in plain Python.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..system.text import shorten
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from .device_scalars import ScalarReader, is_late

T = TypeVar("T")

_log = logging.getLogger("nbtrain")


@dataclass(frozen=True)
class Reporter:
    """Where this process reports to.

    With several nodes, `rank` counts on this node, and `first` is the number of its first rank.
    """

    writer: EventWriter
    rank: int
    world_size: int
    first: int = 0
    late: ScalarReader = field(default_factory=ScalarReader)
    lost: set[str] = field(default_factory=set)
    """Names of logged losses that were not finite."""


active: Reporter | None = None
"""The reporter of this process, if it is a rank."""

optimizer_steps = 0
"""Optimizer steps of this process's task: the step of metrics that are logged without one."""


def activate(reporter: Reporter | None) -> Reporter | None:
    """Set the reporter of this process, or remove it with None; return the one before.

    Sets the count of optimizer steps back to 0.
    """
    global active, optimizer_steps
    previous, active, optimizer_steps = active, reporter, 0
    return previous


def rank() -> int:
    """Return the rank of this process: 0 outside a run, ``$RANK`` under another launcher."""
    return active.first + active.rank if active is not None else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks: 1 outside a run, ``$WORLD_SIZE`` under another launcher."""
    return active.world_size if active is not None else int(os.environ.get("WORLD_SIZE", 1))


def log(step: int | None = None, **metrics: Any) -> None:
    """Report metrics of this rank. The board shows them, and ``run.history`` keeps them.

    Example::

        nbtrain.log(step=step, loss=loss, lr=schedule.get_last_lr()[0])

    The training does not wait for a tensor on a GPU or TPU: it is read when its value is there.
    Outside a run, the values go to the logger ``nbtrain`` at level INFO.

    Args:
        step: the number of the step; None: the optimizer steps so far.
        metrics: numbers, texts or tensors with one element, by name.

    Raises:
        TypeError: the step is not a whole number, or a metric is of another kind.
    """
    log_values(step, metrics)


def log_values(step: Any, metrics: dict[str, Any]) -> None:
    """Report metrics of any name, as `log` does."""
    reporter = active
    if step is not None and type(step) is not int:
        step = _step(step)
    values: dict[str, float | str] = {}
    for name, value in metrics.items():
        if type(value) is float:  # nearly all are
            values[name] = value
        elif reporter is not None and _is_on_gpu(value):
            _log_late(reporter, step, metrics)
            return
        else:
            values[name] = _metric(name, value)
    if reporter is None:
        _log.info("step %s: %s", step, values)
    else:
        _write(reporter, clock.now(), step, values)


def _write(
    reporter: Reporter, now: float, step: int | None, values: dict[str, float | str]
) -> None:
    """Write metrics at once, in the rank's own file.

    The first value of a training loss that is not finite is also a `NotFinite` event, once for each
    name.
    """
    if reporter.writer.write_metrics(now, reporter.rank, step, values, optimizer_steps):
        return
    for name, value in values.items():
        is_finite = type(value) is not float or value - value == 0.0
        if not is_finite and name not in reporter.lost and ev.is_training_loss(name):
            reporter.lost.add(name)
            before = -1 if step is None else step
            event = ev.NotFinite(now, -1, reporter.rank, before, str(value))
            reporter.writer.write(event)


def _log_late(reporter: Reporter, step: int | None, metrics: dict[str, Any]) -> None:
    """Report metrics of which some are on a GPU, as one event when those have arrived.

    The time of the event is that of the call. Raises `TypeError` at once for a value on the CPU
    that is no metric.
    """
    on_gpu = {name: value for name, value in metrics.items() if _is_on_gpu(value)}
    here = {name: None if name in on_gpu else _metric(name, v) for name, v in metrics.items()}
    now = clock.now()

    def write(read: dict[str, Any]) -> None:
        values = here | {name: _metric(name, value) for name, value in read.items()}
        known = {name: value for name, value in values.items() if value is not None}
        _write(reporter, now, step, known)

    reporter.late.submit(on_gpu, write)
    reporter.late.deliver()


def _is_on_gpu(value: Any) -> bool:
    """Whether a value is a real scalar tensor on a GPU or a TPU."""
    kind = getattr(getattr(value, "device", None), "type", "")
    return is_late(kind) and bool(value.numel() == 1 and not value.is_complex())


def is_metric(value: Any) -> bool:
    """Return whether `log` accepts a value: a number, a text, or a tensor or array of one element.

    A value on a GPU is accepted without being read.
    """
    try:
        return _is_on_gpu(value) or _metric("", value) is not None
    except TypeError:
        return False


def _metric(name: str, value: Any) -> float | str:
    """Return a metric as a number, or as a text of at most 200 characters.

    An integer of 2⁵³ or more becomes a float. Raises `TypeError` for another kind.
    """
    if isinstance(value, str):
        return shorten(value, 200)
    if isinstance(value, (bool, int)) and abs(value) < 1 << 53:
        return value
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"nbtrain.log: {name} is a {type(value).__name__}; a metric is a number, a text "
            f"or a tensor with one element ({error})"
        ) from None


def _step(step: Any) -> int:
    """Return a step as an integer. Raises `TypeError` if it is not a whole number."""
    try:
        number = float(step)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not number.is_integer():
        hint = "; metrics go by name: nbtrain.log(**metrics)" if isinstance(step, dict) else ""
        raise TypeError(f"nbtrain.log: step must be a whole number, not {step!r}{hint}")
    return int(number)


def progress(
    iterable: Iterable[T], total: float | None = None, description: str = "", unit: str = "it"
) -> Iterable[T]:
    """Iterate with a progress bar: on the board in a run, as an ordinary tqdm bar elsewhere.

    It is a bar of tqdm. The board also shows every other bar of tqdm in a rank.

    Args:
        iterable: what to iterate over.
        total: the number of its items, if it has no length.
        description: the name of the bar, such as "epoch".
        unit: what is counted, such as "batch".
    """
    from tqdm.auto import tqdm  # which accelerate brings

    bar: Iterable[T] = tqdm(iterable, total=total, desc=description or None, unit=unit)
    return bar
