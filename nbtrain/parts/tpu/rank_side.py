"""What torch_xla needs in a rank beside its engine: variables, late scalars, compilations."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from ...part_api import Plan, RankContext, RankSide, hooks, when_imported
from ...worker import device_scalars, limits
from ...worker.device_scalars import Then
from . import xla
from .compilation import CompilationMeter
from .other_ranks import refuse_launches

_Pending = list[tuple[Mapping[str, Any], Then]]


class XlaRank(RankSide):
    """Watches torch_xla, where the rank imports it."""

    can_rescue = False  # to read weights would compile what never ran
    compilation: CompilationMeter | None = None

    def begin(self, context: RankContext) -> None:
        """Set torch_xla's variables, read scalars of XLA devices late, and report compilations."""
        if context.job is context.process_job:
            set_variables(context.job.plan)
        refuse_launches()
        device_scalars.READERS["xla"] = XlaScalars
        job, writer = context.job, context.writer
        if "phases" in job.plan.telemetry:
            compilation = CompilationMeter(writer, context.rank, job.ranks_stay)
            self.compilation = compilation

            def watch(_module: object) -> None:
                compilation.start()
                hooks.add(compilation)

            when_imported("torch_xla.core.xla_model", watch)

    def finish_task(self, context: RankContext) -> None:
        if context.job.ranks_stay:  # its engine does so at the end of other ranks
            xla.finish()


def set_variables(plan: Plan) -> None:
    """Set the variables that make torch_xla compute on a TPU, in the plan's precision.

    Accelerate sets those of the precision when an Accelerator is made. But torch_xla reads them
    once, at the first float tensor, and Accelerate takes ``ACCELERATE_DOWNCAST_BF16=false`` for a
    yes. The plan's own variables stay.
    """
    # transformers takes it, beside torch_xla, for torchrun on another maker's chips.
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    asked = os.environ.get("ACCELERATE_DOWNCAST_BF16", "").lower() in ("1", "true", "yes", "on")
    downcast = plan.downcast_bf16 or asked
    variables = {"ACCELERATE_DOWNCAST_BF16": "true" if downcast else ""}
    if plan.mixed_precision == "bf16":
        variables["XLA_USE_BF16"] = str(int(not downcast))
        variables["XLA_DOWNCAST_BF16"] = str(int(downcast))
    os.environ.update({**variables, **plan.env})


class XlaScalars:
    """Reads scalars on XLA devices; calls `then` with each group's, in the order of `submit`.

    torch_xla only records operations, until ``torch_xla.sync()`` ends a step; reading a
    value earlier would cut the step's program in two. So values wait until a step has ended. Then a
    thread reads all of them at once, at most twice per second. It lives as long as there is
    something to read.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Pending] = {}  # by device: each has its own steps
        self._observed: set[str] = set()
        self._due = 0.0
        self._ended: queue.SimpleQueue[_Pending] = queue.SimpleQueue()
        self._reading = threading.Lock()

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Have scalar tensors of one device read after the step that is under way.

        If too many wait, all of the device are read at once, in this thread, which computes what is
        pending. `then` is called in the thread that reads.
        """
        device = str(next(iter(tensors.values())).device)
        waiting = self._waiting.setdefault(device, [])
        waiting.append(({name: tensor.detach() for name, tensor in tensors.items()}, then))
        if len(waiting) >= limits.MAX_PENDING_SCALARS:
            # In this thread: computing values in another thread while this one records
            # operations has aborted the process.
            self._ended.put(self._waiting.pop(device))
            self._read()
        elif device not in self._observed and time.monotonic() >= self._due:
            self._observed.add(device)
            xla.after_step(self._step_ended, device)

    def _step_ended(self, device: str) -> None:
        """Have the scalars of a device read, as its step has ended."""
        self._observed.discard(device)
        self._due = time.monotonic() + limits.REPORT_INTERVAL_S
        self._ended.put(self._waiting.pop(device, []))
        if not self._reading.locked():
            self._start_reader()

    def _start_reader(self) -> threading.Thread:
        reader = threading.Thread(target=self._read, name="nbtrain-values", daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        """Read the scalars of steps that ended, and call `then` with each group's values.

        One thread reads at a time; another one waits.
        """
        # A device in trouble raises RuntimeErrors; the training meets the same ones itself.
        with self._reading, contextlib.suppress(RuntimeError, queue.Empty):
            while True:
                groups = self._ended.get_nowait()
                tensors = [tensor for group, _ in groups for tensor in group.values()]
                values = iter(xla.on_cpu(tensors))
                for group, then in groups:
                    then({name: next(values).item() for name in group})

    def finish(self, wait: bool) -> None:
        """Have the values that still wait read in a thread, and wait for that.

        Without `wait`, wait 0.5 s at most.
        """
        for device in list(self._waiting):
            self._ended.put(self._waiting.pop(device))
        if not self._ended.empty() or self._reading.locked():
            self._start_reader().join(None if wait else limits.REPORT_INTERVAL_S)
