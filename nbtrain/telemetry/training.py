"""How a rank's training goes: steps, loss, learning rate, batches, seen where torch does them.

The hot paths only count and keep a reference. Twice a second what was counted is written as one
`Training` event; a loss on a GPU is read behind the work (see `nbtrain.late`), and on a TPU after
the step (`nbtrain.lazy`), so that the training gains no synchronisation and no cut in its programs.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from .. import events as ev
from .. import stopping
from ..imports import when_imported
from ..late import LateValues, captures
from ..plan import Call, Cell
from ..writer import EventWriter
from .compiling import Compiling
from .holdings import Holdings
from .hooks import Hooks
from .loaders import Feed
from .losses import Losses
from .timing import ASKED, StepTimes

INTERVAL = 0.5
"""Seconds between two reports."""


class Meter:
    """Counts what a rank does, and reports it. Keeps nothing of the user's alive."""

    def __init__(
        self, writer: EventWriter, rank: int, late: LateValues, task: Call | Cell | None = None
    ) -> None:
        self._writer, self._rank, self._late = writer, rank, late
        self._hooks = Hooks()
        self._losses = Losses(self._hooks, late)
        self._feed = Feed(self._hooks, self._tick)
        self._holdings = Holdings(writer, rank, task)
        self._steps = 0  # rounds of all optimizers: a GAN has two, a new fold a new one
        self._round: set[int] = set()
        self._lr: float | None = None
        self._gpu: int | None = None  # that has what is trained; None: the current one
        self._phases = 0
        self._phase_lock = threading.Lock()
        self._told_phase = self._hooks.harmless(self._phase)
        self._compiling = Compiling(writer, rank, self._told_phase)
        self._times = StepTimes(self._hooks, self._feed, rank) if ASKED in os.environ else None
        self._began: float | None = None
        self._due = 0.0

    def install(self, sources: Collection[str]) -> None:
        """Watch torch, now or when it is imported."""
        if "steps" in sources:
            when_imported("torch.optim.optimizer", self._watch_optimizers)
            if self._times is not None:
                self._times.install()
            self._holdings.install()
        if "loss" in sources:
            self._losses.install()
        if "data" in sources:
            self._feed.install()
        if "phases" in sources:
            when_imported("torch.serialization", self._watch_saving)
            when_imported("safetensors.torch", self._watch_safetensors)
            when_imported("torch._dynamo.callback", self._watch_compiling)
            when_imported("torch_xla.core.xla_model", self._watch_xla)

    def finish(self, wait: bool) -> None:
        """Report the last figures; with `wait`, also what is still on its way."""
        self._hooks.harmless(self._finish)(wait)

    def _finish(self, wait: bool) -> None:
        self._compiling.look()
        if self._times is not None:
            self._times.finish(wait)
        if self._began is not None:
            if wait:
                self._losses.read_last()
            self._late.finish(wait)
            self._report(time.monotonic(), self._losses.last())

    # What torch does

    def _watch_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(self._hooks.harmless(self._on_step))

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._feed.stepped()
        if not self._round or id(optimizer) in self._round:
            self._steps += 1
            self._round = set()
            self._lr = _learning_rate(optimizer)
            if self._steps == 1:
                self._gpu = _gpu_of(optimizer)
            if self._times is not None:
                self._times.stepped(self._gpu)
        self._round.add(id(optimizer))
        self._losses.stepped()
        now = time.monotonic()
        self._tick(now, now)
        self._holdings.stepped(optimizer, now)
        stopping.stepped()

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
            self._told_phase(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._told_phase("")

        setattr(owner, name, around)
        return around

    def _watch_compiling(self, module: ModuleType) -> None:
        handler = getattr(module, "callback_handler", None)  # torch 2.5 and later
        if handler is not None:
            handler.register_start_callback(lambda *_: self._told_phase("compiling"))
            handler.register_end_callback(lambda *_: self._told_phase(""))

    def _watch_xla(self, _module: ModuleType) -> None:
        self._compiling.start()
        self._feed.on_batch = self._compiling.saw

    def _phase(self, phase: str) -> None:
        with self._phase_lock:  # checkpoints are saved in threads, too
            self._phases += 1 if phase else -1
            if self._phases == (1 if phase else 0):  # one save within another is one
                self._writer.write(ev.Phase(time.time(), self._rank, phase))

    # What is told of it

    def _tick(self, began: float, now: float) -> None:
        if self._began is None:
            self._began = began
        if now >= self._due and not _is_capturing():
            self._due = now + INTERVAL
            self._late.deliver()
            self._report(now, self._losses.take())

    def _report(self, now: float, loss: float | None) -> None:
        self._writer.write(
            ev.Training(
                time.time(),
                self._rank,
                steps=self._steps,
                elapsed=now - (self._began or now),
                waited=self._feed.waited,
                samples=self._feed.samples,
                loss=loss,
                lr=self._lr,
                **self._feed.where(),
                **_gpu_memory(self._gpu),
            )
        )


def _is_capturing() -> bool:
    torch = _torch_with_cuda()
    return torch is not None and captures.under_way(torch)


def _gpu_memory(gpu: int | None) -> dict[str, int]:
    torch = _torch_with_cuda()
    if torch is None:
        return {}
    try:
        return {
            "allocated": torch.cuda.memory_allocated(gpu),
            "reserved": torch.cuda.memory_reserved(gpu),
            "peak": torch.cuda.max_memory_allocated(gpu),
        }
    except RuntimeError:  # an allocator of another make keeps no count
        return {}


def _gpu_of(optimizer: Any) -> int | None:
    """Return the first GPU that has parameters of an optimizer's."""
    groups = getattr(optimizer, "param_groups", ())
    parameters = (p for group in groups for p in group["params"])
    return next((p.device.index for p in parameters if p.is_cuda), None)


def _torch_with_cuda() -> Any:
    torch: Any = sys.modules["torch"]
    return torch if torch.cuda.is_initialized() else None


def _learning_rate(optimizer: Any) -> float | None:
    groups = getattr(optimizer, "param_groups", None)
    lr: Any = groups[0].get("lr") if groups else None
    if hasattr(lr, "device"):  # a tensor, on a GPU for a captured step
        return float(lr) if lr.device.type == "cpu" else None
    return float(lr) if isinstance(lr, (int, float)) else None
