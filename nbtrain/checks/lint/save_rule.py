"""The rule about files that every rank would write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...findings import Finding
from .program import Program
from .source_index import Unit, called, dotted, is_function, receiver

_NUMPY = ("save", "savez", "savez_compressed")
_WRITERS = {
    **dict.fromkeys(("torch.save", "joblib.dump", "pickle.dump", "cloudpickle.dump"), 1),
    **dict.fromkeys(("save_file", "safetensors.torch.save_file", "safe_save_file"), 1),
    **{f"{numpy}.{save}": 0 for numpy in ("np", "numpy") for save in _NUMPY},
}
"""What writes a file, and which argument says where."""

_OWN = re.compile(
    r"rank|process|worker|device|pid|uuid|te?mp|seed|host|buffer|bytes|stream|proc|shard|null",
    re.IGNORECASE,
)
"""Names in a path that may make it each rank's own."""

_PATHS = frozenset(
    {"join", "joinpath", "Path", "str", "format", "fspath", "open", "with_suffix", "with_name"}
    | {"expanduser", "resolve", "absolute", "abspath", "PurePath", "strftime", "now", "round"}
)
"""What makes the same path on every rank if it is given the same."""

_SHARDED = re.compile(
    r"FSDP|FullyShardedDataParallel(Plugin)?|fully_shard|FullyShard\w*|ParallelismConfig|tp_plan"
    r"|parallelize_module|deepspeed|DeepSpeedPlugin|MegatronLMPlugin|fsdp_plugin|dp_shard_size"
)
"""What shows that a rank has a part of the model: then all ranks have to take part in a save."""


def saving(program: Program) -> Iterator[Finding]:
    """A file written by every rank."""
    if any(map(_SHARDED.fullmatch, program.names)):
        return
    main = "accelerator.is_main_process" if program.accelerated else "nbtrain.rank() == 0"
    for unit, call in program.calls():
        path = _written(call)
        if path is None or unit.scope(call) not in program.everywhere:
            continue
        if not program.guarded(call, unit) and _is_shared(path, program, unit):
            yield unit.finding(
                call,
                "save",
                "every rank would write this file at the same time; write it under "
                f"`if {main}:`, or put the rank into its path",
            )


def _written(call: ast.Call) -> ast.expr | None:
    """Return where a call writes to, if it writes whatever the rank."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    place = _WRITERS.get(dotted(call.func))
    if called(call) == "save_pretrained" and receiver(call) is not None:
        place = 0
    if place is None or keywords.keys() & {None, "is_main_process", "save_function"}:
        return None
    if len(call.args) > place:
        return call.args[place]
    given = (keywords.get(name) for name in ("f", "file", "filename", "save_directory"))
    return next(filter(None, given), None)


def _is_shared(path: ast.expr, program: Program, unit: Unit, depth: int = 4) -> bool:
    """Return whether a path is certain to be the same on every rank."""
    if depth == 0 or program.mentions_rank(path, unit):
        return False
    for node in ast.walk(path):
        if isinstance(node, ast.Call) and called(node) not in _PATHS:
            return False
        part = dotted(node).rpartition(".")[2]
        if part and _OWN.search(part):
            return False
        for bound in unit.bindings(node) if isinstance(node, ast.Name) else ():
            if isinstance(bound.statement, ast.arg):
                function = unit.scope(bound.statement)
                if is_function(function) and function is not unit.entry:
                    return False  # what callers hand in is not known
            elif bound.value is not None:
                if not _is_shared(bound.value, program, unit, depth - 1):
                    return False
            elif isinstance(bound.statement, ast.Assign):
                return False
    return not isinstance(path, (ast.Starred, ast.Lambda))
