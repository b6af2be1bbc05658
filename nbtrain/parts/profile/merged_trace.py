"""Writes the traces of all ranks as one, in the Trace Event Format of Chrome and Perfetto.

Each rank is a process of the trace, so its threads and GPU streams are together. Arrows link the
same collective of the ranks.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...part_api import NbtrainError, write_atomically
from .reading.comparison import Comparison


def write_merged(path: Path, traces: Sequence[Path], compared: Comparison) -> None:
    """Write the traces of the ranks of `compared`, in their order, into one file.

    Raises `NbtrainError` if a trace cannot be read, and `OSError`.
    """
    begins = (rank.steps[0].begin for rank in compared.ranks)
    origin = min(b - offset for b, offset in zip(begins, compared.offsets_ns, strict=True))
    events = list(_arrows(compared, origin))
    for rank, file, offset in zip(compared.ranks, traces, compared.offsets_ns, strict=True):
        try:
            trace = json.loads(gzip.decompress(file.read_bytes()))
            shift_us = (int(trace.get("baseTimeNanoseconds", 0)) - origin - offset) / 1e3
            events += _move_events(trace, rank.rank, shift_us)
        except _DAMAGED as error:
            raise NbtrainError(f"the trace of rank {rank.rank} cannot be read: {error}") from error
    merged = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}
    data = json.dumps(merged).encode()
    write_atomically(path, gzip.compress(data, 6) if path.suffix == ".gz" else data)


_DAMAGED = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError)


def _move_events(trace: dict[str, Any], rank: int, shift_us: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank with the rank as their process, `shift_us` later."""
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for event in _close_steps(trace["traceEvents"]):
        if event.get("ph") == "M" and event["name"] != "thread_name":
            continue
        if not isinstance(event.get("pid"), int) and event.get("cat") not in _OF_GPUS:
            continue  # marks of the profiler itself
        moved = {**event, "pid": rank}
        if "ts" in event:
            moved["ts"] = round(event["ts"] + shift_us, 3)
        if not isinstance(event.get("tid"), int):
            moved["tid"] = str(event.get("tid"))
        if "id" in event:  # of an arrow within the rank
            moved["id"] = f"{rank}.{event['id']}"
        yield moved


def _close_steps(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield events with steps that end after the optimizer's annotation, not inside of it.

    A step ends in a hook that the annotation encloses. Viewers draw what is not nested wrong.
    """
    optimizers = [
        (event["tid"], event["ts"], event["ts"] + event["dur"] + 0.01)  # after any rounding
        for event in events
        if event.get("ph") == "X" and str(event.get("name")).startswith("Optimizer.step")
    ]
    for event in events:
        if event.get("ph") == "X" and str(event.get("name")).startswith("ProfilerStep"):
            begin, end = event["ts"], event["ts"] + event["dur"]
            for tid, low, high in optimizers:
                if tid == event["tid"]:
                    begin = high + 0.01 if low <= begin < high else begin
                    end = high if low <= end < high else end
            event = {**event, "ts": round(begin, 3), "dur": round(end - begin, 3)}
        yield event


_OF_GPUS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


def _arrows(compared: Comparison, origin: int) -> Iterator[dict[str, Any]]:
    """Yield arrows from the last rank that comes to a collective to the others."""
    for number, each in enumerate(compared.same_collectives):
        begins = [c.begin - compared.offsets_ns[i] for i, c in enumerate(each)]
        ends = [c.end - compared.offsets_ns[i] for i, c in enumerate(each)]
        last = begins.index(max(begins))
        for index, collective in enumerate(each):
            # Inside of both: the arrow binds to what runs at its time. A rank that only sends may
            # be done before the last one comes.
            time_ns = min(max(begins) + 1000, ends[index], ends[last])
            if index == last or time_ns < max(begins):
                continue
            common = {"cat": "collective", "name": collective.name, "id": f"c{number}.{index}"}
            for phase, at in (("s", last), ("f", index)):
                time_us = (time_ns - origin) / 1e3
                event = {**common, "ph": phase, "pid": compared.ranks[at].rank, "ts": time_us}
                yield {**event, "tid": each[at].thread, **({"bp": "e"} if phase == "f" else {})}
