"""Finds the loss of a training: the tensor that backward is called on, before any scaling."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...tracking import clock
from ...tracking import events as ev
from ...tracking.limits import MAX_BINS
from .. import limits
from ..device_scalars import captures, is_late
from ..hooks import losses
from ..rank_context import RankContext
from .reports import Meter, ReportReason


@dataclass(slots=True)
class _Moment:
    """When backward was called on a loss."""

    steps: int
    """Optimizer steps before it."""
    has_led_to_step: bool = False
    """Whether an optimizer step followed, before the next backward."""
    optimizer: int = 0
    """The id of the first optimizer that stepped then."""
    step: int = 0
    """The number of that step: the second of a round has the number of the first."""
    value: float | None = None
    """The loss, once it is known."""
    divisor: int = 1
    """The whole number that the user's code divided it by, before backward."""


class LossMeter(Meter):
    """Keeps the last loss. A loss on a GPU is read later (`nbtrain.worker.device_scalars`).

    If a step has several losses, the last one counts: an earlier one may belong to an adversarial
    example or to the first pass of SAM.

    A loss that is unknown because of a scaler, such as a sum of scaled losses, is not reported.
    """

    def __init__(self, context: RankContext) -> None:
        self._figures, self._reader = context.figures, context.scalars
        self._writer, self._rank = context.writer, context.rank
        self._not_finite = 0  # in a row
        self._first: tuple[float, int] = math.nan, 0  # of that row: the loss, and steps before it
        self._suspect: _Moment | None = None  # of the last in that row
        self._has_diverged = False  # the losses of the last steps were not finite
        self._is_reported = False  # that they were not
        self._total, self._count = 0.0, 0  # of the finite losses: the sum, and how many
        self._moment = _Moment(0)  # of the last backward
        self._moment_on_device = self._moment
        self._each: list[tuple[_Moment, float]] = []  # since the last report
        self._owners: list[int] = []  # ids of optimizers that step on a loss of their own
        self._last_owner = 0
        self._takes_turns = False
        self._to_read = 0  # losses on a GPU: one of each optimizer
        self._has_scaler = False
        self._value: float | None = None
        self._reported: float | None = None
        self._on_device: Any = None  # the last one on a GPU or TPU, detached: for the end
        self._shares = 0  # backwards since the last step
        self._accumulation: int | None = None  # the most backwards that one step had
        self._shares_to_take: list[tuple[_Moment, float]] = []  # losses, until that is known
        self._due = 0.0

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the last loss if it is new, or at the end in any case, and points of the curves.

        The same loss a second time would be a point of the curve that was not measured.
        """
        counts: dict[str, Any] = {"has_diverged": self._has_diverged}
        if reason == "end":
            counts["loss"] = self._last()
        elif reason == "interval":
            counts["loss"], self._value = self._value, None
            self._reported = self._reported if counts["loss"] is None else counts["loss"]
        if reason == "rest":
            return counts
        losses, bins = join_early(self._take_each())
        return {**counts, "losses": losses, "loss_bins": bins}

    def _last(self) -> float | None:
        """Return the last loss that is known."""
        return self._reported if self._value is None else self._value

    def _read_last(self) -> None:
        """Begin to read the last loss on a GPU, however recently one was read."""
        if self._on_device is not None:
            moment = self._moment_on_device
            self._reader.submit(
                {"loss": self._on_device}, lambda values: self._take_arrived(values, moment)
            )

    def on_training_end(self, wait: bool) -> None:
        """Take the losses that waited for the length of an accumulation, or for a device.

        If no optimizer of torch's has stepped, the loop has made steps of its own: a last loss that
        is not finite is then judged as one that a step followed.
        """
        if wait:
            self._read_last()
        self._reader.finish(wait)
        self._take_shares()
        has_read = self._figures.loader_place[1] is not None
        if self._suspect is not None and has_read and not self._figures.steps:
            self._suspect.has_led_to_step = True
            self._judge(self._suspect)
        self._figures.losses = self._total, self._count
        self._figures.last_loss = self._last()

    def on_step(self, optimizer: Any) -> None:
        """Assign the last loss to a step of `optimizer`.

        Reports divergence if that loss is not finite and the step was not skipped, see `_judge`.
        """
        losses.forget_scaling()
        self._accumulation = max(self._accumulation or 0, self._shares)
        self._shares = 0
        if self._shares_to_take:
            self._take_shares()
        figures = self._figures
        figures.losses_before, figures.losses = figures.losses, (self._total, self._count)
        if not self._moment.optimizer:
            self._moment.optimizer = key = id(optimizer)
            self._moment.step = figures.steps
            if key != self._last_owner or self._takes_turns:
                self._note_owner(key)
        if getattr(optimizer, "found_inf", None) is None:  # else a scaler has it skip by itself
            self._moment.has_led_to_step = True
        if self._suspect is not None:
            self._judge(self._suspect)

    def _take_shares(self) -> None:
        self._accumulation = self._accumulation or 0
        shares, self._shares_to_take = self._shares_to_take, []
        for moment, value in shares:
            self._take(value, moment)

    def _note_owner(self, key: int) -> None:
        """Note the optimizer that steps on the last loss; those that take turns have a curve each.

        Optimizers are numbered in the order of their first steps: `loss 1`, `loss 2`.
        """
        if key in self._owners and key != self._last_owner and not self._takes_turns:
            self._takes_turns = True
            self._total, self._count = 0.0, 0  # until now of all losses, from now on of the first's
        if key not in self._owners:
            self._owners.append(key)
        self._last_owner = key
        value = self._moment.value
        if self._takes_turns and value is not None and key == self._owners[0]:
            self._value = value
            self._add(value)

    def _add(self, value: float) -> None:
        if value - value == 0.0:  # the fastest test for a finite number
            self._total += value
            self._count += 1

    def _take_each(self) -> tuple[tuple[int, float, str], ...]:
        """Return the losses since the last call that are points of a curve: (step, loss, curve).

        The curve is "", or ``loss 2`` for the second of optimizers that take turns. With these, a
        last loss that no step has followed yet is kept for the next call.
        """
        each, self._each = self._each, []
        if not self._takes_turns:
            return tuple((moment.steps + 1, value, "") for moment, value in each)
        if each and not each[-1][0].optimizer:  # no step has followed yet
            self._each = [each.pop()]
        return tuple(
            (moment.step, value, f"loss {self._owners.index(moment.optimizer) + 1}")
            for moment, value in each
            if moment.optimizer in self._owners
        )

    def on_loss_scaling(self) -> None:
        """Take note that a scaler may skip steps."""
        self._has_scaler = True

    def on_backward(self, loss: Any) -> None:
        """Take a loss: on a CPU its value at once, since its owner may change it in place.

        On a GPU or TPU, it is read later.
        """
        self._moment = _Moment(self._figures.steps, divisor=losses.divisor(loss))
        self._shares += 1
        if loss.device.type == "cpu":
            self._take(loss.item(), self._moment)
        elif is_late(loss.device.type):  # reading any other would wait for the device
            # On a TPU, a step that keeps its loss is another program than one that does not, so
            # every step keeps it, whether the loss is read or not.
            self._on_device, self._moment_on_device = loss.detach(), self._moment
            now = time.monotonic()
            is_cuda = loss.device.type == "cuda"
            if now >= self._due and not (is_cuda and captures.under_way(sys.modules["torch"])):
                self._due = now + limits.REPORT_INTERVAL_S
                self._to_read = len(self._owners) if self._takes_turns else 1
            if self._to_read:
                self._to_read -= 1
                self._read_last()

    def _take_arrived(self, values: dict[str, Any], moment: _Moment) -> None:
        if "loss" in values:
            self._take(float(values["loss"]), moment)

    def _take(self, value: float, moment: _Moment) -> None:
        """Take a known value and judge it; a share of an accumulation may wait."""
        if moment.divisor > 1:
            if self._accumulation is None and len(self._shares_to_take) < MAX_BINS:
                self._shares_to_take.append((moment, value))
                return
            # A share of an accumulation, and not a mean that the user writes as a quotient.
            value *= moment.divisor if moment.divisor == self._accumulation else 1
        moment.value = value
        if not self._takes_turns or moment.optimizer == self._owners[0]:
            self._value = value
            self._add(value)
        self._remember(moment, value)
        if math.isfinite(value):
            self._not_finite, self._suspect, self._has_diverged = 0, None, False
            return
        if not self._not_finite:
            self._first = value, moment.steps
        self._not_finite += 1
        self._suspect = moment
        self._judge(moment)

    def _remember(self, moment: _Moment, value: float) -> None:
        """Keep a loss for a curve: the last of each step, and of each optimizer."""
        each = self._each
        if each and each[-1][0].steps == moment.steps and not self._takes_turns:
            each.pop()  # the last of an accumulation, or of two that take turns
        each.append((moment, value))
        if len(each) > limits.MAX_LOSSES_KEPT:  # nothing is reported at present
            del each[: len(each) // 2]

    def _judge(self, moment: _Moment) -> None:
        """Report divergence if a step followed a loss that is not finite, or after many of them.

        With a scaler, only after `MAX_SKIPPED_LOSSES` in a row, since the scaler may skip the step.
        Sets `has_diverged` in any case where a step followed.
        """
        self._has_diverged = self._has_diverged or moment.has_led_to_step
        if self._not_finite >= limits.MAX_SKIPPED_LOSSES or (
            self._has_diverged and not self._has_scaler
        ):
            loss, steps = self._first
            if not self._is_reported:
                self._is_reported = True
                self._writer.write(ev.NotFinite(clock.now(), -1, self._rank, steps, str(loss)))


Points = Sequence[tuple[int, float, str]]
Bins = tuple[tuple[int, float, str, int, float, float], ...]


def join_early(points: Points) -> tuple[Points, Bins]:
    """Join losses that a curve of at most `MAX_BINS` bins shows as one; return the rest, and these.

    Points are (step, loss, curve); bins have the last step, the mean, the curve, how many losses,
    the least and the most. Losses that are not finite are joined with their like. The last loss of
    each curve stays.
    """
    last = {name: at for at, (_, _, name) in enumerate(points)}
    kept, groups = list[tuple[int, float, str]](), dict[tuple[str, int, int, str], list[Any]]()
    for at, point in enumerate(points):
        step, value, name = point
        width = 1 << max(0, step.bit_length() - _FULL_STEPS.bit_length())
        if width == 1 or at == last[name]:
            kept.append(point)
        else:
            kind = "" if value - value == 0.0 else str(value)
            groups.setdefault((name, width, step // width, kind), []).append(point)
    bins = []
    for (name, *_), group in groups.items():
        values = [value for _, value, _ in group]
        # Divided before they are summed: two losses of 1e308 have a mean, and no sum.
        mean = math.fsum(value / len(values) for value in values)
        low, high = min(values), max(values)
        mean, low, high = (float(f"{v:.8g}") for v in (min(max(mean, low), high), low, high))
        bins.append((group[-1][0], mean, name, len(values), low, high))
    return tuple(kept), tuple(bins)


_FULL_STEPS = 2 * MAX_BINS - 1
"""Until this step, every loss is a point: a curve has bins of two steps from about there on."""
