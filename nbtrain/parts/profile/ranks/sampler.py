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
        self._usual_switch_s = self._switch_s = 0.0
        """How often Python switches threads, without samples and with them."""

    def start(self) -> None:
        """Begin new samples."""
        self.samples, self._is_over = [], threading.Event()
        arguments = threading.get_ident(), self.samples, self._is_over
        try:
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="nbtrain-sampler", daemon=True
            )
            self._switch_often()
            self._thread.start()
        except RuntimeError:  # the process cannot start a thread: no line is known
            self._thread = None
            self._switch_as_usual()

    def stop(self) -> None:
        """End the samples."""
        self._is_over.set()
        self._switch_as_usual()

    def _run(self, thread: int, samples: list[Sample], is_over: threading.Event) -> None:
        """Take samples until they are ended, or there are enough."""
        while len(samples) < self._most and not is_over.wait(self._interval_s):
            line = self._find_line(sys._current_frames().get(thread))
            if line:
                samples.append(Sample(time.time_ns(), line))
        if self.samples is samples:
            self._switch_as_usual()

    def _switch_often(self) -> None:
        """Have Python stop a thread that only runs Python sooner than after 5 ms.

        Else most samples would be of the lines that release the lock of Python.
        """
        self._usual_switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._usual_switch_s, self._interval_s / 10))
        self._switch_s = sys.getswitchinterval()

    def _switch_as_usual(self) -> None:
        """Undo that, if the training has not set its own time."""
        if sys.getswitchinterval() == self._switch_s:
            sys.setswitchinterval(self._usual_switch_s)
        self._switch_s = 0.0

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
