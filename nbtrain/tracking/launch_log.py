"""Writes nbtrain's log: what the launcher decides and why, for bug reports.

Records go to the logger ``nbtrain.launcher``, and nowhere as long as nothing is launched. During a
launch, those at INFO are kept in the run's ``launcher.log``; ``NBTRAIN_LOG=debug`` (or info,
warning) prints them to stderr, too; and those that the logger ``nbtrain`` is enabled for go on to
its handlers. No value of an environment variable and no argument of the user's is ever logged, and
of an exception its type alone.
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
    """Takes the records of one launch, which are those of its thread.

    It holds no file open: a rank that is forked meanwhile inherits nothing to close.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._path: Path | None = None
        self._lines: list[str] = []  # as long as there is no path
        wanted = os.environ.get(VARIABLE, "")
        self.printed = getattr(logging, wanted.upper(), logging.DEBUG) if wanted else sys.maxsize

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process launches, and was not forked by the launch."""
        return os.getpid() == self._process

    def keep_in(self, path: Path) -> None:
        """Append to a file from here on, beginning with what was logged before."""
        if self._thread != threading.get_ident():
            return
        self._path = path
        for line in self._lines:
            self._keep(line)
        self._lines.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep, print and pass on a record, on one line. Raises nothing: it is only a log."""
        if record.thread != self._thread:
            return
        line = self.format(record).replace("\n", " ")
        if record.levelno >= logging.INFO:
            self._keep(line)
        if not self.is_of_this_process:  # the supervisor of a background run: the file is enough
            return
        with contextlib.suppress(Exception):  # a closed stderr, a filter of the program's own
            if record.levelno >= self.printed:
                print(f"nbtrain: {line}", file=sys.stderr, flush=True)
            if _ROOT.isEnabledFor(record.levelno):
                _ROOT.handle(record)

    def _keep(self, line: str) -> None:
        if self._path is None:
            self._lines.append(line)
            return
        with contextlib.suppress(OSError):  # a full disk, a deleted folder: not worth a training
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, f"{line}\n".encode("utf-8", "replace"))
            finally:
                os.close(descriptor)


def _logs() -> list[LaunchLog]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, LaunchLog)]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Log what is decided in this thread; afterwards the logger is as it was."""
    for handler in _logs():  # a rank that launches inherited the log of its own launch
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
    """Return what a check finds that only advises; where it raises, log that and return `default`.

    The one place for that: no launch ends because an estimate or a remark fails on unusual code,
    values (a sparse parameter has no storage) or systems.
    """
    try:
        return look()
    except Exception as error:
        LOGGER.info("%s was given up: %s", name, type(error).__name__)
        return default


def keep_in(path: Path) -> None:
    """Write the log of this thread's launch to a file: what was logged before, and what follows."""
    for handler in _logs():
        handler.keep_in(path)


def printed_in(path: Path) -> str:
    """Return the end of what processes printed to a ``launcher.log``, which is no record."""
    lines = last_bytes(path).decode("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if not _LINE.match(line)).strip()[-500:]
