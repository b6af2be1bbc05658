"""Whether the steps of optimizers do anything: gradients that never come, weights that never move.

What is certain is noted; anything else is not mentioned. Once an optimizer was seen to change a
weight, which most do at their second step, it is not looked at any more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ....findings import Finding
from ....planning.plan import Plan
from ....planning.task_values import by_name
from ....tracking import events as ev
from ....tracking.event_log import EventWriter
from ...device_scalars import ScalarReader, captures
from ..safe_hooks import guarded
from .places import Place, user_place

SURE = 10
"""Steps without a gradient that are noted at once; at the end of a training, `FEW` are enough."""

FEW = 3

MOST = 100
"""Steps whose weights are compared, at most."""

SAMPLE = 64
"""Parameters, and elements of each, that are compared from step to step."""

_harmless = guarded("looking at what optimizers do")


@dataclass(eq=False)
class _Effect:
    """What is known of the steps of an optimizer."""

    kind: str
    made: Place = field(default_factory=Place)
    name: str = ""
    """The notebook's variable that it is, if it does nothing so far."""
    is_frozen: bool = False
    """Whether none of its parameters required a gradient at the last step that found none."""
    stepped: Place = field(default_factory=Place)
    steps: int = 0
    empty: int = 0
    """Steps that a backward pass came before, and that found no gradient."""
    backwards: int = 0
    """Backward passes before its last step, of all models."""
    has_gradients: bool = False
    are_cleared: bool = False
    """Whether a backward pass made gradients, and the step found none."""
    hooks: list[Any] = field(default_factory=list)
    chosen: list[weakref.ref[Any]] = field(default_factory=list)
    """The parameters of the sample."""
    sample: Any = None
    """Some of their weights after the first step that found gradients."""
    idle: int = 0
    """Steps whose learning rate was 0."""
    looks: int = 0
    """Steps at which weights were looked at."""
    has_slope: bool = False
    """Whether any gradient was other than 0, from the second look on."""

    def watch(self, parameters: Iterable[Any]) -> None:
        """Find out whether the next backward passes reach the parameters."""

        def reached(_: Any) -> None:
            self.are_cleared = True

        self.hooks = [p.register_hook(reached) for p in parameters if p.requires_grad]

    def drop_hooks(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()


class OptimizerEffects:
    """Looks at the steps of a rank's optimizers. Keeps none of them alive."""

    def __init__(self, writer: EventWriter, reader: ScalarReader, plan: Plan | None) -> None:
        self._writer, self._reader, self._plan = writer, reader, plan
        self._effects: list[_Effect] = []  # of those that did nothing so far
        self._by_id: dict[int, _Effect] = {}
        self._is_training = False  # some optimizer has gradients
        self._has_moved = False  # some optimizer changed a weight, or may have
        self.settled: set[int] = set()
        """Ids of the optimizers that need no look any more."""

    @_harmless
    def made(self, optimizer: Any) -> None:
        """Take note of a new optimizer, and of the line that makes it."""
        self.settled.discard(id(optimizer))  # of a dead one
        self._by_id[id(optimizer)] = _Effect(type(optimizer).__name__, user_place())

    @_harmless
    def look(self, optimizer: Any, backwards: int) -> None:
        """Look at an optimizer right after its step; `backwards` counts all backward passes."""
        effect = self._by_id.setdefault(id(optimizer), _Effect(type(optimizer).__name__))
        parameters = [p for p in _parameters(optimizer) if p.numel()]
        if not parameters or not _steps_as_torch_does(optimizer):
            self._is_training = True
            self._settle(id(optimizer))
            return
        effect.steps += 1
        if effect.steps == 1:
            effect.stepped = user_place()
            self._effects.append(effect)
        if effect.steps == FEW:
            effect.name = self._variable(optimizer)
        had_backward, effect.backwards = backwards > effect.backwards, backwards
        if any(p.grad is not None for p in parameters):
            self._is_training = effect.has_gradients = True
            effect.drop_hooks()
            self._compare(optimizer, effect, parameters)
        elif had_backward and not effect.has_gradients:
            effect.empty += 1
            effect.is_frozen = not any(p.requires_grad for p in parameters)
            if effect.empty == 1:
                effect.watch(parameters)
            elif effect.empty == FEW:
                effect.drop_hooks()
            if effect.empty == SURE and not self._is_training:
                self._note_no_gradients(effect)

    @_harmless
    def finish(self, loss: float | None) -> None:
        """Report what is certain at the end of the training, of which `loss` is the last."""
        for effect in self._effects:
            effect.drop_hooks()
            if effect.empty >= FEW and not effect.has_gradients:
                self._note_no_gradients(effect, is_over=True)
            elif effect.steps >= FEW and effect.has_gradients and not self._has_moved:
                self._note_no_change(effect, loss)

    def _compare(self, optimizer: Any, effect: _Effect, parameters: list[Any]) -> None:
        """Compare some weights with those after the first step, at which they are taken."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        if all(type(rate) in (int, float) and rate == 0 for rate in rates):
            effect.idle += 1
            return
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized() and captures.under_way(torch):
            return
        effect.looks += 1
        try:
            if effect.looks == 1:
                effect.chosen = [weakref.ref(p) for p in parameters if p.grad is not None][:SAMPLE]
                effect.sample = _sample(p() for p in effect.chosen).clone()
                is_readable = effect.sample.device.type in ("cpu", "cuda")
            else:
                gradients = [p.grad for p in parameters if p.grad is not None]
                is_readable = effect.looks <= MOST
                self._judge(id(optimizer), effect, gradients)
        except Exception:  # tensors of any kind may refuse to be compared
            is_readable = False
        if not is_readable:
            self._settle(id(optimizer))

    def _judge(self, key: int, effect: _Effect, gradients: list[Any]) -> None:
        """Find out whether any weight of the sample moved, and any gradient says it should."""
        moved = (_sample(p() for p in effect.chosen) != effect.sample).any()
        if moved.device.type == "cpu":
            if moved:
                self._settle(key)
                return
            effect.has_slope = effect.has_slope or bool(_any_slope(gradients))
            return

        def arrived(values: Mapping[str, Any]) -> None:
            effect.has_slope |= bool(values.get("slope", True))
            if values.get("moved", True) and self._by_id.get(key) is effect:
                self._settle(key)

        self._reader.submit({"moved": moved, "slope": _any_slope(gradients)}, arrived)

    def _settle(self, key: int) -> None:
        self._has_moved = True
        self.settled.add(key)
        effect = self._by_id.pop(key)
        self._effects = [each for each in self._effects if each is not effect]

    # Notes

    def _note_no_gradients(self, effect: _Effect, *, is_over: bool = False) -> None:
        if self._is_training and effect.is_frozen:  # on purpose: something else is trained
            return
        place = f" ({effect.stepped})" if effect.stepped.file else ""
        if effect.are_cleared:
            reason = (
                f"the gradients are cleared before the step{place}. Call zero_grad() before "
                "backward(), or after step(), not between them"
            )
        elif effect.is_frozen:
            reason = (
                f"its parameters are all frozen (requires_grad=False), so that its step{place} "
                "finds no gradients. Make it of the parameters that are to be trained, after the "
                "line that freezes or adds some (such as get_peft_model)"
            )
        else:
            reason = (
                f"its step{place} finds no gradients, since its parameters are not those of the "
                "model that the loss comes from. Make the optimizer after the last line that makes "
                "that model or replaces its parameters (such as fully_shard)"
            )
        flaw = "the optimizer changed nothing" if is_over and not self._is_training else ""
        self._note(effect, reason, flaw)

    def _note_no_change(self, effect: _Effect, loss: float | None) -> None:
        place = f" ({effect.stepped})" if effect.stepped.file else ""
        if effect.idle == effect.steps:
            reason = f"its learning rate is 0 at every step{place}"
            remedy = "Look at `lr`, and at what the scheduler makes of it"
            self._note(effect, f"{reason}. {remedy}", "")
        elif effect.looks == effect.steps and not effect.has_slope and loss:
            reason = f"every gradient is exactly 0 at its steps{place}, though the loss is not"
            remedy = "Look for what cuts the loss off from the weights (a detach(), a factor of 0)"
            self._note(effect, f"{reason}. {remedy}", "all gradients were 0")

    def _note(self, effect: _Effect, reason: str, flaw: str) -> None:
        made = f" of {effect.made}" if effect.made.file else ""
        name = f"`{effect.name}` ({effect.kind})" if effect.name else f"the {effect.kind}{made}"
        self._writer.write(
            ev.RunNote.of(Finding("no-effect", f"{name} changes nothing: {reason}", flaw=flaw))
        )

    def _variable(self, optimizer: Any) -> str:
        """Return the notebook's variable that an optimizer is; "" for none."""
        known: Mapping[str, Any] = {}
        with suppress(Exception):  # users' objects
            known = by_name(self._plan.task) if self._plan is not None else {}
        return next((n for n, v in known.items() if v is optimizer and n[:1] != "_"), "")


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _steps_as_torch_does(optimizer: Any) -> bool:
    """Whether a step is one of torch's own, which does nothing to what has no gradient."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim.")


def _sample(parameters: Iterable[Any]) -> Any:
    """Return some elements of parameters: a few of the first and the last row of each."""
    torch: Any = sys.modules["torch"]
    rows = []
    for parameter in parameters:
        local = _local(parameter.detach())
        for index in 0, -1:
            row = local.reshape(1) if not local.ndim else local
            while row.ndim > 1:
                row = row[index]
            rows.append(row[:SAMPLE])
    return torch.cat(rows)


def _any_slope(gradients: Iterable[Any]) -> Any:
    """Return, as a scalar tensor, whether any element of any gradient is other than 0."""
    torch: Any = sys.modules["torch"]
    return torch.stack([_local(gradient).ne(0).any() for gradient in gradients]).any()


def _local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
