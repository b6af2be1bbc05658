"""Identifies processes of this host, and finds the owner of a port."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import sys
from pathlib import Path
from typing import Any

from .files import OUT_OF_DESCRIPTORS


class Prctl(enum.IntEnum):
    """Options of Linux's `prctl`."""

    SET_PDEATHSIG = 1
    SET_CHILD_SUBREAPER = 36
    GET_CHILD_SUBREAPER = 37


# Made here, and not in each forked rank, where it would copy 50 memory pages.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def prctl(option: Prctl, value: Any) -> None:
    """Set an attribute of this process, or read it into a reference. Linux alone has it."""
    assert _prctl is not None
    _prctl(option, value, 0, 0, 0)


def process_identity(pid: Any) -> str | None:
    """Return an identity that a later process with the same pid does not have.

    None if no process with that pid runs (a zombie does not), and for a pid that is no int. On
    Linux this is the clock tick of its start and the id of the boot: psutil's start time would
    change when the clock is set. Raises `OSError` if this process is out of descriptors.
    """
    if type(pid) is not int:
        return None
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            has_ended = fields[0] in (b"Z", b"X")  # a zombie has ended
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
    """Return the id of this host's boot; "" if unknown."""
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
    except (psutil.Error, OSError):  # macOS allows only root
        return ""
    return next((describe_process(pid) for pid in pids if pid), "")


def describe_process(pid: int) -> str:
    """Return ``python, pid 4711``; for this process, ``this kernel itself, pid 4711``.

    Only ``pid 4711`` if the name is unknown.
    """
    import psutil

    if pid == os.getpid():
        return f"this kernel itself, pid {pid}"
    try:
        return f"{psutil.Process(pid).name()}, pid {pid}"
    except psutil.Error:
        return f"pid {pid}"
