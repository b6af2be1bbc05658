"""Reports what a rank does between steps: it joins the others, compiles, or saves."""

from __future__ import annotations

import threading
from functools import partial
from types import ModuleType
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from ...system.safe_hooks import telemetry
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter


class PhaseMeter:
    """Reports when a phase begins and ends; one within another counts once."""

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._open = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Watch torch and safetensors, now or when they are imported."""
        patch("torch.serialization", "_save", self._save)  # not of a tensor that is pickled
        patch("safetensors.torch", "save_file", self._save)
        for owner in ("torch.distributed.distributed_c10d", "torch.distributed"):
            patch(owner, "init_process_group", self._join)
        when_imported("torch._dynamo.callback", self._watch_compiler)

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._during("saving", original, *args, **kwargs)

    def _join(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._during(ev.JOINING, original, *args, **kwargs)

    def _during(self, phase: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.report(phase)
        try:
            return original(*args, **kwargs)
        finally:
            self.report("")

    def _watch_compiler(self, module: ModuleType) -> None:
        handler = getattr(module, "callback_handler", None)  # torch 2.5 and later
        if handler is not None:
            for name, phase in (("start", "compiling"), ("end", "")):
                report = partial(self._report_of_compiler, phase)
                getattr(handler, f"register_{name}_callback")(report)
                undo_later(partial(getattr(handler, f"remove_{name}_callback"), report))

    def _report_of_compiler(self, phase: str, *_: Any) -> None:
        self.report(phase)

    @telemetry
    def report(self, phase: str) -> None:
        """Report that a phase begins, or with "" that one has ended."""
        with self._lock:  # checkpoints are saved in threads, too
            self._open += 1 if phase else -1
            if self._open == (1 if phase else 0):
                self._writer.write(ev.Phase(clock.now(), self._rank, phase))
