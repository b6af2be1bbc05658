"""Reads PyTorch's flight recorders: which collectives a rank is in, and which came before."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system.files import read_regular
from ..tracking.run_folder import RunFolder

SAME_ORDER_ADVICE = (
    "Every rank must call the same collectives in the same order: look for an `if` that only "
    "some ranks enter, or a loop that ends earlier on one"
)
"""The advice if ranks call different collectives."""

DEFAULT_GROUP = "default_pg"
NCCL_SUFFIX = " on NCCL"
"""Marks the NCCL half of a group that has gloo, too: the two halves number collectives apart."""

RECORDERS = ("fr_trace_json", "dump_nccl_trace_json")
"""torch's recorders in a process: gloo's, and NCCL's, which a CPU build lacks."""

_SEPARATOR = b"\0"
"""Stands between the replies of two recorders; JSON never contains it."""


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective."""

    group: str
    """The name of the process group; the record does not list its members."""
    number: int
    """Counted within the group, from 1."""
    name: str
    shape: tuple[int, ...] | None = None
    """The shape of the first input."""
    is_pending: bool = False
    began: float = 0.0
    """Seconds since the epoch."""
    is_p2p: bool = False
    """Whether it is a send or a receive."""
    timeout_s: float = math.inf
    """torch raises an error in the rank after so long."""

    @property
    def label(self) -> str:
        """Return ``all_reduce #812``."""
        return f"{self.name} #{self.number}"

    @property
    def needs_all(self) -> bool:
        """Whether a rank leaves it only after every rank of the group has joined."""
        return self.name.startswith(("all", "barrier", "_all", "reduce_scatter"))

    def matches(self, other: Collective) -> bool:
        """Return whether two ranks' parts can belong to one collective, by operation and size.

        Compares the name, and for operations that need it the number of values. Does not compare
        group and number: the caller has chosen parts that have both in common. An unknown shape
        fits any.
        """
        needs_one_size = self.name in ("all_reduce", "broadcast", "reduce", "allreduce")
        # A rank that gathers fewer values than the others returns, and the others wait for more.
        needs_one_size |= "all_gather" in self.name and self.is_pending != other.is_pending
        return self.name == other.name and (self._has_size_of(other) or not needs_one_size)

    def _has_size_of(self, other: Collective) -> bool:
        """Whether both have the same number of values; True if one shape is unknown."""
        if self.shape is None or other.shape is None:
            return True
        return math.prod(self.shape) == math.prod(other.shape)


@dataclass(frozen=True)
class FlightRecord:
    """What one rank's recorders contain."""

    by_group: Mapping[str, tuple[Collective, ...]] = field(default_factory=dict)
    """The latest collectives of each group, oldest first."""

    def last_number(self, group: str) -> int:
        """Return the number of the last collective that the rank began in a group, else 0."""
        return max((c.number for c in self.by_group.get(group, ())), default=0)

    def find(self, group: str, number: int) -> Collective | None:
        """Return a collective by its number if the recorder still has it."""
        return next((c for c in self.by_group.get(group, ()) if c.number == number), None)

    @property
    def pending(self) -> Collective | None:
        """The collective that the rank has been in for longest."""
        pending = (c for cs in self.by_group.values() for c in cs if c.is_pending)
        return min(pending, key=lambda c: c.began, default=None)


