"""What PyTorch's flight recorder says of a rank: which collectives it is in, and was in."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .folder import RunFolder

DEFAULT = "default_pg"


@dataclass(frozen=True)
class Collective:
    """One collective of a rank: the `number`-th of its `group`, which is known by name only.

    `shape` is that of the first input; `point` says that it is between two ranks alone.
    """

    group: str
    number: int
    name: str
    shape: tuple[int, ...] | None = None
    pending: bool = False
    began: float = 0.0
    point: bool = False

    @property
    def label(self) -> str:
        """Return ``all_reduce #812``."""
        return f"{self.name} #{self.number}"

    def like(self, other: Collective) -> bool:
        """Whether two ranks' parts may belong together."""
        symmetric = self.name in ("all_reduce", "broadcast", "reduce", "allreduce")
        same = self.shape == other.shape or None in (self.shape, other.shape)
        return self.name == other.name and (same or not symmetric)


@dataclass(frozen=True)
class Recorded:
    """What one rank's recorder knows: its last collectives by group, oldest first."""

    by_group: Mapping[str, tuple[Collective, ...]] = field(default_factory=dict)

    def last(self, group: str) -> int:
        """Return the number of the last one that the rank began in a group; 0: none."""
        return max((c.number for c in self.by_group.get(group, ())), default=0)

    def at(self, group: str, number: int) -> Collective | None:
        """Return one by its number, if it is still remembered."""
        return next((c for c in self.by_group.get(group, ()) if c.number == number), None)

    @property
    def pending(self) -> Collective | None:
        """The collective that the rank has been in for longest."""
        found = (c for cs in self.by_group.values() for c in cs if c.pending)
        return min(found, key=lambda c: c.began, default=None)


def parse(text: str | bytes, since: float = 0.0) -> Recorded | None:
    """Read a dump (``version`` 2.x, as torch 2.13 writes it); None for what is none.

    What was recorded before `since` is not the rank's: it inherited it with the kernel's memory.
    """
    try:
        dump = json.loads(text)
        if "version" not in dump:
            return None
        found: dict[str, list[Collective]] = {}
        for entry in dump.get("entries", ()):  # there are none before the first collective
            one = _collective(entry)
            if one.began >= since:
                found.setdefault(one.group, []).append(one)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return Recorded({group: tuple(ones) for group, ones in found.items()})


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    point = bool(entry.get("is_p2p"))
    group = DEFAULT if description == DEFAULT else str(name)
    sizes = entry.get("input_sizes") or []
    return Collective(
        group=f"{group}, point to point" if point else group,
        number=int(entry["p2p_seq_id" if point else "collective_seq_id"]),
        name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        shape=tuple(sizes[0]) if sizes else None,
        pending=not entry["retired"],
        began=int(entry["time_created_ns"]) / 1e9,
        point=point,
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        if sys.platform != "linux":
            self.sock.connect(str(self._path))
            return
        folder = os.open(self._path.parent, os.O_RDONLY)  # its path may be too long for a socket
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


def ask(folder: RunFolder, ranks: Collection[int], patience: float) -> dict[int, Recorded]:
    """Return what the recorders of ranks say; no longer than `patience` seconds, or a bit."""
    deadline = time.monotonic() + patience
    found: dict[int, Recorded] = {}
    if folder.questions.exists():
        return _ask_far(folder, ranks, deadline)
    for rank in ranks:
        left = deadline - time.monotonic()
        if left > 0 and (one := fetch(folder.recorder(rank), left / 2)) is not None:
            found[rank] = one
    return found


def _ask_far(folder: RunFolder, ranks: Collection[int], deadline: float) -> dict[int, Recorded]:
    for rank in ranks:
        folder.recorded(rank).unlink(missing_ok=True)
    folder.ask_far("recorders", ranks)
    found: dict[int, Recorded] = {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in set(ranks) - found.keys():
            path = folder.recorded(rank)
            if path.exists():
                found[rank] = parse(path.read_bytes(), path.stat().st_mtime) or Recorded()
        time.sleep(0.01)
    return found


def fetch(path: Path, timeout: float) -> Recorded | None:
    """Ask a rank's recorder through its socket; None where there is no answer.

    `timeout` seconds for each wait, of which there are two.
    """
    told = dump(path, timeout)
    return parse(*told) if told is not None else None


def dump(path: Path, timeout: float) -> tuple[bytes, float] | None:
    """Return what a rank's recorder says, and when its first group began; see `fetch`."""
    connection = _UnixConnection(path, timeout)
    try:
        connection.request("POST", "/handler/fr_trace_json")
        reply = connection.getresponse()
        begun = path.stat().st_mtime  # with the rank's first group
        return (reply.read(), begun) if reply.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
