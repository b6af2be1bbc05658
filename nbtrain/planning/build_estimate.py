"""Estimates the memory that a rank takes for the models that it builds itself.

Without loading one: the files of a checkpoint have a size, and a transformers model is built
from its configuration on torch's ``meta`` device, which has no memory. A model of the user's own
class is not built: that would run the user's code.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path
from typing import Any

from ..system.text import format_bytes
from .lint import Unit, models_built
from .plan import Call, Cell


def bytes_built(task: Call | Cell) -> int:
    """Return the bytes of weights that each rank builds; 0 where that is unknown."""
    return sum(_bytes_of(unit, call) for unit, call in models_built(task))


SHARE = 0.25
"""The share of the memory available from which models that ranks build are worth a remark."""

LARGE = 1 << 30
"""Bytes from which they are in any case."""

ADVICE = (
    "build the model once, in a cell above, and give it to the function as a parameter: then all "
    "ranks share its memory"
)


def advice(task: Call | Cell, ranks: int, available: int | None) -> tuple[str, ...]:
    """Return how much ranks take that each build a model, and what to write instead.

    Empty where none builds any, or what they build is too little to be the reason.
    """
    built = [(unit, call, _bytes_of(unit, call)) for unit, call in models_built(task)]
    size = ranks * sum(count for *_, count in built)
    if ranks < 2 or size < min(LARGE, SHARE * (available or LARGE)):
        return ()  # there is no evidence that they are what uses the memory
    unit, call, _ = max(built, key=lambda entry: entry[2])
    place = f"{unit.place}, line {call.lineno}" if unit.place else f"line {call.lineno}"
    text = f"each of {ranks} ranks builds a model of its own ({place})"
    text += f": {ranks} x {format_bytes(size // ranks)} = {format_bytes(size)}"
    text += f", and {format_bytes(available)} were available" if available is not None else ""
    is_too_much = available is not None and size > available
    reason = "too much for this host's memory" if is_too_much else "if memory ran out"
    return (f"{reason}: {text}", ADVICE)


def _bytes_of(unit: Unit, call: ast.Call) -> int:
    first = call.args[0] if call.args else next((k.value for k in call.keywords), None)
    if first is None or isinstance(first, ast.Starred):
        return 0
    argument = _value(first, unit)
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "from_pretrained":
        return checkpoint_bytes(argument) if type(argument) is str else 0
    if isinstance(function, ast.Attribute) and function.attr == "from_config":
        return _built_on_meta(_value(function.value, unit), "from_config", argument)
    return _built_on_meta(_value(function, unit), "__call__", argument)


def _value(node: ast.expr, unit: Unit) -> Any:
    """Return what a constant, a notebook variable or a configuration is; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call):
        return _configuration(node, unit)
    return unit.value(node) if isinstance(node, ast.Name) else None


def _configuration(call: ast.Call, unit: Unit) -> Any:
    """Return transformers' configuration that a call with constants alone makes; else None.

    Nothing but transformers' own code is run for it, and nothing is fetched.
    """
    function, options = call.func, {}
    if isinstance(function, ast.Attribute) and function.attr == "from_pretrained":
        # Nor is anybody asked whether a repository's code may run.
        function, options = function.value, {"local_files_only": True, "trust_remote_code": False}
    cls = _value(function, unit)
    if not isinstance(cls, type) or not cls.__module__.startswith("transformers."):
        return None
    if not cls.__name__.endswith("Config"):
        return None
    try:
        values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} | options
        make: Any = getattr(cls, "from_pretrained", cls) if options else cls
        return make(*map(ast.literal_eval, call.args), **values)
    except Exception:  # no constants, or what transformers will report to the rank itself
        return None


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


def _built_on_meta(cls: Any, way: str, config: Any) -> int:
    """Return the bytes of a transformers model of that configuration."""
    torch, transformers = sys.modules.get("torch"), sys.modules.get("transformers")
    known = getattr(transformers, "PreTrainedConfig", getattr(transformers, "PretrainedConfig", ()))
    if torch is None or not isinstance(cls, type) or not isinstance(config, known):
        return 0
    if not cls.__module__.startswith("transformers."):
        return 0
    safe = {} if way == "__call__" else {"trust_remote_code": False}
    build = cls if way == "__call__" else getattr(cls, way, None)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build(config, **safe)  # type: ignore[misc]
            tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    except Exception:  # an estimate is never worth a launch
        return 0
    return sum(t.numel() * t.element_size() for t in tensors.values())
