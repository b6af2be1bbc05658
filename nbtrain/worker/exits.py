"""Says where a rank's code leaves its process: by `sys.exit`, which is an exception, or `os._exit`,
after which nothing of Python runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ..system import instrumentation, source_files
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from ..transport import exceptions


def report_os_exit(rank: int, writer: EventWriter) -> None:
    """Report a call of `os._exit` in this process, of code that is not nbtrain's own."""
    process = os.getpid()

    def leave(original: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # an argument that is no number: os._exit says so
            caller = _caller(sys._getframe())
            if os.getpid() == process and not source_files.is_own(caller.f_code.co_filename):
                code = int(*args, *kwargs.values())
                error = f"os._exit({code}){_at(_user_frame(caller))}"
                writer.write(ev.Failing(clock.now(), rank, error=error))
        return original(*args, **kwargs)

    instrumentation.patch("os", "_exit", leave)


def describe_sys_exit(leaving: SystemExit) -> str:
    """Return ``sys.exit(3) at In[2], line 4``."""
    frames = exceptions.capture(leaving, pickles=False).frames
    place = next((f for f in reversed(frames) if not f.is_library), None)
    at = "" if place is None else _named(place.filename, place.line)
    return f"sys.exit({leaving.code!r}){at}"


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that made the call which is patched."""
    own = (__file__, instrumentation.__file__)
    while frame.f_code.co_filename in own and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and source_files.is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _at(frame: FrameType | None) -> str:
    return "" if frame is None else _named(frame.f_code.co_filename, frame.f_lineno)


def _named(filename: str, line: int) -> str:
    return f" at {source_files.cell_name(filename) or Path(filename).name}, line {line}"
