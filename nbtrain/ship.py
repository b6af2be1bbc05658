"""What a rank in a fresh interpreter needs of the notebook: packed there, unpacked in each rank.

One file in memory holds the plan, the values its cell or function refers to, the state of the
random generators and the source of the notebook's functions. It is what ``torch.save`` writes, by
a cloudpickle of our own, so that tied weights stay tied and an optimizer keeps pointing at its
model. Every rank maps the tensors copy-on-write (``torch.load(mmap=True)``): however many ranks
there are, the data is in memory once until one of them writes to it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import linecache
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import cloudpickle

from . import ambient, serialize
from .errors import PlanError
from .names import names_read
from .pickling import Nowhere, Packing, Pickler, Probe, bound
from .plan import Call, Cell, Plan

_KERNEL_ONLY = ("exit", "quit")  # IPython's hold the shell; an interpreter has its own


@dataclass(frozen=True)
class Cargo:
    """What was packed, unpacked: the plan, and the classes of the notebook that came with it."""

    plan: Plan
    classes: frozenset[type]


class Parcel:
    """A packed plan. `path` opens it in a process that inherits `descriptors`."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # no name that could stay behind, no /dev/shm to fill
            self._file: Any = open(os.memfd_create("nbtrain"), "rb")  # noqa: SIM115
            self.descriptors: tuple[int, ...] = (self._file.fileno(),)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="nbtrain-")  # noqa: SIM115
            self.descriptors = ()
            self.path = self._file.name

    def close(self) -> None:
        """Let go of it; ranks that have opened it keep what they mapped."""
        self._file.close()


def pack(plan: Plan) -> Parcel:
    """Pack a plan for fresh processes. Raises `PlanError` naming the variable that cannot go."""
    import torch

    main = vars(sys.modules["__main__"])
    task = plan.task
    modules = submodules(task.source, task.namespace) if isinstance(task, Cell) else []
    plan = _with_needed_names(plan)
    packing = Packing(main, plan)
    pickling: Any = types.SimpleNamespace(__name__=__name__, Pickler=bound(Pickler, packing))
    # What comes late is known only when all before it is packed.
    late = packing.late_classes, packing.late_sources, packing.late_grads
    contents = (ambient.collect(), modules, _marked(plan), *late)
    parcel = Parcel()
    try:
        with _unchecked(torch):
            torch.save(contents, parcel.path, pickle_module=pickling, pickle_protocol=5)
    except BaseException as error:  # an interrupt too: no copy of the data stays behind
        parcel.close()
        if isinstance(error, Exception):  # any reducer of any class may raise anything
            raise PlanError(_explained(plan, packing, error)) from error
        raise
    return parcel


def unpack(path: str) -> Cargo:
    """Load what `pack` wrote, into this process's ``__main__``."""
    import torch

    main = vars(sys.modules["__main__"])
    contents = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    around, modules, marked, classes, sources, grads = cast(
        "tuple[Any, list[str], Any, list[type], dict[str, Any], list[Any]]", contents
    )
    for name in modules:
        with contextlib.suppress(ImportError):  # it was made in the notebook's process
            importlib.import_module(name)
    for leaf, grad in grads:
        leaf.grad = grad
    linecache.cache.update(sources)
    for cls in classes:
        main.setdefault(cls.__qualname__, cls)
    plan = _unmarked(marked, main)
    # Else a class that goes back by value would be written into the notebook's own (cloudpickle).
    trackers = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    trackers.clear()
    ambient.restore(around)
    return Cargo(plan, frozenset(c for c in classes if main.get(c.__qualname__) is c))


def _with_needed_names(plan: Plan) -> Plan:
    """Reduce a cell's namespace to what the cell may read of it."""
    task = plan.task
    if not isinstance(task, Cell):
        return plan
    names = names_read(task.source, task.filename) | {p.name for p in task.parameters}
    needed = {n: task.namespace[n] for n in sorted(names & task.namespace.keys())}
    check_graphs(needed)
    for name in _KERNEL_ONLY:
        needed.pop(name, None)
    if "display" in names and hasattr(builtins, "display"):  # IPython's, among the builtins
        needed["__builtins__"] = {"display": builtins.display}
    return replace(plan, task=replace(task, namespace=needed))


