"""Reads a snapshot of the allocator: how much memory is held, and by which lines. Pure.

The format is described at `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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


_Held = tuple[int, Sequence[Mapping[str, Any]]]
"""The bytes of a piece of memory in use, and the stack that made it, the innermost frame first."""


def read_memory(snapshot: Mapping[str, Any], device: int | None) -> MemoryUse:
    """Return what the allocator holds on a device; None: on the one where it has most."""
    device = _find_fullest_device(snapshot) if device is None else device
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    used = [block for each in segments for block in each["blocks"] if block["state"] != "inactive"]
    partly_used = [each for each in segments if each["active_size"]]
    blocks = (block for each in partly_used for block in each["blocks"])
    fragments = [block["size"] for block in blocks if block["state"] == "inactive"]
    return MemoryUse(
        device,
        reserved_bytes=sum(each["total_size"] for each in segments),
        active_bytes=sum(each["active_size"] for each in segments),
        allocated_bytes=sum(each["allocated_size"] for each in segments),
        fragment_bytes=sum(fragments),
        largest_fragment_bytes=max(fragments, default=0),
        lines=_group_by_line((block["size"], block.get("frames", ())) for block in used),
    )


def _find_fullest_device(snapshot: Mapping[str, Any]) -> int:
    """Return the device on which the allocator has reserved most."""
    reserved: Counter[int] = Counter()
    for segment in snapshot["segments"]:
        reserved[segment["device"]] += segment["total_size"]
    return max(reserved, key=reserved.__getitem__, default=0)


def read_peak(snapshot: Mapping[str, Any], use: MemoryUse) -> MemoryUse:
    """Return `use` with the most bytes that tensors held at once, and the lines that held them.

    Only what is recorded counts. Sizes are those that were requested, before the allocator rounds
    them.
    """
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    trace = traces[use.device] if use.device < len(traces) else ()
    at_end: dict[int, _Held] = {
        block["address"]: (block["requested_size"], block.get("frames", ()))
        for segment in snapshot["segments"]
        if segment["device"] == use.device
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    size = peak = sum(size for size, _ in at_end.values())
    held, end_of_peak = at_end.copy(), len(trace)
    for number in range(len(trace) - 1, -1, -1):  # from the end, whose blocks are known
        size += _undo(trace[number], held)
        if size > peak:
            peak, end_of_peak = size, number
    for entry in reversed(trace[end_of_peak:]):
        _undo(entry, at_end)
    made = {e["addr"]: e.get("frames", ()) for e in trace[:end_of_peak] if e["action"] == "alloc"}
    pieces = ((size, frames or made.get(addr, ())) for addr, (size, frames) in at_end.items())
    return replace(use, allocated_bytes=peak, lines=_group_by_line(pieces))


def _undo(entry: Mapping[str, Any], held: dict[int, _Held]) -> int:
    """Change what is held after an entry of a trace to what was before; return by how many bytes.

    Memory whose free waits for a stream is held until that is completed.
    """
    if entry["action"] == "alloc":
        held.pop(entry["addr"], None)
        return -int(entry["size"])
    if entry["action"] == "free_completed":
        held[entry["addr"]] = (entry["size"], ())
        return int(entry["size"])
    return 0


def _group_by_line(held: Iterable[_Held]) -> tuple[LineUse, ...]:
    """Return how much each line of the user's code holds, the largest first."""
    sizes: Counter[Place] = Counter()
    counts: Counter[Place] = Counter()
    libraries: defaultdict[Place, Counter[Place]] = defaultdict(Counter)
    for size, frames in held:
        place, library = _find_places(frames)
        sizes[place] += size
        counts[place] += 1
        libraries[place][library] += size
    return tuple(
        LineUse(place, libraries[place].most_common(1)[0][0], size, counts[place])
        for place, size in sizes.most_common()
    )


_is_library = functools.lru_cache(10_000)(is_library)


def _find_places(frames: Iterable[Mapping[str, Any]]) -> tuple[Place, Place]:
    """Return the innermost line of the user's code, and of a library that it calls except torch."""
    library = NOWHERE
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if not line or not file.endswith((".py", ">")) or _GENERATED.search(file):
            continue  # of C++, or written by torch.compile
        if not _is_library(file):
            return (file, line), library
        if library == NOWHERE and not _TORCH.search(file):
            library = (file, line)
    return NOWHERE, library
