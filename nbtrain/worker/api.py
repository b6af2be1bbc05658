"""The functions that training code calls: `log`, `progress`, `rank`, `should_stop`, and others.

Inside a rank these append events to the rank's own file. Outside a run they do the harmless
thing, so that the same function runs under ``torchrun`` or in plain Python.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import Any, TypeVar

from ..system.text import shorten
from ..tracking import clock
from ..tracking import events as ev
from . import rank_context
from .device_scalars import is_late
from .rank_context import Knob, RankContext

T = TypeVar("T")

_log = logging.getLogger("nbtrain")


def rank() -> int:
    """Return the rank of this process: 0 outside a run, ``$RANK`` under another launcher."""
    context = rank_context.current()
    return context.global_rank if context is not None else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks: 1 outside a run, ``$WORLD_SIZE`` under another launcher."""
    context = rank_context.current()
    return context.world_size if context is not None else int(os.environ.get("WORLD_SIZE", 1))


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
    context = rank_context.current()
    if step is not None and type(step) is not int:
        step = _step(step)
    values: dict[str, float | str] = {}
    for name, value in metrics.items():
        if type(value) is float:  # nearly all are
            values[name] = value
        elif context is not None and _is_on_gpu(value):
            _log_late(context, step, metrics)
            return
        else:
            values[name] = _metric(name, value)
    if context is None:
        _log.info("step %s: %s", step, values)
    else:
        _write(context, clock.now(), step, values)


def _write(
    context: RankContext, now: float, step: int | None, values: dict[str, float | str]
) -> None:
    """Write metrics at once, in the rank's own file.

    The first value of a training loss that is not finite is also a `NotFinite` event, once for each
    name.
    """
    if context.writer.write_metrics(now, context.rank, step, values, context.optimizer_steps):
        return
    for name, value in values.items():
        is_finite = type(value) is not float or value - value == 0.0
        if not is_finite and name not in context.diverged and ev.is_training_loss(name):
            context.diverged.add(name)
            before = -1 if step is None else step
            event = ev.NotFinite(now, -1, context.rank, before, str(value))
            context.writer.write(event)


def _log_late(context: RankContext, step: int | None, metrics: dict[str, Any]) -> None:
    """Report metrics of which some are on a GPU, as one event when those have arrived.

    The time of the event is that of the call. Raises `TypeError` at once for a value on the CPU
    that is no metric.
    """
    on_gpu = {name: value for name, value in metrics.items() if _is_on_gpu(value)}
    known = {name: None if name in on_gpu else _metric(name, v) for name, v in metrics.items()}
    now = clock.now()

    def write(read: dict[str, Any]) -> None:
        values = known | {name: _metric(name, value) for name, value in read.items()}
        arrived = {name: value for name, value in values.items() if value is not None}
        _write(context, now, step, arrived)

    context.scalars.submit(on_gpu, write)
    context.scalars.deliver()


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


def should_stop() -> bool:
    """Return whether the training should end here: this rank was asked to stop, or to finish.

    Call it in each step. A loop that does is not interrupted by ■, the Stop button, a timeout or a
    command: it has 1.5 s to see the request, and may then save and return, within the run's grace.
    The ranks see the request within milliseconds of each other, perhaps not in the same step. If
    they step together, let them agree first, with an ``all_reduce`` of the answer. To finish
    (``run.finish()``), all ranks are asked after the same step, and have all the time that they
    need. Outside a run, it returns False.
    """
    context = rank_context.current()
    if context is None:
        return False
    if context.stopper is None:
        return context.is_finishing
    context.stopper.is_asked = True
    return context.is_finishing or context.stopper.is_due


_RESERVED = {"lr", "weight_decay", "momentum", "betas", "optimizer", "group"}
"""Names of ``run.turn`` that mean something else."""


def knob(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a number that can be changed while the function trains, by ``run.turn(NAME=…)``.

    Call it wherever the number is used. All ranks get a new value after the same optimizer step.
    Outside a run it returns `value`.

    Example::

        weight = nbtrain.knob("kl_weight", 0.1, low=0, high=1)

    Args:
        name: how the user calls it.
        value: the number until it is turned.
        low: the least value that it can be turned to.
        high: the greatest one.

    Raises:
        ValueError: the name is that of a setting of optimizers.
    """
    if name in _RESERVED:
        raise ValueError(f"nbtrain.knob: {name} is a setting of optimizers; choose another name")
    context = rank_context.current()
    if context is None:
        return value
    known = context.knobs.get(name)
    if known is None:
        known = context.knobs[name] = Knob(value, low, high)
    known.given, known.low, known.high = value, low, high
    return known.present
