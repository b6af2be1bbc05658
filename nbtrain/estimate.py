"""How much memory a rank will take for the models that it builds itself, as far as one can tell.

Told without loading one: the files of a checkpoint have a size, and a transformers model is built
from its configuration on torch's ``meta`` device, which has no memory. A model of the user's own
class is not built: that would run the user's code.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path
from typing import Any

from .host import in_words
from .lint import Unit, models_built
from .plan import Call, Cell


def bytes_built(task: Call | Cell) -> int:
    """Return the bytes of weights that each rank builds; 0 where that cannot be told."""
    return sum(_bytes_of(unit, call) for unit, call in models_built(task))


ADVICE = "build it once, in a cell above, and every rank shares it"


def words(task: Call | Cell, ranks: int, available: int | None) -> tuple[str, ...]:
    """Word what ranks take that each build a model, and what to write instead.

    Empty where none is built.
    """
    built = [(unit, call, _bytes_of(unit, call)) for unit, call in models_built(task)]
    if not built or ranks < 2:
        return ()
    unit, call, _ = max(built, key=lambda one: one[2])
    size = ranks * sum(one[2] for one in built)
    where = f"{unit.place}, line {call.lineno}" if unit.place else f"line {call.lineno}"
    told = f"each of {ranks} ranks builds a model of its own ({where})"
    if size:
        told += f": {ranks} x {in_words(size // ranks)} = {in_words(size)}"
        told += f", and {in_words(available)} were available" if available is not None else ""
    is_too_much = available is not None and size > available
    why = "too much for this host's memory" if is_too_much else "should memory have been short"
    lines = _instead(unit, call) or (f"{ADVICE}: the function gets it as a parameter",)
    handed = "where it is launched, the function is handed the model, as its first argument"
    is_called = isinstance(task, Call) and len(lines) > 1
    return (f"{why}: {told}", *lines, *((handed,) if is_called else ()))


def _instead(unit: Unit, call: ast.Call) -> tuple[str, ...]:
    """Return the lines by which ranks share one model, shown on the user's own; empty where there
    is more to it."""
    above = list(unit.ancestors(call))
    built = next((node for node in above if isinstance(node, ast.stmt)), None)
    function = next((node for node in above if isinstance(node, ast.FunctionDef)), None)
    if not isinstance(built, ast.Assign) or len(built.targets) != 1 or function is None:
        return ()
    target, value = built.targets[0], built.value
    if not isinstance(target, ast.Name) or function is not unit.entry:
        return ()
    while value is not call:  # as in Net(config).to(device)
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return ()
        value = value.func.value
    own = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    used = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
    if target.id in own or not used <= unit.namespace.keys() - own:
        return ()  # a cell above has not all that it takes, or would move the model to a device
    name, made = target.id, ast.unparse(call)
    rest = ast.unparse(built.value).removeprefix(made)
    gone = f"becomes:  {name} = {name}{rest}" if rest else "goes"
    taken = ", ".join(filter(None, (name, ast.unparse(function.args))))
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return (
        f"{ADVICE}:  {name} = {made}",
        f"line {built.lineno} {gone}",
        f"line {function.lineno} becomes:  def {function.name}({taken}){returns}:",
    )


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
    return unit.value(node.id, node) if isinstance(node, ast.Name) else None


def _configuration(call: ast.Call, unit: Unit) -> Any:
    """Return transformers' configuration that a call with constants alone makes; else None.

    Nothing but transformers' own code is run for it, and nothing is fetched.
    """
    function, options = call.func, {}
    if isinstance(function, ast.Attribute) and function.attr == "from_pretrained":
        function, options = function.value, {"local_files_only": True}
    cls = _value(function, unit)
    if not isinstance(cls, type) or not cls.__module__.startswith("transformers."):
        return None
    if not cls.__name__.endswith("Config"):
        return None
    try:
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        words = [ast.literal_eval(argument) for argument in call.args]
        if options:
            given["trust_remote_code"] = False  # nor is anybody asked whether that may run
        make: Any = getattr(cls, "from_pretrained", cls) if options else cls
        return make(*words, **given, **options)
    except Exception:  # no constants, or what transformers will tell the rank itself
        return None


def checkpoint_bytes(name: str) -> int:
    """Return the size of a checkpoint's weights: a folder, or a model of the hub that is here."""
    folder = Path(name)
    if not folder.is_dir():
        hub = sys.modules.get("huggingface_hub")
        found = None
        with contextlib.suppress(Exception):  # not a repository's name, whatever the hub calls it
            found = hub.try_to_load_from_cache(name, "config.json") if hub is not None else None
        if not isinstance(found, str):
            return 0
        folder = Path(found).parent
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
