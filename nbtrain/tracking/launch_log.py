"""Writes nbtrain's log: what the launcher decides and why, for bug reports.

The logger is ``nbtrain.launcher``, which is silent outside of launches. During a launch, records
from INFO on are written to the run's ``launcher.log``. ``NBTRAIN_LOG=debug`` (or info, warning)
also prints them to stderr, and the handlers of the logger ``nbtrain`` get the records that it is
enabled for. It never logs values of environment variables, arguments of the user and texts of
exceptions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..system.files import last_bytes

_T = TypeVar("_T")
_D = TypeVar("_D")

VARIABLE = "NBTRAIN_LOG"

LOGGER = logging.getLogger("nbtrain.launcher")
_ROOT = logging.getLogger("nbtrain")
_ROOT.addHandler(logging.NullHandler())

_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:DEBUG|INFO|WARNING|ERROR) ")


class LaunchLog(logging.Handler):
    """Handles the records of one launch, which come from its thread.

    It keeps no file open, so that a forked rank inherits no descriptor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._path: Path | None = None
        self._lines: list[str] = []  # until there is a path
        wanted = os.environ.get(VARIABLE, "")
        self.printed = getattr(logging, wanted.upper(), logging.DEBUG) if wanted else sys.maxsize

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the launch, and was not forked by it."""
        return os.getpid() == self._process

    def keep_in(self, path: Path) -> None:
        """Write the launch's records to a file from now on, and first those kept in memory.

        Does nothing in another thread than the launch's.
        """
        if self._thread != threading.get_ident():
            return
        self._path = path
        for line in self._lines:
            self._keep(line)
        self._lines.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record of the launch's thread as one line to the log, from INFO on.

        Also prints it if its level is high enough, and passes it on to the handlers of the logger
        ``nbtrain``; the supervisor of a background run does neither. Records of other threads are
        ignored. Raises nothing.
        """
        if record.thread != self._thread:
            return
        line = self.format(record).replace("\n", " ")
        if record.levelno >= logging.INFO:
            self._keep(line)
        if not self.is_of_this_process:  # the supervisor of a background run writes only the file
            return
        with contextlib.suppress(Exception):  # a closed stderr, or a filter that raises
            if record.levelno >= self.printed:
                print(f"nbtrain: {line}", file=sys.stderr, flush=True)
            if _ROOT.isEnabledFor(record.levelno):
                _ROOT.handle(record)

    def _keep(self, line: str) -> None:
        """Append a line to the log's file, or keep it until there is one; errors are ignored."""
        if self._path is None:
            self._lines.append(line)
            return
        with contextlib.suppress(OSError):  # a full disk or a deleted folder must not end a run
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, f"{line}\n".encode("utf-8", "replace"))
            finally:
                os.close(descriptor)


def _logs() -> list[LaunchLog]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, LaunchLog)]


@contextlib.contextmanager
def record_launch() -> Iterator[None]:
    """Log what is decided in this thread, and restore the logger afterwards."""
    for handler in _logs():  # a rank that launches inherits the log of its own launch
        if not handler.is_of_this_process:
            LOGGER.removeHandler(handler)
    log = LaunchLog()
    LOGGER.addHandler(log)
    LOGGER.propagate = False
    LOGGER.setLevel(min(logging.INFO, log.printed, _ROOT.getEffectiveLevel()))
    try:
        yield
    finally:
        LOGGER.removeHandler(log)
        log.close()
        if not _logs():  # no other thread launches
            LOGGER.propagate = True
            LOGGER.setLevel(logging.NOTSET)


def attempt(name: str, look: Callable[[], _T], default: _D) -> _T | _D:
    """Return the result of a check that only advises. If it raises, log that, return `default`.

    No launch must fail because an estimate or advice fails on unusual code, values (a sparse
    parameter has no storage) or systems.
    """
    try:
        return look()
    except Exception as error:
        LOGGER.info("%s was given up: %s", name, type(error).__name__)
        return default


def keep_in(path: Path) -> None:
    """Write earlier and later records of this thread's launch to a file."""
    for handler in _logs():
        handler.keep_in(path)


def printed_in(path: Path) -> str:
    """Return the end of what processes printed into a ``launcher.log``, without its records.

    At most 500 characters; "" without such a file.
    """
    lines = last_bytes(path).decode("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if not _LINE.match(line)).strip()[-500:]
