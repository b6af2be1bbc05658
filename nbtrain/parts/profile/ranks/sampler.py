"""Notes which line of the user's code the training thread is in, while steps are recorded.

The profiler's own stacks slow Python down several times. A sample takes 10 µs.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from ....part_api import is_library
from ..reading.trace import Sample


class Sampler:
    """Takes samples of the thread that starts it, from another thread."""

    def __init__(self, interval_s: float, most: int) -> None:
        self._interval_s, self._most = interval_s, most
        self.samples: list[Sample] = []
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._libraries: dict[str, bool] = {}
        self._switch_s: float | None = None
        """How often Python switches threads, without samples."""

    def start(self) -> None:
        """Begin new samples."""
        if self._switch_s is None:
            self._switch_s = sys.getswitchinterval()
            # By default, a thread that only runs Python is not stopped for 5 ms: most samples would
            # be of the lines that release the lock of Python.
            sys.setswitchinterval(min(self._switch_s, self._interval_s / 10))
        self.samples, self._is_over = [], threading.Event()
        arguments = threading.get_ident(), self.samples, self._is_over
        try:
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="nbtrain-sampler", daemon=True
            )
            self._thread.start()
        except RuntimeError:  # the process cannot start a thread: no line is known
            self._thread = None

    def stop(self) -> None:
        """End the samples."""
        self._is_over.set()
        if self._switch_s is not None:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = None

    def _run(self, thread: int, samples: list[Sample], is_over: threading.Event) -> None:
        while len(samples) < self._most and not is_over.wait(self._interval_s):
            line = self._find_line(sys._current_frames().get(thread))
            if line:
                samples.append(Sample(time.time_ns(), line))

    def _find_line(self, frame: FrameType | None) -> str:
        """Return the innermost line of the user's code, as ``file:number``; "" without one."""
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._libraries:
                self._libraries[file] = is_library(file)
            if not self._libraries[file]:
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
