"""The note on what held the memory of a GPU."""

from __future__ import annotations

import pytest

from nbtrain.parts.memory_snapshot.reading import read_memory, read_peak
from nbtrain.parts.memory_snapshot.report import Shortage, describe
from nbtrain.tracking.limits import MAX_NOTE_CHARS
from tests.parts.memory_snapshot.snapshots import CELL, MIB, block, full, segment, snapshot

pytestmark = pytest.mark.part("memory_snapshot")

CELLS = {CELL: "In[5]"}
LINES = (
    "The largest, by line: In[5], line 12: 50 MiB in 2 blocks; In[5], line 30 (modeling_bert.py, "
    "line 320): 20 MiB in 1 block; no line of Python, as in the backward pass: 8 MiB in 1 block; "
    "other lines: 2 MiB."
)
WHERE = "Open `f.pickle` of the run's folder at https://pytorch.org/memory_viz to see all of it."


def text_of(shortage: Shortage | None, failure: str = "") -> str:
    use = read_memory(full(), 0)
    use = use if shortage else read_peak(full(), use)
    found = describe(3, use, shortage, CELLS, "f.pickle", failure)
    assert found.code == "memory-snapshot"
    assert len(found.full_text) < MAX_NOTE_CHARS
    return found.full_text


def test_a_shortage_is_described() -> None:
    assert text_of(Shortage(0, 20 * MIB, 96 * MIB, 1)) == (
        "Rank 3 could not allocate 20 MiB on GPU 0 of 96 MiB: its tensors held 78 MiB, and 14 MiB "
        f"were free in fragments of at most 6 MiB. {LINES} {WHERE}"
    )


def test_fragments_that_are_large_enough_together_get_advice() -> None:
    text = text_of(Shortage(0, 9 * MIB, 96 * MIB, 4))
    assert "9 MiB on GPU 0 of 96 MiB (the last of 4 times): its" in text
    assert "try `--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. Open" in text
    assert "expandable" not in text_of(Shortage(0, 6 * MIB, 96 * MIB, 1))


def test_another_library_that_got_no_memory_has_told_no_size() -> None:
    assert text_of(Shortage()).startswith("Rank 3 could not allocate memory on GPU 0: its tensors")


def test_a_peak_is_described() -> None:
    text = text_of(None)
    begin = "The tensors of rank 3 held 87 MiB on GPU 0 at most; at the end, the allocator kept"
    assert text.startswith(
        f"{begin} 101 MiB, and 14 MiB were free in fragments of at most 6 MiB. The"
    )
    assert "The largest, by line: In[5], line 12: 50 MiB" in text


def test_a_full_disk_is_described() -> None:
    text = text_of(Shortage(), failure="No space left on device")
    assert text.endswith("The snapshot could not be written (No space left on device).")


def test_a_file_without_a_cell_has_its_name() -> None:
    held = snapshot(segment(0, block(0, 1, "active_allocated", ("/home/me/train.py", 4))))
    found = describe(0, read_memory(held, 0), None, {}, "f.pickle", "")
    assert (
        "no fragments were free. The largest, by line: train.py, line 4: 1 MiB" in found.full_text
    )
