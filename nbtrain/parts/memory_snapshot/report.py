"""What a snapshot shows, as a note of the run. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ...part_api import Finding, format_bytes, plural
from .allocator import Shortage
from .limits import MAX_LINES
from .reading import NOWHERE, LineUse, MemoryUse, Place

_NO_LINE = "no line of Python, as in the backward pass"
_SCATTERED = (
    "The free fragments are larger than that together, so try "
    "`--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. "
)


def describe(
    rank: int,
    use: MemoryUse,
    shortage: Shortage | None,
    cells: Mapping[str, str],
    file: str,
    failure: str,
) -> Finding:
    """Return what held the memory when it ran out; without a shortage, when most was held.

    `cells` has the names of cells by their files. The snapshot is in the `file`; `failure` is why
    it could not be written, or "".
    """
    held, gpu, advice = format_bytes(use.allocated_bytes), f"GPU {use.device}", ""
    kept, largest = format_bytes(use.reserved_bytes), format_bytes(use.largest_fragment_bytes)
    free = f"{format_bytes(use.fragment_bytes)} were free in fragments of at most {largest}"
    free = free if use.fragment_bytes else "no fragments were free"
    at_end = f"at the end, the allocator kept {kept}, and {free}"
    text = f"The tensors of rank {rank} held {held} on {gpu} at most; {at_end}"
    if shortage is not None:
        size, whole = format_bytes(shortage.requested_bytes), format_bytes(shortage.device_bytes)
        tried = f"{size} on {gpu} of {whole}" if shortage.times else f"memory on {gpu}"
        last = f" (the last of {shortage.times} times)" if shortage.times > 1 else ""
        text = f"Rank {rank} could not allocate {tried}{last}: its tensors held {held}, and {free}"
        if use.largest_fragment_bytes < shortage.requested_bytes <= use.fragment_bytes:
            advice = _SCATTERED
    where = f"Open `{file}` of the run's folder at https://pytorch.org/memory_viz to see all of it."
    if failure:
        where = f"The snapshot could not be written ({failure})."
    lines = f" The largest, by line: {_list_lines(use.lines, cells)}." if use.lines else ""
    text = f"{text}.{lines}"
    return Finding("memory-snapshot", text, advice + where)


def _list_lines(lines: Sequence[LineUse], cells: Mapping[str, str]) -> str:
    """Return the lines that hold most, with the line of a library that each calls."""
    shown = []
    for each in lines[:MAX_LINES]:
        name = _NO_LINE if each.place == NOWHERE else _name_place(each.place, cells)
        if each.library_place != NOWHERE:
            name += f" ({_name_place(each.library_place, cells)})"
        shown.append(f"{name}: {format_bytes(each.size_bytes)} in {plural(each.blocks, 'block')}")
    if rest := sum(each.size_bytes for each in lines[MAX_LINES:]):
        shown.append(f"other lines: {format_bytes(rest)}")
    return "; ".join(shown)


def _name_place(place: Place, cells: Mapping[str, str]) -> str:
    return f"{cells.get(place[0]) or os.path.basename(place[0])}, line {place[1]}"
