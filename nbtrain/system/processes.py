"""Processes of this host: their identity, their names, and which one listens on a port."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from .files import OUT_OF_DESCRIPTORS


def process_identity(pid: Any) -> str | None:
    """Return what no other process with the same number has; None if the process has ended.

    On Linux that is the clock tick it started at, and the boot from which ticks are counted: the
    time of day, to which psutil converts it, changes when the clock is set. Raises `OSError` if
    this process is out of descriptors and cannot look.
    """
    if type(pid) is not int:
        return None
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            has_ended = fields[0] in (b"Z", b"X")  # a zombie does nothing any more
            return None if has_ended else f"{fields[19].decode()} {boot()}"
        except (OSError, IndexError) as error:
            if getattr(error, "errno", None) in OUT_OF_DESCRIPTORS:
                raise
            return None
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError):
        return None


@functools.cache
def boot() -> str:
    """Return what identifies the time since this host was started; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it
        return ""


def port_listener(port: int) -> str:
    """Return the process that listens on a port, as ``python, pid 4711``; "" if unknown."""
    import psutil

    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
    except (psutil.Error, OSError):  # macOS allows this to root only
        return ""
    return next((process_name(pid) for pid in pids if pid), "")


def process_name(pid: int) -> str:
    """Return ``python, pid 4711``; the pid alone where the name is unknown."""
    import psutil

    if pid == os.getpid():
        return f"this kernel itself, pid {pid}"
    try:
        return f"{psutil.Process(pid).name()}, pid {pid}"
    except psutil.Error:
        return f"pid {pid}"


def shared_memory_spans() -> list[tuple[int, int]]:
    """Return where this process's memory is that others may write to, too; on Linux only."""
    spans = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _ = line.split(maxsplit=2)
            if access.startswith("rw") and access.endswith("s"):
                begin, end = span.split("-")
                spans.append((int(begin, 16), int(end, 16)))
    return spans
