"""How long each optimizer step took a rank, and how much of it was waiting: for a scaling report.

For the runs of a comparison (`Plan.scaling`); the file is written when the training is over.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...system.instrumentation import patch
from ...tracking.run_folder import RunFolder
from ..device_scalars import captures
from .data_loading import DataLoadingMeter
from .safe_hooks import telemetry

EVERY = {"cpu": 1, "cuda": 10}
"""DDP measures every n-th backward pass, by device: on a GPU that costs a synchronisation."""

_ENDS = "backward_compute_time_end", "backward_comm_time_end"
_SPANS = "backward_comm_time", "backward_compute_comm_overlap_time"


@dataclass
class _BackwardPasses:
    """DDP's backward passes in one step."""

    begun: int = 0
    measured: int = 0
    """How many of them DDP has measured."""
    exposed: float = 0.0
    """Seconds that these waited for collectives."""


class StepTimer:
    """Adds a row per step: when it ended, and what had been waited and fed by then.

    How long a backward pass waited for DDP's collectives is DDP's own measure (`_exposed`), which
    it gives when the next pass begins; the passes of a step (accumulated gradients) add up. Other
    collectives are timed where Python waits for them. On a GPU that time means nothing, and is
    left out.
    """

    def __init__(self, loading: DataLoadingMeter, rank: int) -> None:
        self._path = RunFolder(Path(os.environ["NBTRAIN_RUN"])).steps(rank)
        self._loading = loading
        self._rows: list[list[Any]] = []
        self._events: list[Any] = []  # of CUDA: the host is ahead of the GPU
        self._measures = weakref.WeakKeyDictionary[Any, tuple[int, ...]]()
        self._before, self._now = _BackwardPasses(), _BackwardPasses()  # last step's, this step's
        self._begun: set[int] = set()  # the DDP models that began a pass in this step
        self._has_ddp = False
        self._waited = 0.0  # in collectives, in this step
        self._world_size = 1
        self._is_blind = False

    def install(self) -> None:
        """Watch torch's collectives, now or when they are imported."""
        # What C++ gives to Python; DDP's backward pass does not call it.
        patch("torch.distributed.distributed_c10d:Work", "wait", self._timed)
        # Of DDP's buffers, before a forward pass.
        patch("torch.distributed", "_broadcast_coalesced", self._timed)
        ddp = "torch.nn.parallel.distributed:DistributedDataParallel"
        patch(ddp, "__init__", self._ddp_init)
        patch(ddp, "_pre_forward", self._ddp_pre_forward)

    def stepped(self, gpu: int | None = None) -> None:
        """Add the row of a step that has ended on a GPU, by default the current one."""
        now = time.monotonic()
        torch = sys.modules["torch"]
        on_gpu = torch.cuda.is_initialized()
        before = self._before
        # On a GPU some passes are measured: a step with others says nothing.
        if self._rows and before.measured and not (on_gpu and before.measured < before.begun):
            self._rows[-1][3] = before.exposed + (self._rows[-1][3] or 0.0)
        self._before, self._now = self._now, _BackwardPasses()
        self._begun.clear()
        dist = sys.modules.get("torch.distributed")
        if self._world_size == 1 and dist and dist.is_available() and dist.is_initialized():
            self._world_size = dist.get_world_size()
        waited = None if on_gpu or self._is_blind else self._waited
        self._rows.append([now, self._loading.waited, self._loading.samples, waited])
        self._waited = 0.0
        if on_gpu and not captures.under_way(torch):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(gpu))
            self._events.append(event)

    def finish(self, wait: bool) -> None:
        """Write the rows; without `wait` nothing, since the GPU may never be done."""
        if not wait:
            return
        if self._has_ddp and self._rows:
            self._rows[-1][3] = None  # no pass came after it
        if self._events and len(self._events) == len(self._rows):
            self._events[-1].synchronize()
            for row, event in zip(self._rows, self._events, strict=True):
                row[0] = self._events[0].elapsed_time(event) / 1e3
        steps = {"rows": self._rows, "joined": self._world_size, "gpu": bool(self._events)}
        self._path.write_text(json.dumps(steps))

    @telemetry
    def _begin_pass(self, ddp: Any) -> None:
        """Count a pass that begins, and take DDP's measure of the one before it."""
        if not (sys.modules["torch"].is_grad_enabled() and ddp.require_backward_grad_sync):
            return  # nothing is exchanged
        step = self._now if id(ddp) in self._begun else self._before
        exposed = self._exposed(ddp)
        if exposed is not None:
            step.measured += 1
            step.exposed += exposed
        self._begun.add(id(ddp))
        self._now.begun += 1

    def _exposed(self, ddp: Any) -> float | None:
        """Return the seconds that the last measured pass waited for collectives; None if not new.

        They last from the end of what it computed to the end of what it sent.
        """
        data = ddp._get_ddp_logging_data()
        measure = tuple(data.get(name, 0) for name in (*_ENDS, *_SPANS))
        if measure == self._measures.get(ddp):
            return None
        self._measures[ddp] = measure
        return float(max(0, measure[2] - measure[3]) / 1e9)

    def _ddp_init(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        self._measure_ddp(ddp)

    def _ddp_pre_forward(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = original(ddp, *args, **kwargs)  # here DDP settles what the last pass took
        self._begin_pass(ddp)
        return inputs

    @telemetry
    def _measure_ddp(self, ddp: Any) -> None:
        # Private, seen in torch 2.13; a test notices when it moves.
        private = "_set_ddp_runtime_logging_sample_rate", "_pre_forward"
        if not all(hasattr(ddp, name) for name in private):
            self._is_blind = True
            return
        ddp._set_ddp_runtime_logging_sample_rate(EVERY.get(ddp.device_type or "", 10))
        self._has_ddp = True

    def _timed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            if threading.current_thread() is threading.main_thread():
                self._waited += time.monotonic() - began
