"""The rules about what is to happen once: files that ranks write, and runs of trackers."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from ...findings import Finding
from .nested_launch import path_of_call
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
    for unit, call in program.calls:
        path = _written(call)
        if path is None or program.runs_on_one_rank(call, unit):
            continue
        if _is_shared(path, program, unit):
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
    for bound in unit.bindings(name):
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


_STARTS_A_RUN = re.compile(
    r"(wandb|trackio|swanlab)\.init|mlflow\.start_run|comet_ml\.start|clearml\.Task\.init"
)
_OF_EACH_RANK = frozenset({None, "group", "id", "run_id", "mode", "settings", "nested", "disabled"})
"""Arguments that say that several processes share a run, or that there is none."""


def tracker_runs(program: Program) -> Iterator[Finding]:
    """A run of a tracker that every rank would start."""
    main = "accelerator.is_main_process" if program.accelerated else "nbtrain.rank() == 0"
    for unit, call in program.calls:
        path = path_of_call(call, unit)
        if not _STARTS_A_RUN.fullmatch(path) or program.runs_on_one_rank(call, unit):
            continue
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(map(program.mentions_rank, given)) or _OF_EACH_RANK & {k.arg for k in call.keywords}:
            continue
        library = path.partition(".")[0]
        if library == "wandb" and _is_off(program):
            continue
        option = f", or leave it out and run the cell with `--track {library}`"
        yield unit.finding(
            call,
            "tracker",
            f"every rank would start a run of {library}; write it under `if {main}:`, and what "
            f"uses the run, too{option}",
        )


def _is_off(program: Program) -> bool:
    """Return whether W&B is, or may be, told in the environment to do nothing."""
    names = {"WANDB_MODE", "WANDB_DISABLED"}
    constants = {n.value for u in program.units for n in u.nodes if isinstance(n, ast.Constant)}
    return bool(names & os.environ.keys() or names & constants)
