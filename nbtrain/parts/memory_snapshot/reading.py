"""Reads a snapshot of the allocator: how much memory is held, and by which lines. Pure.

The format is described at `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...part_api import is_library

_TORCH = re.compile(r"/(?:site|dist)-packages/torch/")
_GENERATED = re.compile(r"torchinductor_|^<eval_with_key>")
"""Files that torch.compile writes."""

Place = tuple[str, int]
"""A file and a line; ("", 0) where there is none."""
NOWHERE: Place = ("", 0)


@dataclass(frozen=True)
class LineUse:
    """The memory that one line of the user's code made."""

    place: Place
    """The innermost line of the user's code. There is none in threads without Python, as those of
    the backward pass, and for what was allocated before the recording."""
    library_place: Place
    """The line of a library below it that made most of this, if any: torch does not count."""
    size_bytes: int
    blocks: int


@dataclass(frozen=True)
class MemoryUse:
    """What the allocator held on one device."""

    device: int
    reserved_bytes: int
    """Memory that the allocator has of the device."""
    active_bytes: int
    """Memory of tensors, and of freed ones that another stream may still use."""
    allocated_bytes: int
    """Memory of tensors."""
    fragment_bytes: int
    """Free memory beside tensors in the same segment, which the allocator cannot give back."""
    largest_fragment_bytes: int
    lines: tuple[LineUse, ...]
    """What holds the memory, the largest first."""


@dataclass(frozen=True)
class _Held:
    """A piece of memory in use."""

    size_bytes: int
    frames: Sequence[Mapping[str, Any]]


def read_memory(snapshot: Mapping[str, Any], device: int) -> MemoryUse:
    """Return what the allocator holds on a device at the time of the snapshot."""
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    in_use = [block for block in blocks if block["state"] != "inactive"]
    fragments = [
        block["size"]
        for segment in segments
        if any(block["state"] != "inactive" for block in segment["blocks"])
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return MemoryUse(
        device,
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        active_bytes=sum(block["size"] for block in in_use),
        allocated_bytes=sum(b["size"] for b in in_use if b["state"] == "active_allocated"),
        fragment_bytes=sum(fragments),
        largest_fragment_bytes=max(fragments, default=0),
        lines=_group_by_line(_Held(b["size"], b.get("frames", ())) for b in in_use),
    )


def find_fullest_device(snapshot: Mapping[str, Any]) -> int:
    """Return the device on which the allocator has reserved most."""
    reserved: Counter[int] = Counter()
    for segment in snapshot["segments"]:
        reserved[segment["device"]] += segment["total_size"]
    return max(reserved, key=reserved.__getitem__, default=0)


def read_peak(snapshot: Mapping[str, Any], device: int) -> tuple[int, tuple[LineUse, ...]]:
    """Return the most bytes that tensors held at once, and the lines that held them.

    Only what is recorded counts. Sizes are those that were requested, before the allocator rounds
    them.
    """
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else ()
    held = {
        block["address"]: _Held(block["requested_size"], block.get("frames", ()))
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    size = peak = sum(each.size_bytes for each in held.values())
    at_peak, undone = held.copy(), len(trace)
    for number in range(len(trace) - 1, -1, -1):  # from the end, whose blocks are known
        _undo(trace[number], held)
        size += _freed_bytes(trace[number])
        if size > peak:
            for entry in reversed(trace[number:undone]):
                _undo(entry, at_peak)
            peak, undone = size, number
    made = {e["addr"]: e.get("frames", ()) for e in trace[:undone] if e["action"] == "alloc"}
    return peak, _group_by_line(
        _Held(each.size_bytes, each.frames or made.get(address, ()))
        for address, each in at_peak.items()
    )


def _freed_bytes(entry: Mapping[str, Any]) -> int:
    """Return by how much less was held after an entry of a trace than before it."""
    sign = {"alloc": -1, "free_completed": 1}.get(entry["action"], 0)
    return sign * int(entry["size"])


def _undo(entry: Mapping[str, Any], held: dict[int, _Held]) -> None:
    """Change what is held after an entry of a trace to what was held before it."""
    if entry["action"] == "alloc":
        held.pop(entry["addr"], None)
    elif entry["action"] == "free_completed":
        held[entry["addr"]] = _Held(entry["size"], ())


def _group_by_line(held: Iterable[_Held]) -> tuple[LineUse, ...]:
    """Return how much each line of the user's code holds, the largest first."""
    sizes: Counter[Place] = Counter()
    counts: Counter[Place] = Counter()
    libraries: dict[Place, Counter[Place]] = {}
    is_known: dict[str, bool] = {}

    def is_of_library(file: str) -> bool:
        if file not in is_known:
            is_known[file] = is_library(file)
        return is_known[file]

    for each in held:
        place, library = _find_places(each.frames, is_of_library)
        sizes[place] += each.size_bytes
        counts[place] += 1
        libraries.setdefault(place, Counter())[library] += each.size_bytes
    return tuple(
        LineUse(place, libraries[place].most_common(1)[0][0], size, counts[place])
        for place, size in sizes.most_common()
    )


def _find_places(
    frames: Iterable[Mapping[str, Any]], is_of_library: Callable[[str], bool]
) -> tuple[Place, Place]:
    """Return the innermost line of the user's code, and of a library that it calls except torch.

    `frames` begin with the innermost one.
    """
    library = NOWHERE
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if not line or not file.endswith((".py", ">")) or _GENERATED.search(file):
            continue  # of C++, or written by torch.compile
        if not is_of_library(file):
            return (file, line), library
        if library == NOWHERE and not _TORCH.search(file):
            library = (file, line)
    return NOWHERE, library
