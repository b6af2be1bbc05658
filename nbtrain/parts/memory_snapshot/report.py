"""What a snapshot shows, as a note of the run. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...part_api import Finding, format_bytes, plural
from .limits import MAX_LINES
from .reading import NOWHERE, LineUse, MemoryUse, Place

CODE = "memory-snapshot"
_VIEWER = "https://pytorch.org/memory_viz"
_NO_LINE = "no line of Python, as in the backward pass"


@dataclass(frozen=True)
class OutOfMemory:
    """What torch knows when memory has run out."""

    device: int
    requested_bytes: int
    device_bytes: int
    """The memory of the device, or the part of it that the process may use."""


def report_out_of_memory(
    rank: int, use: MemoryUse, cause: OutOfMemory | None, times: int, names: Mapping[str, str]
) -> Finding:
    """Return what held the memory when it ran out; the remedy is advice, if there is any.

    Without a `cause`, another library than torch's allocator got no memory. `times` is how often it
    ran out, and `names` has those of cells by their files.
    """
    last = f", the last of {times} times" if times > 1 else ""
    tried = f"{format_bytes(cause.requested_bytes)} on " if cause is not None else "memory on "
    of_size = f" of {format_bytes(cause.device_bytes)}" if cause is not None else ""
    text = (
        f"Rank {rank} could not allocate {tried}GPU {use.device}{of_size}{last}: its tensors held "
        f"{format_bytes(use.allocated_bytes)}, and {_describe_fragments(use)}. "
        f"{_describe_lines(use.lines, names)}"
    )
    requested = cause.requested_bytes if cause is not None else 0
    is_scattered = use.largest_fragment_bytes < requested <= use.fragment_bytes
    advice = (
        "The free fragments are larger than that together: try "
        "`--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."
    )
    return Finding(CODE, text, advice if is_scattered else "")


def report_peak(
    rank: int,
    use: MemoryUse,
    peak_bytes: int,
    lines: Sequence[LineUse],
    names: Mapping[str, str],
) -> Finding:
    """Return what held the memory when most was held."""
    text = (
        f"The tensors of rank {rank} held {format_bytes(peak_bytes)} on GPU {use.device} at most. "
        f"At the end, the allocator kept {format_bytes(use.reserved_bytes)}, and "
        f"{_describe_fragments(use)}. {_describe_lines(lines, names)}"
    )
    return Finding(CODE, text)


def tell_file(finding: Finding, name: str, failure: str) -> Finding:
    """Return a finding that also names the snapshot's file, or why it could not be written."""
    text = f"`{name}` in the run's folder has all of it: open it at {_VIEWER}."
    if failure:
        text = f"The snapshot could not be written ({failure})."
    return Finding(finding.code, finding.text, f"{finding.remedy} {text}".lstrip())


def _describe_fragments(use: MemoryUse) -> str:
    if not use.fragment_bytes:
        return "no fragments were free"
    largest = format_bytes(use.largest_fragment_bytes)
    return f"{format_bytes(use.fragment_bytes)} were free in fragments of at most {largest}"


def _describe_lines(lines: Sequence[LineUse], names: Mapping[str, str]) -> str:
    """Return a sentence about the lines that held most."""
    shown = [
        f"{_name_line(each, names)}: {format_bytes(each.size_bytes)} in "
        f"{plural(each.blocks, 'block')}"
        for each in lines[:MAX_LINES]
    ]
    if rest := sum(each.size_bytes for each in lines[MAX_LINES:]):
        shown.append(f"other lines: {format_bytes(rest)}")
    return f"The largest, by line: {'; '.join(shown)}." if shown else ""


def _name_line(use: LineUse, names: Mapping[str, str]) -> str:
    """Return the line of the user's code, with that of a library if it is known."""
    place = _NO_LINE if use.place == NOWHERE else _name_place(use.place, names)
    inner = f" ({_name_place(use.library_place, names)})" if use.library_place != NOWHERE else ""
    return f"{place}{inner}"


def _name_place(place: Place, names: Mapping[str, str]) -> str:
    file, line = place
    return f"{names.get(file) or os.path.basename(file)}, line {line}"
