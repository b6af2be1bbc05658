"""The recordings of `tests/tools/record_profiles.py`, read as nbtrain reads them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nbtrain.parts.profile.reading.advice import Advice, give_advice
from nbtrain.parts.profile.reading.comparison import Comparison
from nbtrain.parts.profile.reading.trace import RankProfile, Sample, read_trace

TRACES = Path(__file__).parent / "traces"
CAUSES = sorted(folder.name for folder in TRACES.iterdir())


@dataclass(frozen=True)
class Recording:
    """What was recorded of a training with a planted cause."""

    compared: Comparison
    batches: Mapping[int, float]
    """The samples that each rank trains on in a step."""
    lines: Mapping[str, str]
    """What stands in the lines that the training threads were in."""

    @property
    def advice(self) -> Advice | None:
        return give_advice(self.compared, self.batches)


def trace_files(cause: str) -> list[Path]:
    return sorted((TRACES / cause).glob("rank-*.json.gz"))


def read_json(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))


@cache
def read_recording(cause: str) -> Recording:
    found = read_json(TRACES / cause / "samples.json.gz")
    ranks: list[RankProfile] = []
    for rank, file in enumerate(trace_files(cause)):
        samples = [Sample(*each) for each in found["ranks"][rank]["samples"]]
        ranks.append(read_trace(read_json(file), rank, 3, samples, "host"))
    batches = {rank: each["batch"] for rank, each in enumerate(found["ranks"])}
    return Recording(Comparison(ranks), batches, found["lines"])
