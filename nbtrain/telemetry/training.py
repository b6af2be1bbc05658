"""How a rank's training goes: steps, loss, learning rate, batches, seen where torch does them.

The hot paths only count and keep a reference. Twice a second what was counted is written as one
`Training` event; a loss on a GPU is read behind the work (see `nbtrain.late`), so that the training
gains no synchronisation, and on XLA not at all, where reading it would cut the graph.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

from .. import events as ev
from .. import stopping
from ..events import EventWriter
from ..imports import when_imported
from ..late import MOST, LateValues

INTERVAL = 0.5
"""Seconds between two reports."""


Hook = TypeVar("Hook", bound=Callable[..., None])


def _harmless(hook: Hook) -> Hook:
    """Let nothing out of a hook into the user's step: at its first error, telemetry stops.

    Nor does it run in a process that the rank forked: that one is not the rank.
    """

    @functools.wraps(hook)
    def guarded(self: Meter, *args: Any) -> None:
        if self.broken or os.getpid() != self.pid:
            return
        try:
            hook(self, *args)
        except Exception as error:  # tensors and samplers of any kind may raise anything
            self.broken = True
            said = f"{type(error).__name__}: {error}"
            print(f"nbtrain: telemetry stopped ({said}); the training goes on", file=sys.stderr)

    return cast("Hook", guarded)


class Place(NamedTuple):
    """Where a loader stands: its data set, the number of this pass, batches so far and in all."""

    data: int
    number: int
    batch: int
    batches: int | None


class Meter:
    """Counts what a rank does, and reports it. Keeps nothing of the user's alive."""

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._late = LateValues()
        self.broken, self.pid = False, os.getpid()
        self._steps = 0  # rounds of all optimizers: a GAN has two, a new fold a new one
        self._round: set[int] = set()
        self._lr: float | None = None
        self._loss: Any = None  # the last one on a GPU, detached: for the end
        self._loss_due = 0.0
        self._loss_value: float | None = None
        self._told_loss: float | None = None
        self._quiet = False  # while Accelerate does with the loss what it does
        self._product: Callable[[], Any] = lambda: None  # a scaled loss: not the loss
        self._iterator: Callable[[], Any] = lambda: None
        self._number = 0  # of passes over any data
        self._place: Place | None = None  # of the last batch
        self._feeding: Place | None = None  # of the last one before a step
        self._epochs: dict[int, tuple[int, int]] = {}  # by data set: passes that fed, the last
        self._phases = 0
        self._began: float | None = None
        self._waited = 0.0
        self._samples: int | None = None
        self._due = 0.0

    def install(self, sources: Collection[str]) -> None:
        """Watch torch, now or when it is imported."""
        if "steps" in sources:
            when_imported("torch.optim.optimizer", self._watch_optimizers)
        if "loss" in sources:
            when_imported("torch", self._watch_backward)
            when_imported("accelerate.accelerator", self._watch_accelerate)
            when_imported("torch.amp.grad_scaler", self._watch_scaler)
        if "data" in sources:
            when_imported("torch.utils.data.dataloader", self._watch_loaders)
        if "phases" in sources:
            when_imported("torch.serialization", self._watch_saving)
            when_imported("safetensors.torch", self._watch_safetensors)
            when_imported("torch._dynamo.callback", self._watch_compiling)

    @_harmless
    def finish(self, wait: bool) -> None:
        """Report the last figures; with `wait`, also what is still on its way."""
        if self._began is not None:
            if wait and self._loss is not None:
                self._late.submit({"loss": self._loss}, self._take_loss)
            self._late.deliver(at_least=MOST if wait else 0)
            last = self._told_loss if self._loss_value is None else self._loss_value
            self._report(time.monotonic(), last)

    # What torch does

    def _watch_optimizers(self, module: ModuleType) -> None:
        def stepped(*args: Any) -> None:
            self._on_step(*args)
            stopping.at_boundary()

        module.register_optimizer_step_post_hook(stepped)

    @_harmless
    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._round or id(optimizer) in self._round:
            self._steps += 1
            self._round = set()
            self._lr = _learning_rate(optimizer)
        self._round.add(id(optimizer))
        place = self._place
        if place is not None and place is not self._feeding:
            self._feeding = place
            passes, number = self._epochs.get(place.data, (0, -1))
            if number != place.number:
                self._epochs[place.data] = passes + 1, place.number
        self._tick(time.monotonic())

    def _watch_backward(self, torch: ModuleType) -> None:
        meter, original = self, torch.Tensor.backward

        @functools.wraps(original)
        def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not meter._quiet and self is not meter._product():
                meter._saw_loss(self)
            return original(self, *args, **kwargs)

        torch.Tensor.backward = backward

    def _watch_accelerate(self, module: ModuleType) -> None:
        """Accelerate divides the loss by the accumulation's steps before it goes backward."""
        original = module.Accelerator.backward

        @functools.wraps(original)
        def backward(accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._saw_loss(loss)
            self._quiet = True
            try:
                return original(accelerator, loss, *args, **kwargs)
            finally:
                self._quiet = False

        module.Accelerator.backward = backward

    def _watch_scaler(self, module: ModuleType) -> None:
        """A scaler multiplies the loss, and backward is called on the product."""
        scale = module.GradScaler.scale

        @functools.wraps(scale)
        def scaling(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if not self._quiet and hasattr(outputs, "detach"):
                self._saw_loss(outputs)
                self._product = weakref.ref(scaled)
            return scaled

        module.GradScaler.scale = scaling

    @_harmless
    def _saw_loss(self, loss: Any) -> None:
        """Take note of a loss: now, since who made it may change it in place."""
        torch = sys.modules["torch"]
        ordinary = type(loss) in (torch.Tensor, torch.nn.Parameter) and loss.is_floating_point()
        if not ordinary or loss.ndim:
            return
        if loss.device.type == "cpu":
            self._loss_value = loss.item()
        elif loss.device.type == "cuda":  # XLA's graph would be cut, others would be waited for
            self._loss = loss.detach()
            now = time.monotonic()
            if now >= self._loss_due and not _is_capturing():
                self._loss_due = now + INTERVAL
                self._late.submit({"loss": self._loss}, self._take_loss)

    def _watch_loaders(self, module: ModuleType) -> None:
        iterator = module._BaseDataLoaderIter  # seen in torch 2.4 to 2.13
        original = iterator.__next__

        @functools.wraps(original)
        def next_batch(it: Any) -> Any:
            start = time.monotonic()
            batch = original(it)
            self._on_batch(it, batch, start)
            return batch

        iterator.__next__ = next_batch

    @_harmless
    def _on_batch(self, iterator: Any, batch: Any, start: float) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = start
        self._waited += now - start
        known, count = self._place, iterator._num_yielded
        if known is None or count == 1 or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._number += 1
            known = Place(id(iterator._dataset), self._number, count, _length(iterator))
        self._place = known._replace(batch=count)
        size = _batch_size(batch)
        if size is not None:
            self._samples = (self._samples or 0) + size
        self._tick(now)

    def _watch_saving(self, module: ModuleType) -> None:
        torch_save = self._phase_around(module, "save", "saving")
        when_imported("torch", lambda torch: setattr(torch, "save", torch_save))

    def _watch_safetensors(self, module: ModuleType) -> None:
        self._phase_around(module, "save_file", "saving")

    def _phase_around(self, owner: Any, name: str, phase: str) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, io.BytesIO) for a in (*args, *kwargs.values())):  # a pickle
                return original(*args, **kwargs)
            self._phase(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._phase("")

        setattr(owner, name, around)
        return around

    def _watch_compiling(self, module: ModuleType) -> None:
        handler = getattr(module, "callback_handler", None)  # torch 2.5 and later
        if handler is not None:
            handler.register_start_callback(lambda *_: self._phase("compiling"))
            handler.register_end_callback(lambda *_: self._phase(""))

    @_harmless
    def _phase(self, phase: str) -> None:
        self._phases += 1 if phase else -1
        if self._phases == (1 if phase else 0):  # one save within another is one
            self._writer.write(ev.Phase(time.time(), self._rank, phase))

    # What is told of it

    def _tick(self, now: float) -> None:
        if self._began is None:
            self._began = now
        if now >= self._due and not _is_capturing():
            self._due = now + INTERVAL
            self._late.deliver()
            self._report(now, self._loss_value)

    def _take_loss(self, values: dict[str, Any]) -> None:
        self._loss_value = float(values["loss"])

    def _report(self, now: float, loss: float | None) -> None:
        if loss is not None:  # told once: what stands still is no new point of a curve
            self._told_loss, self._loss_value = loss, None
        place = self._feeding or self._place
        where: dict[str, Any] = {}
        if place is not None:
            epoch = self._epochs.get(place.data, (None,))[0]
            where = {"epoch": epoch, "batch": place.batch, "batches": place.batches}
        self._writer.write(
            ev.Training(
                time.time(),
                self._rank,
                steps=self._steps,
                elapsed=now - (self._began or now),
                waited=self._waited,
                samples=self._samples,
                loss=loss,
                lr=self._lr,
                **where,
                **_gpu_memory(),
            )
        )


def _length(iterator: Any) -> int | None:
    """Return how many batches a loader will give; None where nobody knows."""
    try:
        return len(iterator) if iterator._dataset_kind == 0 else None
    except Exception:  # a sampler without a length, or with one of its own making
        return None


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded: no event may be asked for then."""
    torch = _torch_with_cuda()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def _gpu_memory() -> dict[str, int]:
    torch = _torch_with_cuda()
    if torch is None:
        return {}
    try:
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
        }
    except RuntimeError:  # an allocator of another make keeps no count
        return {}


def _torch_with_cuda() -> Any:
    torch: Any = sys.modules["torch"]
    return torch if torch.cuda.is_initialized() else None


def _learning_rate(optimizer: Any) -> float | None:
    groups = getattr(optimizer, "param_groups", None)
    lr: Any = groups[0].get("lr") if groups else None
    if hasattr(lr, "device"):  # a tensor, on a GPU for a captured step
        return float(lr) if lr.device.type == "cpu" else None
    return float(lr) if isinstance(lr, (int, float)) else None


def _batch_size(batch: Any) -> int | None:
    """Return how many samples a batch holds, where its first tensor tells."""
    for _ in range(4):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
        if isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        elif hasattr(batch, "values") and hasattr(batch, "keys"):
            batch = next(iter(batch.values()), None)
        else:
            return None
    return None
