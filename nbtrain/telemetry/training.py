"""How a rank's training goes: steps, loss, learning rate, batches, seen where torch does them.

The hot paths only count and keep a reference. Twice a second what was counted is written as one
`Training` event; a loss on a GPU is read behind the work (see `nbtrain.late`), so that the training
gains no synchronisation, and on XLA not at all, where reading it would cut the graph.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from .. import events as ev
from ..events import EventWriter
from ..imports import when_imported
from ..late import LateValues

INTERVAL = 0.5
"""Seconds between two reports."""


class Meter:
    """Counts what a rank does, and reports it."""

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._late = LateValues()
        self._steps: dict[int, int] = {}  # by optimizer: a GAN has two
        self._optimizer: Any = None
        self._loss: Any = None  # a detached tensor; read late
        self._loss_value: float | None = None
        self._quiet = False  # while Accelerate does with the loss what it does
        self._product: Callable[[], Any] = lambda: None  # a scaled loss: not the loss
        self._passes: dict[int, int] = {}  # by data set: how often a pass over it has begun
        self._batch: Any = None  # the iterator that gave the last batch
        self._feeding: Any = None  # the one that gave the last batch before a step
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

    def finish(self) -> None:
        """Report the last figures; wait for what is still on its way."""
        if self._began is not None:
            self._read_loss()
            self._late.finish()
            self._report(time.monotonic())

    # What torch does

    def _watch_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._batch is not None:
            self._feeding = self._batch
        self._tick()

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

    def _saw_loss(self, loss: Any) -> None:
        if getattr(loss, "ndim", 1) == 0 and loss.device.type != "xla":
            self._loss = loss.detach()

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

    def _on_batch(self, iterator: Any, batch: Any, start: float) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = start
        self._waited += now - start
        self._batch = iterator
        if iterator._num_yielded == 1:
            key = id(iterator._dataset)
            self._passes[key] = self._passes.get(key, 0) + 1
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

    def _phase(self, phase: str) -> None:
        self._writer.write(ev.Phase(time.time(), self._rank, phase))

    # What is told of it

    def _tick(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        if self._began is None:
            self._began = now
        if now >= self._due and not _is_capturing():
            self._due = now + INTERVAL
            self._read_loss()
            self._late.deliver()
            self._report(now)

    def _read_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is None:
            return
        if loss.device.type == "cuda":
            self._late.submit({"loss": loss}, self._take_loss)
        else:
            self._take_loss({"loss": loss.item()})

    def _take_loss(self, values: dict[str, Any]) -> None:
        self._loss_value = float(values["loss"])

    def _report(self, now: float) -> None:
        feeding = self._feeding if self._feeding is not None else self._batch
        self._writer.write(
            ev.Training(
                time.time(),
                self._rank,
                steps=max(self._steps.values(), default=0),
                elapsed=now - (self._began or now),
                waited=self._waited,
                samples=self._samples,
                loss=self._loss_value,
                lr=_learning_rate(self._optimizer),
                **self._position(feeding),
                **_gpu_memory(),
            )
        )

    def _position(self, iterator: Any) -> dict[str, int | None]:
        if iterator is None:
            return {}
        try:
            total = len(iterator) if iterator._dataset_kind == 0 else None
        except (TypeError, AttributeError, NotImplementedError):  # a sampler without a length
            total = None
        return {
            "epoch": self._passes.get(id(iterator._dataset)),
            "batch": iterator._num_yielded,
            "batches": total,
        }


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded: no event may be asked for then."""
    torch = _torch_with_cuda()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def _gpu_memory() -> dict[str, int]:
    torch = _torch_with_cuda()
    if torch is None:
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }


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