def check_graphs(namespace: dict[str, Any]) -> None:
    """Refuse a tensor that was computed from others that need gradients: it would not be here."""
    torch = sys.modules["torch"]
    for name, value in namespace.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise PlanError(
                f"`{name}` is computed from tensors that need gradients, and a fresh process would "
                f"get it without them. Send `{name}.detach()`, or compute it in the function."
            )


def submodules(source: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the submodules that a source names (``xml.etree``): importing ``xml`` brings none."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        root = namespace.get(node.id) if isinstance(node, ast.Name) and path else None
        name = root.__name__ if type(root) is types.ModuleType else ""
        for part in path if name else ():
            name = f"{name}.{part}"
            if name in sys.modules:
                found[name] = None
    return list(found)


_loading = "what the cell refers to"


def loading() -> str:
    """Return which variable is being loaded, or was when loading failed."""
    return _loading


@dataclass(frozen=True)
class _Mark:
    """Goes before a value, and tells by being loaded that the value is next."""

    name: str

    def __reduce__(self) -> Any:
        return _now_loading, (self.name,)


def _now_loading(name: str) -> None:
    global _loading
    _loading = name


def _marked(plan: Plan) -> tuple[Plan, list[tuple[_Mark, str, Any]]]:
    """Return the plan without its values, and these, each behind a mark with its name."""
    task = plan.task
    if isinstance(task, Cell):
        values = [(_Mark(f"`{n}`"), n, v) for n, v in task.namespace.items()]
        return replace(plan, task=replace(task, namespace={})), values
    names = (f"argument {i}" for i in range(len(task.args)))
    values = [
        (_Mark(f"`{_name_of(task.function)}`"), "function", task.function),
        *((_Mark(n), "args", v) for n, v in zip(names, task.args, strict=True)),
        *((_Mark(f"`{n}`"), f"kwargs {n}", v) for n, v in task.kwargs.items()),
    ]
    return replace(plan, task=Call(len)), values


def _unmarked(marked: tuple[Plan, list[Any]], main: dict[str, Any]) -> Plan:
    """Return the plan with its values again; a cell's go into `main`."""
    plan, values = marked
    task = plan.task
    if isinstance(task, Cell):
        namespace = {name: value for _, name, value in values}
        builtins.__dict__.update(namespace.pop("__builtins__", {}))
        main.update(namespace)
        return replace(plan, task=replace(task, namespace=main))
    function = next(value for _, kind, value in values if kind == "function")
    args = tuple(value for _, kind, value in values if kind == "args")
    kwargs = {
        kind.removeprefix("kwargs "): value
        for _, kind, value in values
        if kind.startswith("kwargs ")
    }
    return replace(plan, task=Call(function, args, kwargs))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", "the function"))


@contextlib.contextmanager
def _unchecked(torch: Any) -> Iterator[None]:
    """Save without checksums, which take half of the time; memory needs none."""
    options = torch.serialization
    if not hasattr(options, "set_crc32_options"):  # torch 2.6 and later
        yield
        return
    before = options.get_crc32_options()
    options.set_crc32_options(False)
    try:
        yield
    finally:
        options.set_crc32_options(before)


def _explained(plan: Plan, packing: Packing, error: Exception) -> str:
    """Say which variable cannot go to another process, and what to do."""
    probe = bound(Probe, packing)

    def dump(value: Any) -> None:
        probe(Nowhere()).dump(value)

    for name, value in _candidates(plan.task):
        try:
            dump(value)
        except Exception as reason:  # as above
            path, part = serialize.find_unpicklable(value, dump, name)
            return (
                f"`{path}`, a {serialize.type_name(part)}, cannot be sent to a fresh process "
                f"({reason}). Build it inside the training function."
            )
    return f"the cell's variables cannot be sent to a fresh process together ({error})"


def _candidates(task: Call | Cell) -> Iterator[tuple[str, Any]]:
    if isinstance(task, Cell):
        yield from task.namespace.items()
        return
    yield _name_of(task.function), task.function
    yield from ((f"argument {i}", v) for i, v in enumerate(task.args))
    yield from task.kwargs.items()
