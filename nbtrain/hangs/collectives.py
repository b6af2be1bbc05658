"""Reads from PyTorch's flight recorders which collectives a rank is in, and was in."""

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

SAME = (
    "Every rank must call the same collectives in the same order: look for an `if` that only "
    "some ranks enter, or a loop that ends earlier on one"
)
"""What to do where ranks call different collectives."""

DEFAULT = "default_pg"
ON_NCCL = " on NCCL"
"""Ends the name of a group's NCCL part, which counts by itself where the group has gloo, too."""

RECORDERS = ("fr_trace_json", "dump_nccl_trace_json")
"""torch's recorders of a process: NCCL has its own, which a torch for CPUs lacks."""

_BETWEEN = b"\0"
"""Stands between the answers of two recorders: no JSON has it."""


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective."""

    group: str
    """The name of its process group; members are not recorded."""
    number: int
    """Counted within the group."""
    name: str
    shape: tuple[int, ...] | None = None
    """Of the first input."""
    pending: bool = False
    began: float = 0.0
    """Seconds since the epoch."""
    point: bool = False
    """Whether it is between two ranks alone."""
    timeout: float = math.inf
    """Seconds after which it ends with an error."""

    @property
    def label(self) -> str:
        """Return ``all_reduce #812``."""
        return f"{self.name} #{self.number}"

    @property
    def needs_all(self) -> bool:
        """Whether no rank is through before every rank of the group has joined."""
        return self.name.startswith(("all", "barrier", "_all", "reduce_scatter"))

    def like(self, other: Collective) -> bool:
        """Whether two ranks' parts may belong together."""
        symmetric = self.name in ("all_reduce", "broadcast", "reduce", "allreduce")
        # A rank that had less to gather than others goes on, and those wait for the rest.
        symmetric |= "all_gather" in self.name and self.pending != other.pending
        return self.name == other.name and (self.has_size_of(other) or not symmetric)

    def has_size_of(self, other: Collective) -> bool:
        """Whether as many values are in it, as far as that is known."""
        if self.shape is None or other.shape is None:
            return True
        return math.prod(self.shape) == math.prod(other.shape)


@dataclass(frozen=True)
class FlightRecord:
    """The answer of one rank's recorder."""

    by_group: Mapping[str, tuple[Collective, ...]] = field(default_factory=dict)
    """Its last collectives, oldest first."""

    def last(self, group: str) -> int:
        """Return the number of the last collective that the rank began in a group; 0: none."""
        return max((c.number for c in self.by_group.get(group, ())), default=0)

    def at(self, group: str, number: int) -> Collective | None:
        """Return a collective by its number, if it is still remembered."""
        return next((c for c in self.by_group.get(group, ()) if c.number == number), None)

    @property
    def pending(self) -> Collective | None:
        """The collective that the rank has been in for longest."""
        pending = (c for cs in self.by_group.values() for c in cs if c.pending)
        return min(pending, key=lambda c: c.began, default=None)


def parse(text: str | bytes, since: float = 0.0) -> FlightRecord | None:
    """Read a dump (``version`` 2.x, as torch 2.11 and 2.13 write it); None for what is none.

    What was recorded before `since` is not the rank's: it inherited it with the kernel's memory, or
    it is of a default group that was left, which is named as the new one is.
    """
    try:
        dumps = [json.loads(part) for part in _bytes(text).split(_BETWEEN)]
        if not all("version" in dump for dump in dumps):
            return None
        by_group: dict[str, list[Collective]] = {}
        # Before its first collective, a recorder has no entries.
        entries = [entry for dump in dumps for entry in dump.get("entries", ())]
        entries.sort(key=lambda entry: int(entry["time_created_ns"]))
        groups = [e["process_group"] for e in entries]
        # A default group that was formed anew counts from 1 again, and has another name.
        latest = next((name for name, of in reversed(groups) if of == DEFAULT), None)
        _retire(entries)
        for entry in entries:
            collective, (name, of) = _collective(entry), entry["process_group"]
            if collective.began >= since and (of != DEFAULT or name == latest):
                by_group.setdefault(collective.group, []).append(collective)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return FlightRecord({group: tuple(those) for group, those in by_group.items()})


def _retire(entries: list[dict[str, Any]]) -> None:
    """Retire what NCCL has done: a batch of sends never is (torch issue 137969).

    What a group began before something that is over is over, too.
    """
    done = set[str]()
    for entry in reversed(entries):
        if str(entry["profiling_name"]).startswith("nccl:"):
            group = str(entry["process_group"])
            entry["retired"] = bool(entry["retired"] or group in done)
            done |= {group} if entry["retired"] else set()


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    point = bool(entry.get("is_p2p"))
    backend, _, call = str(entry["profiling_name"]).rpartition(":")
    group = DEFAULT if description == DEFAULT else str(name)
    group += ON_NCCL if backend == "nccl" else ""
    sizes = entry.get("input_sizes") or []
    return Collective(
        group=f"{group}, point to point" if point else group,
        number=int(entry["p2p_seq_id" if point else "collective_seq_id"]),
        name=call,
        shape=tuple(sizes[0]) if sizes else None,
        pending=not entry["retired"],
        began=int(entry["time_created_ns"]) / 1e9,
        point=point,
        timeout=int(entry.get("timeout_ms") or 0) / 1000 or math.inf,
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


def ask(folder: RunFolder, ranks: Collection[int], patience: float) -> dict[int, FlightRecord]:
    """Return the answers of ranks' recorders, within about `patience` seconds."""
    deadline = time.monotonic() + patience
    if folder.questions.exists():
        return _ask_remote(folder.asked, ranks, deadline)
    records: dict[int, FlightRecord] = {}
    for rank in ranks:
        left = deadline - time.monotonic()
        if left > 0 and (record := fetch(folder.recorder(rank), left / 2)) is not None:
            records[rank] = record
    return records


def _ask_remote(
    folder: RunFolder, ranks: Collection[int], deadline: float
) -> dict[int, FlightRecord]:
    for rank in ranks:
        folder.recorded(rank).unlink(missing_ok=True)
    folder.ask_remote("recorders", ranks)
    records: dict[int, FlightRecord] = {}
    while len(records) < len(ranks) and time.monotonic() < deadline:
        for rank in set(ranks) - records.keys():
            path = folder.recorded(rank)
            if path.exists():
                records[rank] = parse(read_regular(path), path.stat().st_mtime) or FlightRecord()
        time.sleep(0.01)
    return records


def fetch(path: Path, timeout: float) -> FlightRecord | None:
    """Ask a rank's recorders through their socket; None where there is no answer.

    `timeout` seconds for each wait, of which there are two for a recorder.
    """
    answer = dump(path, timeout)
    return parse(*answer) if answer is not None else None


def dump(path: Path, timeout: float) -> tuple[bytes, float] | None:
    """Return the recorders' answers, and the time before which nothing is the rank's; see `fetch`.

    Raises nothing: None where the first recorder gives no answer.
    """
    answers = []
    try:
        since = path.stat().st_mtime
        for recorder in RECORDERS:
            answers += _post(path, f"/handler/{recorder}", timeout)
    except (OSError, http.client.HTTPException):
        pass
    return (_BETWEEN.join(answers), since) if answers else None


def _post(path: Path, question: str, timeout: float) -> list[bytes]:
    """Return an answer; nothing if there is no such recorder."""
    connection = _UnixConnection(path, timeout)
    try:
        connection.request("POST", question)
        reply = connection.getresponse()
        return [reply.read()] if reply.status == 200 else []
    finally:
        connection.close()
