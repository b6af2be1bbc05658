"""Small snapshots that are written by hand, as `torch.cuda.memory._snapshot` describes them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
MIB = 1 << 20
TORCH = "/usr/lib/python3.11/site-packages/torch/nn/functional.py"
LIBRARY = "/usr/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py"
CELL = "/tmp/ipykernel_41/3041.py"


def stack(*places: tuple[str, int]) -> list[Record]:
    """Return frames, the innermost first, below one of torch."""
    frames = ((TORCH, 2295), *places)
    return [{"filename": file, "line": line, "name": "f"} for file, line in frames]


def block(
    address: int, size: int, state: str = "active_allocated", *places: tuple[str, int]
) -> Record:
    """Return a block; sizes and addresses are in MiB."""
    return {
        "address": address * MIB,
        "size": size * MIB,
        "requested_size": size * MIB,
        "state": state,
        "frames": stack(*places) if places else [],
    }


def segment(address: int, *blocks: Record, device: int = 0) -> Record:
    """Return a segment of the allocator with these blocks."""

    def count(*states: str) -> int:
        return sum(each["size"] for each in blocks if each["state"] in states)

    return {
        "device": device,
        "address": address * MIB,
        "total_size": sum(each["size"] for each in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "allocated_size": count("active_allocated"),
        "active_size": count("active_allocated", "active_awaiting_free"),
        "requested_size": count("active_allocated"),
        "blocks": list(blocks),
        "frames": [],
    }


def entry(action: str, address: int, size: int, *places: tuple[str, int]) -> Record:
    """Return an entry of a device's trace."""
    record = {"action": action, "addr": address * MIB, "size": size * MIB, "stream": 0}
    return {**record, "time_us": 0, "frames": stack(*places) if places else []}


def snapshot(*segments: Record, trace: tuple[Record, ...] = ()) -> Record:
    return {
        "segments": list(segments),
        "device_traces": [list(trace), []],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


def full() -> Record:
    """Return what a rank holds whose memory ran out, on GPU 0."""
    return snapshot(
        segment(
            0,
            block(0, 40, "active_allocated", (CELL, 12)),
            block(40, 3, "inactive"),
            block(43, 20, "active_allocated", (LIBRARY, 320), (CELL, 30)),
            block(63, 5, "inactive"),
        ),
        segment(100, block(100, 10, "active_allocated", (CELL, 12)), block(110, 6, "inactive")),
        segment(200, block(200, 8)),
        segment(300, block(300, 7, "inactive")),
        segment(400, block(400, 2, "active_awaiting_free", ("/home/me/train.py", 4))),
        segment(500, block(500, 99, "active_allocated", (CELL, 1)), device=1),
        trace=(
            entry("alloc", 0, 40, (CELL, 12)),
            entry("alloc", 300, 7, (CELL, 13)),
            entry("free_requested", 300, 7),
            entry("free_completed", 300, 7),
            {"action": "oom", "size": 9 * MIB, "device_free": 1, "stream": 0, "frames": []},
        ),
    )
