"""Reports that JAX compiles, or that TensorFlow traces, as the phase "compiling"."""

from __future__ import annotations

import contextlib
import threading
from types import ModuleType
from typing import Any

from ....part_api import hooks, patch
from ....tracking.limits import TIMELINE_BIN_S


def watch_jax(module: ModuleType, *_: object) -> None:
    """Watch what compiles a program, or reads it from the cache. Private; seen in JAX 0.10."""
    patch(module, "compile_or_get_cached", _compile)


def watch_tensorflow(module: ModuleType, *_: object) -> None:
    """Watch what traces a ``tf.function``. Private; seen in TensorFlow 2.21.

    XLA compiles later, inside the program's first call, without a notification.
    """
    patch(module, "_create_concrete_function", _compile)


def _compile(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call JAX's compiler or TensorFlow's tracer, and return its result.

    Reports the phase "compiling" if the call takes longer than 0.2 s, a bin of the timeline: JAX
    compiles each operation outside of `jit`.
    """
    compiling = _Compiling()
    try:
        return original(*args, **kwargs)
    finally:
        compiling.end()


class _Compiling:
    """Something that is being compiled, and is reported if it lasts."""

    def __init__(self) -> None:
        self._is_over = self._is_reported = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(TIMELINE_BIN_S, self._report)
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # this process cannot start a thread
            self._timer.start()

    def _report(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_reported = True
                hooks.notify.on_phase("compiling")

    def end(self) -> None:
        """End the phase, if it was reported."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._is_reported:
                hooks.notify.on_phase("")
