"""`memory_needed`: what training a model takes on each rank, and whether it fits here."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

from .. import devices, host
from ..errors import PlanError
from . import anatomy
from .anatomy import STRATEGIES, MemoryAnatomy, Room, Step
from .apart import apart

PRECISIONS = ("no", "fp16", "bf16")

_UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20, "G": 1 << 30, "M": 1 << 20}


def memory_needed(
    model: Any,
    batch: Any,
    *,
    optimizer: Any = "adamw",
    precision: str = "no",
    ranks: int | None = None,
    strategy: str = "ddp",
    card: str | int | None = None,
    rows: int | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> MemoryAnatomy:
    """Tell what a training step of a model needs on each rank, by part, without running it.

    A step is run on tensors without memory: nothing is allocated, no device is touched, the model
    stays as it is. Print what is returned, or leave it as a cell's last line, to read it.

    Args:
        model: a model, or a function that builds one (it is called on the meta device, so a model
            may be asked about that would not fit).
        batch: a shape, ``"8x512"`` (rows × tokens for a text model, rows alone for images, else
            the shape of the one tensor it takes), or a real batch, of which only shapes are read.
        optimizer: a name (adamw, sgd, …; none: inference), or one of yours.
        precision: autocast's, as under Accelerate: 'no', 'fp16' or 'bf16'.
        ranks: how many train together; None: one a GPU that is here, 2 without, 1 with `card`.
        strategy: 'ddp', or 'fsdp': weights, gradients and states are shared among the ranks.
        card: a card's memory, ``"16GB"``; None: of the GPUs that are here, else this host's.
        rows: of a real batch, in place of its own.
        loss: makes a number of the model's output; None: its own ``loss``, else a sum.

    Raises:
        PlanError: the model cannot be run like that.
    """
    _check(precision, strategy, ranks)
    room, ranks = _room(card, ranks)
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__.lower()

    def ask() -> tuple[_Steps, tuple[int, ...]]:
        steps = _Steps(model, room, precision, loss, strategy, ranks)
        return steps, steps.choose(batch, optimizer, rows)

    def told() -> dict[str, Any]:
        steps, shape = ask()
        return steps.told(name, precision, shape)

    def find() -> int | None:
        steps, shape = ask()
        return anatomy.largest_batch(steps.needs, room.each, shape[0])

    return MemoryAnatomy(
        optimizer=name,
        ranks=ranks,
        strategy=strategy,
        room=room,
        find=functools.partial(apart, find),
        **apart(told),
    )


class _Steps:
    """The same step with batches of different sizes; each is run once."""

    def __init__(
        self, model: Any, room: Room, precision: str, loss: Any, strategy: str, ranks: int
    ) -> None:
        from .simulate import Simulation, taken

        model = taken(model)
        halved = strategy == "fsdp" and precision != "no" and ranks > 1
        self._simulation = Simulation(model, room.device, precision, loss, halved)
        self._stored = 2 if halved and _widest(model) == 4 else 1
        self._model, self._device = model, room.device
        self._strategy, self._ranks = strategy, ranks
        self._known: dict[int, Step] = {}
        self._make: Any = None
        self._example: Any = None

    def choose(self, batch: Any, optimizer: Any, rows: int | None) -> tuple[int, ...]:
        """Take the optimizer, and the first example that the model can be run on."""
        from . import examples, optimizers

        if optimizer != "none":
            way = optimizers.named if isinstance(optimizer, str) else optimizers.like
            self._make = way(optimizer, self._device)
        if isinstance(batch, (str, int)):
            shape = _shape(str(batch))
            found = examples.of_shape(self._model, shape)
        else:
            shape = (rows or examples.rows_of(batch),)
            found = [examples.like(self._model, batch)]
        trouble: Exception | None = None
        for self._example in found:
            try:
                self.at(shape[0])
                return shape
            except PlanError:
                raise
            except Exception as error:  # the user's forward may raise anything
                trouble = trouble or error
        words = (str(trouble).strip().splitlines() or [""])[0][:300]
        raise PlanError(
            f"the model could not be run on a batch of {'×'.join(map(str, shape))} "
            f"({type(trouble).__name__}: {words}). Give it a real batch, `--batch-from NAME` or "
            "batch=…; a forward that looks at the values of tensors cannot be asked without any."
        ) from trouble

    def at(self, rows: int) -> Step:
        """Return what a rank holds in a step with a batch of so many rows."""
        if rows not in self._known:
            gathers = self._strategy == "fsdp" and self._ranks > 1
            step = self._simulation.step(self._make, self._example, rows, gathers)
            if self._strategy == "ddp":
                step = anatomy.under_ddp(step, self._ranks)
            else:
                step = anatomy.under_fsdp(step, self._ranks, self._stored)
            self._known[rows] = step
        return self._known[rows]

    def told(self, name: str, precision: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return what there is to tell of the step with a batch of this shape."""
        from . import optimizers, simulate

        model, step = self._model, self.at(shape[0])
        shards = self._ranks if self._strategy == "fsdp" else 1
        context, reserve = anatomy.overhead(step.peak.total, self._device)
        return {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "batch": shape,
            "precision": simulate.words(model) if precision == "no" else precision,
            "parts": step.most,
            "peak": step.peak,
            "phase": step.phase,
            "textbook": optimizers.textbook(name, model, precision, shards),
            "context": context,
            "reserve": reserve,
            "notes": simulate.left_out(model),
        }

    def needs(self, rows: int) -> int:
        """Return the bytes that a rank takes of its card with a batch of so many rows."""
        peak = self.at(rows).peak.total
        return peak + sum(anatomy.overhead(peak, self._device))


