"""Estimates the memory of the checkpoints that each rank loads for itself, by the size of files.

Nothing is loaded, built or fetched for it.
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
from .lint import read

SHARE = 0.25
"""The share of the available memory from which models that ranks load are worth a remark."""

LARGE = 1 << 30
"""Bytes from which they are in any case."""

ADVICE = (
    "load the model once, in a cell above, and give it to the function as a parameter, so that all "
    "ranks share its memory"
)

_MODELS = re.compile(r"Model|For[A-Z]|Pipeline|Transformer|UNet")


@dataclass(frozen=True)
class Load:
    """A line by which every rank loads a model of its own."""

    place: Place
    size: int
    """Bytes of the checkpoint's files."""


def loads(task: Call | Cell) -> list[Load]:
    """Return what each rank loads, as far as the checkpoints are here.

    Raises what `nbtrain.checks.lint.lint` raises.
    """
    result: list[Load] = []
    for unit in read(task, cell_name):
        for call in unit.calls:
            match call:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id=cls) | ast.Attribute(attr=cls), attr="from_pretrained"
                    ),
                    args=[ast.Constant() | ast.Name() as name, *_],
                ) if _MODELS.search(cls):
                    value: Any = name.value if isinstance(name, ast.Constant) else unit.value(name)
                    size = checkpoint_bytes(value) if type(value) is str else 0
                    place = Place(unit.place, call.lineno, call.col_offset + 1)
                    result += [Load(place, size)] if size else []
    return result


def advice(loaded: list[Load], ranks: int, available: int | None) -> tuple[str, ...]:
    """Return how much ranks take that each load a model, and what to write instead.

    Empty where none loads any, or what they load is too little to be the reason.
    """
    size = ranks * sum(load.size for load in loaded)
    if ranks < 2 or not size or size < min(LARGE, SHARE * (available or LARGE)):
        return ()  # there is no evidence that they are what uses the memory
    place = max(loaded, key=lambda load: load.size).place
    text = f"each of {ranks} ranks loads a separate copy of the model ({place})"
    text += f": {ranks} x {format_bytes(size // ranks)} = {format_bytes(size)}"
    text += f", and {format_bytes(available)} were available" if available is not None else ""
    is_too_much = available is not None and size > available
    reason = "too much for this host's memory" if is_too_much else "if memory ran out"
    return (f"{reason}: {text}", ADVICE)


def checkpoint_bytes(name: str) -> int:
    """Return the size of a checkpoint's weights: a folder, or a model of the hub that is here."""
    folder = Path(name)
    if not folder.is_dir():
        hub = sys.modules.get("huggingface_hub")
        cached = None
        with contextlib.suppress(Exception):  # not a repository's name, whatever the hub calls it
            cached = hub.try_to_load_from_cache(name, "config.json") if hub is not None else None
        if not isinstance(cached, str):
            return 0
        folder = Path(cached).parent
    for pattern in ("*.safetensors", "*.bin"):
        sizes = [file.stat().st_size for file in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0
