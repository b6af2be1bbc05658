"""How long each optimizer step took a rank, and how much of it was waiting: for a scaling report.

Asked for by `ASKED` in the ranks' environment; what was seen is written when the training is over.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..folder import RunFolder
from ..imports import when_imported
from ..late import captures
from .hooks import Hooks
from .loaders import Feed

ASKED = "NBTRAIN_STEP_TIMES"
"""Set in the environment of ranks that are to write what each step took."""

EVERY = {"cpu": 1, "cuda": 10}
"""DDP measures each so many-th backward pass: on a GPU that costs a synchronisation."""

_ENDS = "backward_compute_time_end", "backward_comm_time_end"
_SPANS = "backward_comm_time", "backward_compute_comm_overlap_time"


@dataclass
class _Passes:
    """The backward passes of DDP in a step: how many, of how many the waiting is told, how long."""

    begun: int = 0
    told: int = 0
    exposed: float = 0.0


class StepTimes:
    """Notes a row for each step: when it ended, and what had been waited and fed by then.

    How long a backward pass waited for DDP's collectives is DDP's own measure (`_exposed`), told
    when the next pass begins; several of a step (gradients that are accumulated) add up. Other
    collectives are timed where Python waits for them, which on a GPU says nothing: there they are
    left out.
    """

    def __init__(self, hooks: Hooks, feed: Feed, rank: int) -> None:
        self._path = RunFolder(Path(os.environ["NBTRAIN_RUN"])).steps(rank)
        self._hooks, self._feed = hooks, feed
        self._rows: list[list[Any]] = []
        self._events: list[Any] = []  # of CUDA: the host is ahead of the GPU
        self._told: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._before, self._now = _Passes(), _Passes()  # of the last step, and of this one
        self._begun: set[int] = set()  # who began one in this step
        self._has_ddp = False
        self._waited = 0.0  # in collectives, in this step
        self._joined = 1
        self._is_blind = False

    def install(self) -> None:
        """Watch torch's collectives, now or when they are imported."""
        when_imported("torch.distributed.distributed_c10d", self._watch_waits)
        when_imported("torch.nn.parallel.distributed", self._watch_ddp)

    def stepped(self, gpu: int | None = None) -> None:
        """Take note that a step has ended, on a GPU: on the current one unless it is named."""
        now = time.monotonic()
        torch = sys.modules["torch"]
        on_gpu = torch.cuda.is_initialized()
        before = self._before
        # On a GPU some are measured: a step of which others were not says nothing.
        if self._rows and before.told and not (on_gpu and before.told < before.begun):
            self._rows[-1][3] = before.exposed + (self._rows[-1][3] or 0.0)
        self._before, self._now = self._now, _Passes()
        self._begun.clear()
        dist = sys.modules.get("torch.distributed")
        if self._joined == 1 and dist is not None and dist.is_available() and dist.is_initialized():
            self._joined = dist.get_world_size()
        waited = None if on_gpu or self._is_blind else self._waited
        self._rows.append([now, self._feed.waited, self._feed.samples, waited])
        self._waited = 0.0
        if on_gpu and not captures.under_way(torch):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(gpu))
            self._events.append(event)

    def finish(self, wait: bool) -> None:
        """Write what was seen; without `wait`, the GPU may never be done: nothing."""
        if not wait:
            return
        if self._has_ddp and self._rows:
            self._rows[-1][3] = None  # no pass came after it
        if self._events and len(self._events) == len(self._rows):
            self._events[-1].synchronize()
            for row, event in zip(self._rows, self._events, strict=True):
                row[0] = self._events[0].elapsed_time(event) / 1e3
        said = {"rows": self._rows, "joined": self._joined, "gpu": bool(self._events)}
        self._path.write_text(json.dumps(said))

    def _began_pass(self, ddp: Any) -> None:
        """Take note that a pass begins, and of what the one before it is told to have waited."""
        if not (sys.modules["torch"].is_grad_enabled() and ddp.require_backward_grad_sync):
            return  # nothing is exchanged
        step = self._now if id(ddp) in self._begun else self._before
        exposed = self._exposed(ddp)
        if exposed is not None:
            step.told += 1
            step.exposed += exposed
        self._begun.add(id(ddp))
        self._now.begun += 1

    def _exposed(self, ddp: Any) -> float | None:
        """Return the seconds that the last backward pass told of waited for collectives, if new.

        From the end of what it computed to the end of what it sent.
        """
        data = ddp._get_ddp_logging_data()
        ends = tuple(data.get(name, 0) for name in (*_ENDS, *_SPANS))
        if ends == self._told.get(ddp):
            return None
        self._told[ddp] = ends
        return float(max(0, ends[2] - ends[3]) / 1e9)

    def _watch_ddp(self, module: ModuleType) -> None:
        cls = module.DistributedDataParallel
        original, saw = cls.__init__, self._hooks.harmless(self._saw_ddp)

        @functools.wraps(original)
        def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            saw(ddp)

        cls.__init__ = made
        if hasattr(cls, "_pre_forward"):
            begins, began = cls._pre_forward, self._hooks.harmless(self._began_pass)

            @functools.wraps(begins)
            def pre_forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
                found = begins(ddp, *args, **kwargs)  # here DDP settles what the last pass took
                began(ddp)
                return found

            cls._pre_forward = pre_forward

    def _saw_ddp(self, ddp: Any) -> None:
        # Private, seen in torch 2.13; a test notices when it moves.
        private = "_set_ddp_runtime_logging_sample_rate", "_pre_forward"
        if not all(hasattr(ddp, name) for name in private):
            self._is_blind = True
            return
        ddp._set_ddp_runtime_logging_sample_rate(EVERY.get(ddp.device_type or "", 10))
        self._has_ddp = True

    def _watch_waits(self, module: ModuleType) -> None:
        work = module.Work  # what C++ gives to Python: DDP's backward pass does not come by
        work.wait = self._timed(work.wait)
        dist = sys.modules.get("torch.distributed")
        if hasattr(dist, "_broadcast_coalesced"):  # of DDP's buffers, before a forward pass
            dist._broadcast_coalesced = self._timed(dist._broadcast_coalesced)  # type: ignore

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                if threading.current_thread() is threading.main_thread():
                    self._waited += time.monotonic() - began

        return timed