def _widest(model: Any) -> int:
    return max((p.element_size() for p in model.parameters()), default=4)


def _check(precision: str, strategy: str, ranks: int | None) -> None:
    for what, value, known in (
        ("precision", precision, PRECISIONS),
        ("strategy", strategy, STRATEGIES),
    ):
        if value not in known:
            raise PlanError(f"{what} is one of {', '.join(known)}, not {value!r}")
    if ranks is not None and ranks < 1:
        raise PlanError(f"ranks is a number ≥ 1, not {ranks}")


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*([x×*][1-9]\d*)*", text):
        raise PlanError(f"a batch is written 8x512, or 32, not {text!r}")
    return tuple(int(n) for n in re.split("[x×*]", text))


def _room(card: str | int | None, ranks: int | None) -> tuple[Room, int]:
    """Return where the ranks are to fit, and how many there are unless that was said."""
    if card is not None:
        size = card if isinstance(card, int) else _size(card)
        words = host.in_words(size) if isinstance(card, int) else card
        return Room(size, ranks or 1, words), ranks or 1
    cards = _cards()
    if cards:
        least = min(cards, key=lambda g: g.total - g.used)
        free = (least.total - least.used) << 20
        return Room(free, len(cards), _words(least)), ranks or len(cards)
    ranks = ranks or devices.CPU_DEFAULT
    memory = host.memory()
    words = f"{host.in_words(memory.available)} of this host's memory"
    return Room(memory.available // ranks, ranks, words, "cpu"), ranks


def _cards() -> list[devices.Gpu]:
    """Return the GPUs that ranks would see, as far as their memory is told."""
    if not devices.gpu_count():
        return []
    cards = devices.gpus()
    shown = devices.visible([g.uuid for g in cards], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [cards[i] for i in shown if cards[i].total]


def _words(card: devices.Gpu) -> str:
    used = f", {host.in_words(card.used << 20)} of it in use" if card.used else ""
    return f"{card.name} ({host.in_words(card.total << 20)}{used})"


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM](?:i?B)?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise PlanError(f"a card's memory is written 16GB or 15.5GiB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
