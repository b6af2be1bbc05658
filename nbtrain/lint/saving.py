"""The rule about files: every rank writing the same one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .facts import Unit, called, dotted, is_function, receiver
from .notes import Note
from .program import Program, note

_WRITERS = {
    "torch.save": 1,
    "np.save": 0,
    "np.savez": 0,
    "np.savez_compressed": 0,
    "numpy.save": 0,
    "numpy.savez": 0,
    "numpy.savez_compressed": 0,
    "joblib.dump": 1,
    "pickle.dump": 1,
    "cloudpickle.dump": 1,
    "save_file": 1,
    "safetensors.torch.save_file": 1,
    "safe_save_file": 1,
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


def saving(program: Program) -> Iterator[Note]:
    """A file written by every rank."""
    for unit, call in program.calls():
        path = _written(call, program, unit)
        if path is None or program.runs_on_one_rank(call, unit):
            continue
        if not _is_shared(path, program, unit):
            continue
        yield note(
            unit,
            call,
            "save",
            "every rank would write this file at once; put it under "
            f"`if {_main(program)}:`, or the rank's number into the path",
        )


def _main(program: Program) -> str:
    return "accelerator.is_main_process" if program.accelerated else "nbtrain.rank() == 0"


def _written(call: ast.Call, program: Program, unit: Unit) -> ast.expr | None:
    """Return where a call writes to, if it writes whatever the rank."""
    name = dotted(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in keywords:
        return None
    if called(call) == "save_pretrained" and receiver(call) is not None:
        if keywords.keys() & {"is_main_process", "save_function"}:
            return None
        return call.args[0] if call.args else keywords.get("save_directory")
    if name not in _WRITERS:
        return None
    place = _WRITERS[name]
    if len(call.args) > place:
        return call.args[place]
    given = [keywords[k] for k in ("f", "file", "filename") if k in keywords]
    return given[0] if given else None


def _is_shared(path: ast.expr, program: Program, unit: Unit, depth: int = 4) -> bool:
    """Return whether a path is certain to be the same on every rank."""
    if depth == 0 or program.mentions_rank(path):
        return False
    for node in ast.walk(path):
        if isinstance(node, ast.Call) and called(node) not in _PATHS:
            return False
        part = dotted(node).rpartition(".")[2]
        if part and _OWN.search(part):
            return False
        if isinstance(node, ast.Name) and not _name_is_shared(node, program, unit, depth):
            return False
    return not isinstance(path, (ast.Starred, ast.Lambda))


def _name_is_shared(name: ast.Name, program: Program, unit: Unit, depth: int) -> bool:
    for bound in unit.bindings(name.id, name):
        if isinstance(bound.statement, ast.arg):
            function = unit.scope(bound.statement).node
            if is_function(function) and function is not unit.entry:
                return False  # what callers hand in is not known
        elif bound.value is not None:
            if not _is_shared(bound.value, program, unit, depth - 1):
                return False
        elif isinstance(bound.statement, ast.Assign):
            return False
    return True
