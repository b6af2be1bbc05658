"""Waiting for something to come true, and for processes to end."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Poll until `condition` holds; fail after `timeout` seconds, which a busy machine may need."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def is_gone(process: int | psutil.Process) -> bool:
    """Report whether a process has ended; one that nobody has waited for yet has."""
    try:
        process = process if isinstance(process, psutil.Process) else psutil.Process(process)
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
