"""The rules about ``backward``, devices and files. In doubt, they find nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from ...findings import Finding
from .source import MISSING, Source, called_name, dotted_name, names_in, receiver

ACCELERATORS = re.compile(r"(cuda|xpu|npu|hpu|mlu|musa)(:\d+)?")
"""A device string that pins an accelerator."""


def check_backward(source: Source) -> Iterator[Finding]:
    """Yield a finding for each ``loss.backward()`` in a step that has an Accelerator.

    The step's own function steps the optimizer, and calls the Accelerator's `prepare` or takes the
    Accelerator as a parameter. Other functions yield nothing: they may train without Accelerate, to
    compare.
    """
    stepping, prepared = set[ast.AST](), set[ast.AST]()
    for call in source.calls:
        if called_name(call) == "step":
            stepping.add(source.scope(call))
        if called_name(call).startswith("prepare") and source.is_accelerator(receiver(call)):
            prepared.add(source.scope(call))
    for argument in source.nodes:
        if isinstance(argument, ast.arg) and "accelerator" in argument.arg.lower():
            prepared.add(source.scope(argument))
    for call in source.calls:
        loss = receiver(call)
        is_backward = called_name(call) == "backward" and loss is not None and not call.args
        if not is_backward or source.scope(call) not in stepping & prepared:
            continue
        assert loss is not None
        is_own = dotted_name(loss) in ("self", "cls") or called_name(loss) == "super"
        if not is_own and not source.is_accelerator(loss) and source.runs(call):
            text = ast.unparse(loss)
            yield source.finding(
                call,
                "backward",
                "`.backward()` bypasses Accelerate, which scales the loss for fp16 and for "
                "gradient accumulation; write "
                f"`accelerator.backward({text if len(text) <= 40 else 'loss'})`",
            )


_CHOOSERS = re.compile(r"Accelerator|PartialState|\w*TrainingArguments").fullmatch
"""What makes a rank's own GPU the current one, where ranks train on GPUs."""

_TAKE_A_TYPE = frozenset({"GradScaler", "autocast", "custom_fwd", "custom_bwd"})
"""What takes the type of a device: "cuda" is right there."""

_ASKS = frozenset({"is_available", "device_count", "is_cuda_available", "is_torch_cuda_available"})


def check_devices(source: Source, host: str, names: set[str]) -> Iterator[Finding]:
    """Yield findings for devices that are the same on every rank.

    Args:
        host: the type of device that the ranks train on ("cpu", "cuda", "xla").
        names: the names in all sources of the task.
    """
    instead = "accelerator.device"
    if not has_accelerator(names):
        number = "local_rank" if "local_rank" in names else "os.environ['LOCAL_RANK']"
        instead = f'f"cuda:{{{number}}}"'
    for node, device in _pinned_devices(source, host):
        if source.runs(node):
            yield source.finding(
                node,
                "device",
                f"{device} is hard-coded, so every rank would use the same device; "
                f"write `{instead}`",
            )
    reported = set[str]()
    for name in _placing_names(source):
        device = notebook_device(source, name)
        on_cpu = device == "cpu" and (host == "cpu" or "device" not in name.id.lower())
        if device and not on_cpu and name.id not in reported and source.runs(name):
            reported.add(name.id)
            yield source.finding(
                name,
                "device",
                f"`{name.id}` is a {device} device of the notebook, so every rank would use the "
                f"same; use `{instead}`",
            )


def has_accelerator(names: set[str]) -> bool:
    """Return whether code with these names uses Accelerate's Accelerator."""
    return "Accelerator" in names or "accelerator" in names


def notebook_device(source: Source, name: ast.Name) -> str:
    """Return the type of the device that a name of the notebook holds, as "cuda", else ''."""
    value, torch = source.value(name), sys.modules.get("torch")
    if type(value) is not str and type(value) is not getattr(torch, "device", MISSING):
        return ""
    text = str(value)
    known = ACCELERATORS.fullmatch(text) or text in ("cpu", "mps", "mps:0")
    return text.partition(":")[0] if known else ""


