"""Finds the loss of a training: the tensor that backward is called on, before any scaling."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...tracking.limits import MAX_BINS
from .. import limits
from ..device_scalars import ScalarReader, captures, is_late
from ..hooks import Observer, losses


@dataclass(slots=True)
class _Moment:
    """When backward was called on a loss."""

    steps: int
    """Optimizer steps before it."""
    has_led_to_step: bool = False
    """Whether an optimizer step followed, before the next backward."""
    optimizer: int = 0
    """The id of the first optimizer that stepped then."""
    value: float | None = None
    """The loss, once it is known."""
    divisor: int = 1
    """The whole number that the user's code divided it by, before backward."""


class LossMeter(Observer):
    """Keeps the last loss. A loss on a GPU is read later (`nbtrain.worker.device_scalars`).

    If a step has several losses, the last one counts: an earlier one may belong to an adversarial
    example or to the first pass of SAM.

    A loss that is unknown because of a scaler, such as a sum of scaled losses, is not reported.
    """

    def __init__(
        self,
        reader: ScalarReader,
        on_diverged: Callable[[float, int], None],
        on_loss: Callable[[Any], None],
    ) -> None:
        self._reader, self._on_diverged, self._on_loss = reader, on_diverged, on_loss
        self._not_finite = 0  # in a row
        self._first: tuple[float, int] = math.nan, 0  # of that row: the loss, and steps before it
        self._suspect: _Moment | None = None  # of the last in that row
        self.has_diverged = False
        """Whether the losses of the last steps were not finite."""
        self.total, self.count = 0.0, 0
        """The sum of the finite losses, and how many there were."""
        self.before_step = 0.0, 0
        """Both, at the last step."""
        self._steps = 0
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

    def take(self) -> float | None:
        """Return the last loss once; None until there is a newer one.

        The same loss a second time would be a point of the curve that was not measured.
        """
        value, self._value = self._value, None
        self._reported = self._reported if value is None else value
        return value

    def last(self) -> float | None:
        """Return the last loss that is known."""
        return self._reported if self._value is None else self._value

    def read_last(self) -> None:
        """Begin to read the last loss on a GPU, however recently one was read."""
        if self._on_device is not None:
            moment = self._moment_on_device
            self._reader.submit(
                {"loss": self._on_device}, lambda values: self._take_arrived(values, moment)
            )

    def settle(self) -> None:
        """Take the losses that waited for the length of an accumulation; the training has ended.

        If no optimizer of torch's has stepped, the loop has made steps of its own: a last loss that
        is not finite is then judged as one that a step followed.
        """
        self._take_shares()
        if self._suspect is not None and not self._steps:
            self._suspect.has_led_to_step = True
            self._judge(self._suspect)

    def note_step(self, optimizer: Any, steps: int) -> None:
        """Assign the last loss to a step of `optimizer`, which is the step number `steps`.

        Reports divergence if that loss is not finite and the step was not skipped, see `_judge`.
        """
        losses.forget_scaling()
        self._accumulation = max(self._accumulation or 0, self._shares)
        self._shares = 0
        if self._shares_to_take:
            self._take_shares()
        self._steps = steps
        self.before_step = self.total, self.count
        if not self._moment.optimizer:
            self._moment.optimizer = key = id(optimizer)
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
            self.total, self.count = 0.0, 0  # until now of all losses, from now on of the first's
        if key not in self._owners:
            self._owners.append(key)
        self._last_owner = key
        value = self._moment.value
        if self._takes_turns and value is not None and key == self._owners[0]:
            self._value = value
            self._add(value)

    def _add(self, value: float) -> None:
        if value - value == 0.0:  # the fastest test for a finite number
            self.total += value
            self.count += 1

    def take_each(self) -> tuple[tuple[int, float, str], ...]:
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
            (moment.steps + 1, value, f"loss {self._owners.index(moment.optimizer) + 1}")
            for moment, value in each
            if moment.optimizer in self._owners
        )

    def on_loss_scaling(self) -> None:
        """Take note that a scaler may skip steps."""
        self._has_scaler = True

    def on_backward(self, loss: Any) -> None:
        """Take a loss: on a CPU its value at once, since its owner may change it in place.

        On a GPU or TPU, it is read later. What is no tensor is ignored, and so is a subclass that
        computes in its own way.
        """
        torch: Any = sys.modules["torch"]
        if not isinstance(loss, torch.Tensor):
            return
        if type(loss) is torch.Tensor:
            self._keep_value(loss, torch)
        # A subclass that only has methods of its own (fastai's, MONAI's) holds a value as a tensor
        # does. One that computes in its own way (DTensor) may need other ranks for it.
        elif type(loss).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            with torch._C.DisableTorchFunctionSubclass():
                self._keep_value(loss, torch)

    def _keep_value(self, loss: Any, torch: Any) -> None:
        """Keep a loss that is a single number, and read it or begin to read it."""
        if not loss.is_floating_point() or loss.ndim:
            return
        self._moment = _Moment(self._steps, divisor=losses.divisor(loss))
        self._shares += 1
        if self._steps < MAX_BINS:  # who compares ranks wants the first few
            self._on_loss(loss)
        if loss.device.type == "cpu":
            self._take(loss.item(), self._moment)
        elif is_late(loss.device.type):  # reading any other would wait for the device
            # On a TPU, a step that keeps its loss is another program than one that does not, so
            # every step keeps it, whether the loss is read or not.
            self._on_device, self._moment_on_device = loss.detach(), self._moment
            now = time.monotonic()
            is_cuda = loss.device.type == "cuda"
            if now >= self._due and not (is_cuda and captures.under_way(torch)):
                self._due = now + limits.REPORT_INTERVAL_S
                self._to_read = len(self._owners) if self._takes_turns else 1
            if self._to_read:
                self._to_read -= 1
                self.read_last()

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
        if moment.steps < MAX_BINS or self._takes_turns:
            self._remember(moment, value)
        if math.isfinite(value):
            self._not_finite, self._suspect, self.has_diverged = 0, None, False
            return
        if not self._not_finite:
            self._first = value, moment.steps
        self._not_finite += 1
        self._suspect = moment
        self._judge(moment)

    def _remember(self, moment: _Moment, value: float) -> None:
        """Keep a loss for a curve: of the first steps, and the last of each optimizer."""
        each = self._each
        if moment.steps >= MAX_BINS:
            each[:] = each[-len(self._owners) :]
        elif each and each[-1][0].steps == moment.steps and not self._takes_turns:
            each.pop()  # the last of an accumulation, or of two that take turns
        each.append((moment, value))

    def _judge(self, moment: _Moment) -> None:
        """Report divergence if a step followed a loss that is not finite, or after many of them.

        With a scaler, only after `MAX_SKIPPED_LOSSES` in a row, since the scaler may skip the step.
        Sets `has_diverged` in any case where a step followed.
        """
        self.has_diverged = self.has_diverged or moment.has_led_to_step
        if self._not_finite >= limits.MAX_SKIPPED_LOSSES or (
            self.has_diverged and not self._has_scaler
        ):
            self._on_diverged(*self._first)
