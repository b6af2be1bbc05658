"""Estimates the memory of checkpoints that each rank loads for itself, from the sizes of files.

It loads, builds and downloads nothing.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..findings import Place
from ..planning.plan import Call, Cell
from ..system.source_files import cell_name
from ..system.text import format_bytes
from . import limits
from .lint import read

ADVICE = (
    "load the model once, in a cell above, and give it to the function as a parameter, so that all "
    "ranks share its memory"
)

_MODELS = re.compile(r"Model|For[A-Z]|Pipeline|Transformer|UNet")


@dataclass(frozen=True)
class CheckpointLoad:
    """A line that loads a model in every rank."""

    place: Place
    bytes: int
    """The size of the checkpoint's files."""


def find_loads(task: Call | Cell) -> list[CheckpointLoad]:
    """Return the loads of a task whose checkpoints are on this host.

    Raises what `nbtrain.checks.lint.lint` raises.
    """
    result: list[CheckpointLoad] = []
    for source in read(task, cell_name):
        for call in source.calls:
            match call:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id=cls) | ast.Attribute(attr=cls), attr="from_pretrained"
                    ),
                    args=[ast.Constant() | ast.Name() as name, *_],
                ) if _MODELS.search(cls):
                    value: Any = (
                        name.value if isinstance(name, ast.Constant) else source.value(name)
                    )
                    size = checkpoint_bytes(value) if type(value) is str else 0
                    place = Place(source.place, call.lineno, call.col_offset + 1)
                    result += [CheckpointLoad(place, size)] if size else []
    return result


def explain(
    loads: list[CheckpointLoad], ranks: int, available_bytes: int | None
) -> tuple[str, ...]:
    """Return a possible reason why memory ran out, and the remedy.

    Empty if the ranks load too little to be the reason.
    """
    size, least = ranks * sum(load.bytes for load in loads), limits.MIN_BUILD_BYTES
    if ranks < 2 or not size:
        return ()
    if size < min(least, limits.MIN_BUILD_SHARE * (available_bytes or least)):
        return ()
    place = max(loads, key=lambda load: load.bytes).place
    text = f"each of {ranks} ranks loads a separate copy of the model ({place})"
    text += f": {ranks} x {format_bytes(size // ranks)} = {format_bytes(size)}"
    if available_bytes is not None:
        text += f", and {format_bytes(available_bytes)} were available"
    is_too_much = available_bytes is not None and size > available_bytes
    reason = "too much for this host's memory" if is_too_much else "if memory ran out"
    return (f"{reason}: {text}", ADVICE)


def checkpoint_bytes(name: str) -> int:
    """Return the size of a checkpoint's weights, given a folder or the name of a cached hub model.

    Returns 0 if this host does not have it.
    """
    folder = Path(name)
    if not folder.is_dir():
        hub = sys.modules.get("huggingface_hub")
        cached = None
        with contextlib.suppress(
            Exception
        ):  # the hub has several errors for a text that is no name
            cached = hub.try_to_load_from_cache(name, "config.json") if hub is not None else None
        if not isinstance(cached, str):
            return 0
        folder = Path(cached).parent
    for pattern in ("*.safetensors", "*.bin"):
        sizes = [file.stat().st_size for file in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0