def _pinned_devices(source: Source, host: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that pins every rank to one device, with the device.

    A plain "cuda" is left out where a call chooses the rank's GPU. So is code behind a ``hasattr``
    of torch and, on a host without GPUs (`host` is "cpu"), behind a test for a GPU. Nothing in a
    source that mentions ``CUDA_VISIBLE_DEVICES``.
    """
    texts = (node.value for node in source.nodes if isinstance(node, ast.Constant))
    if "CUDA_VISIBLE_DEVICES" in texts:
        return
    is_chosen = any(map(_chooses_device, source.calls))
    is_chosen |= host != "cpu" and any(_CHOOSERS(called_name(call)) for call in source.calls)
    for node, device in _written_devices(source):
        tests = [a.test for a in source.ancestors(node) if isinstance(a, (ast.If, ast.IfExp))]
        asks = host == "cpu" and any(names_in(test) & _ASKS for test in tests)
        is_for_old_torch = any("hasattr(torch" in ast.unparse(test) for test in tests)
        if (":" in device or not is_chosen) and not asks and not is_for_old_torch:
            yield node, device


def _chooses_device(call: ast.Call) -> bool:
    """Return whether a call makes a plain "cuda" each rank's own: ``set_device(local_rank)``."""
    sets = dotted_name(call.func).endswith(("cuda.set_device", "accelerator.set_device_index"))
    is_constant = not call.args or isinstance(call.args[0], ast.Constant)
    return (sets and not is_constant) or called_name(call) == "init_device_mesh"


def _written_devices(source: Source) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that write a device out, and the device."""
    for call in source.calls:
        name, arguments = called_name(call), devices_of(call)
        sets = dotted_name(call.func).endswith("cuda.set_device")
        if sets or (dotted_name(call.func) == "torch.device" and len(call.args) == 1):
            arguments += call.args
        if name == "cuda" and receiver(call) and not call.args and not call.keywords:
            yield call, "cuda"
        for index in call.args[-1:] if name == "cuda" or sets else ():
            if isinstance(index, ast.Constant) and type(index.value) is int:
                yield call, f"cuda:{index.value}"
        for argument in arguments if name not in _TAKE_A_TYPE else ():
            yield from pinned_strings(argument)
    # device = "cuda", where that variable then places something
    used = {(n.id, source.scope_of_name(n.id, source.scope(n))) for n in _placing_names(source)}
    for node in source.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if (name, source.scope(node)) in used:
                yield from pinned_strings(node.value)


def pinned_strings(argument: ast.expr | None) -> Iterator[tuple[ast.expr, str]]:
    """Yield the pinned devices an argument may be: itself, or a branch of ``a if … else b``."""
    if isinstance(argument, ast.IfExp):
        yield from pinned_strings(argument.body)
        yield from pinned_strings(argument.orelse)
    elif isinstance(argument, ast.Constant):
        text = argument.value
        if isinstance(text, str) and ACCELERATORS.fullmatch(text):
            yield argument, text


def devices_of(call: ast.Call) -> list[ast.expr]:
    """Return the arguments that name a device: ``device=…``, and the first of ``.to(…)``."""
    devices = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    return devices + (call.args[:1] if called_name(call) == "to" and receiver(call) else [])


def _placing_names(source: Source) -> Iterator[ast.Name]:
    """Yield the variables given as a device: ``device=d``, ``.to(d)``, ``torch.device(d)``."""
    for call in source.calls:
        first = call.args[:1] if dotted_name(call.func) == "torch.device" else []
        for argument in devices_of(call) + first:
            if isinstance(argument, ast.Name):
                yield argument


_WRITERS = {
    **dict.fromkeys(("torch.save", "joblib.dump", "pickle.dump", "cloudpickle.dump"), 1),
    **dict.fromkeys(("save_file", "safetensors.torch.save_file", "safe_save_file"), 1),
    **dict.fromkeys(("np.save", "np.savez", "np.savez_compressed"), 0),
    **dict.fromkeys(("numpy.save", "numpy.savez", "numpy.savez_compressed"), 0),
}
"""Functions that write a file, and the position of the argument with its path."""

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


def check_saves(source: Source, names: set[str]) -> Iterator[Finding]:
    """Yield a finding for each file that every rank would write.

    `names` are those in all sources of the task. Nothing if they show that each rank has only a
    part of the model.
    """
    if any(map(_SHARDED.fullmatch, names)):
        return
    condition = "accelerator.is_main_process" if has_accelerator(names) else "nbtrain.rank() == 0"
    for call in saves_of_every_rank(source):
        yield source.finding(
            call,
            "save",
            "every rank would write this file at the same time; write it under "
            f"`if {condition}:`, or put the rank into its path",
        )


def saves_of_every_rank(source: Source) -> Iterator[ast.Call]:
    """Yield the calls that write a file, which would be the same one on every rank."""
    for call in source.calls:
        path = _written_path(call)
        if path is None or source.scope(call) not in source.everywhere or source.is_guarded(call):
            continue
        if _is_same_on_all_ranks(path, source):
            yield call


def _written_path(call: ast.Call) -> ast.expr | None:
    """Return the expression for the path that a call writes to, if every rank writes it.

    Known are the functions in `_WRITERS` and ``x.save_pretrained``, not `open`. With ``**kwargs``,
    `is_main_process` or `save_function`, not every rank may write.
    """
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    place = _WRITERS.get(dotted_name(call.func))
    if called_name(call) == "save_pretrained" and receiver(call) is not None:
        place = 0
    if place is None or keywords.keys() & {None, "is_main_process", "save_function"}:
        return None
    if len(call.args) > place:
        return call.args[place]
    given = (keywords.get(name) for name in ("f", "file", "filename", "save_directory"))
    return next(filter(None, given), None)


def _is_same_on_all_ranks(path: ast.expr, source: Source, depth: int = 4) -> bool:
    """Return whether a path is certain to be the same on every rank."""
    if depth == 0 or source.mentions_rank(path) or isinstance(path, (ast.Starred, ast.Lambda)):
        return False
    for node in ast.walk(path):
        name = dotted_name(node).rpartition(".")[2]
        if name and _OWN.search(name):
            return False
        if isinstance(node, ast.Call) and called_name(node) not in _PATHS:
            return False
        bound = source.bindings(node) if isinstance(node, ast.Name) else []
        for statement, value in bound:
            if len(bound) > 1 or (value is None and isinstance(statement, ast.Assign)):
                return False  # what it holds there is not known
            if isinstance(statement, ast.arg) and source.scope(statement) is not source.entry:
                return False  # what callers hand in is not known
            if value is not None and not _is_same_on_all_ranks(value, source, depth - 1):
                return False
    return True