def parse_dump(text: str | bytes, since: float = 0.0) -> FlightRecord | None:
    """Return the record of a dump (``version`` 2.x, as torch 2.11 and 2.13 write it).

    Returns None for another version or broken JSON. Entries from before `since` (seconds since the
    epoch) are left out: a fork inherits the kernel's entries, and a default group that was left has
    the name of the next one.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        dumps = [json.loads(part) for part in data.split(_SEPARATOR)]
        if not all("version" in dump for dump in dumps):
            return None
        by_group: dict[str, list[Collective]] = {}
        # A recorder has no "entries" before its first collective.
        entries = [entry for dump in dumps for entry in dump.get("entries", ())]
        entries.sort(key=lambda entry: int(entry["time_created_ns"]))
        groups = [e["process_group"] for e in entries]
        # A second default group counts from 1 again, under another name.
        latest = next((name for name, kind in reversed(groups) if kind == DEFAULT_GROUP), None)
        _retire_nccl(entries)
        for entry in entries:
            collective, (name, kind) = _collective(entry), entry["process_group"]
            if collective.began >= since and (kind != DEFAULT_GROUP or name == latest):
                by_group.setdefault(collective.group, []).append(collective)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return FlightRecord({group: tuple(those) for group, those in by_group.items()})


def _retire_nccl(entries: list[dict[str, Any]]) -> None:
    """Mark NCCL entries as retired if a later one of their group is.

    NCCL never retires a batch of sends (torch issue 137969).
    """
    retired_groups = set[str]()
    for entry in reversed(entries):
        if str(entry["profiling_name"]).startswith("nccl:"):
            group = str(entry["process_group"])
            entry["retired"] = bool(entry["retired"] or group in retired_groups)
            retired_groups |= {group} if entry["retired"] else set()


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Return a collective from an entry of torch's flight recorder."""
    name, description = entry["process_group"]
    is_p2p = bool(entry.get("is_p2p"))
    backend, _, call = str(entry["profiling_name"]).rpartition(":")
    group = DEFAULT_GROUP if description == DEFAULT_GROUP else str(name)
    group += NCCL_SUFFIX if backend == "nccl" else ""
    sizes = entry.get("input_sizes") or []
    return Collective(
        group=f"{group}, point to point" if is_p2p else group,
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        name=call,
        shape=tuple(sizes[0]) if sizes else None,
        is_pending=not entry["retired"],
        began=int(entry["time_created_ns"]) / 1e9,
        is_p2p=is_p2p,
        timeout_s=int(entry.get("timeout_ms") or 0) / 1000 or math.inf,
    )


class _UnixConnection(http.client.HTTPConnection):
    """HTTP through a socket file. A path may be too long for a socket, so the folder is opened."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect through the folder's descriptor: the path itself may be too long."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        if sys.platform != "linux":
            self.sock.connect(str(self._path))
            return
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


def read_recorders(
    folder: RunFolder, ranks: Collection[int], timeout_s: float
) -> dict[int, FlightRecord]:
    """Return the records of the ranks that reply within about `timeout_s`, by rank.

    Requests for ranks on other hosts go through their driver. A rank without a reply is absent.
    """
    deadline = time.monotonic() + timeout_s
    if folder.questions.exists():
        return _read_remote_recorders(folder.reply_folder, ranks, deadline)
    records: dict[int, FlightRecord] = {}
    for rank in ranks:
        left = deadline - time.monotonic()
        if left > 0 and (record := read_recorder(folder.recorder(rank), left / 2)) is not None:
            records[rank] = record
    return records


def _read_remote_recorders(
    folder: RunFolder, ranks: Collection[int], deadline: float
) -> dict[int, FlightRecord]:
    """Request the records of ranks on other hosts, and return those that arrive by the deadline.

    Deletes earlier replies first. A reply that cannot be parsed gives an empty record.
    """
    for rank in ranks:
        folder.recorded(rank).unlink(missing_ok=True)
    folder.ask_remote("recorders", ranks)
    records: dict[int, FlightRecord] = {}
    while len(records) < len(ranks) and time.monotonic() < deadline:
        for rank in set(ranks) - records.keys():
            path = folder.recorded(rank)
            if path.exists():
                record = parse_dump(read_regular(path), path.stat().st_mtime)
                records[rank] = record or FlightRecord()
        time.sleep(0.01)
    return records


def read_recorder(socket_path: Path, timeout_s: float) -> FlightRecord | None:
    """Return the record of one rank, or None if it does not reply; see `fetch_dump`."""
    reply = fetch_dump(socket_path, timeout_s)
    return parse_dump(*reply) if reply is not None else None


def fetch_dump(socket_path: Path, timeout_s: float) -> tuple[bytes, float] | None:
    """Return the dump of a rank's recorders, and the time from which entries are its own.

    `timeout_s` is for each wait, two per recorder. Raises nothing: returns None if the first
    recorder does not reply.
    """
    replies = []
    try:
        since = socket_path.stat().st_mtime
        for recorder in RECORDERS:
            replies += _post(socket_path, f"/handler/{recorder}", timeout_s)
    except (OSError, http.client.HTTPException):
        pass
    return (_SEPARATOR.join(replies), since) if replies else None


def _post(socket_path: Path, url: str, timeout_s: float) -> list[bytes]:
    """Return the reply in a list, which is empty if the process has no such recorder.

    Raises `OSError` or `HTTPException` if the process does not reply in time.
    """
    connection = _UnixConnection(socket_path, timeout_s)
    try:
        connection.request("POST", url)
        reply = connection.getresponse()
        return [reply.read()] if reply.status == 200 else []
    finally:
        connection.close()
