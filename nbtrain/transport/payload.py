"""Packs what a rank in a fresh interpreter needs of the notebook, and unpacks it in each rank.

One file in memory holds the plan, the values its cell or function refers to, the state of the
random generators and the source of the notebook's functions. `torch.save` writes it, with a
cloudpickle of our own, so that tied weights stay tied, an optimizer keeps pointing at its model,
and functions of the notebook keep sharing one namespace. Every rank maps the tensors copy-on-write
(``torch.load(mmap=True)``), so the data is in memory once until a rank writes to it. A value that
would not work in another process is refused.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import io
import linecache
import os
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from ..errors import PlanError
from ..planning.accelerate_objects import is_shared_state, shared_state
from ..planning.plan import Cell, Plan
from ..planning.task_values import arguments, owner_name, variables
from ..system.files import open_memory_descriptor
from . import process_state, result_pickler
from .result_pickler import CodePickler
from .weights.models import Part, get_part

STATES = "_nbtrain_states"
"""The name under which `pack_values` sends states of values that a process already has."""

_KERNEL_ONLY = ("exit", "quit")  # IPython's hold the shell; an interpreter has its own


class PackedPlan:
    """A packed plan. `path` opens it in a process that inherits `descriptors`."""

    def __init__(self) -> None:
        if (descriptor := open_memory_descriptor()) is not None:
            self._file: Any = open(descriptor, "rb")  # noqa: SIM115
            self.descriptors: tuple[int, ...] = (descriptor,)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="nbtrain-")  # noqa: SIM115
            self.descriptors = ()
            self.path = self._file.name

    def close(self) -> None:
        """Close the file. Ranks that have opened it keep what they mapped."""
        self._file.close()


def pack(
    plan: Plan,
    *,
    is_fresh: bool = True,
    leaves_host: bool = False,
    there: Mapping[int, Part] | None = None,
) -> PackedPlan:
    """Pack a plan for other processes; `is_fresh` ones also get the random states and settings.

    The caller closes the result. A plan that `leaves_host` does not contain multiprocessing's key,
    which is for this host only. `there` maps the ids of values that the process already has to
    their names: of these only the names are sent. Raises `PlanError` naming a variable that cannot
    be sent.
    """
    task = plan.task
    modules = _used_submodules(task) if isinstance(task, Cell) else []
    settings = process_state.collect(with_key=not leaves_host) if is_fresh else None
    if isinstance(task, Cell):
        task = replace(task, namespace=needed_variables(task))
        if "display" in task.source and hasattr(builtins, "display"):  # IPython adds it there
            task.namespace["__builtins__"] = {"display": builtins.display}
    else:
        task = replace(task, owner=owner_name(task))
    return _pack(replace(plan, task=task), modules, settings, there or {})


def pack_values(
    values: Mapping[str, Any], states: Mapping[str, Any], there: Mapping[int, Part]
) -> PackedPlan:
    """Pack values by name, without a task; the caller closes the result.

    `states` are loaded into values that the process already has, which `there` maps by their ids to
    their names. Raises `PlanError` naming a value that cannot be sent.
    """
    plan = Plan(Cell("", "", {**values, **({STATES: states} if states else {})}), "values")
    return _pack(plan, [], None, there)


def _pack(
    plan: Plan, modules: Sequence[str], settings: dict[str, Any] | None, there: Mapping[int, Part]
) -> PackedPlan:
    """Pickle a plan into a file in memory. Raises `PlanError` that names what cannot leave.

    The file is closed if anything is raised, also at an interrupt.
    """
    import torch

    packing = Packing(plan, there)
    # The last three are filled while what precedes them is pickled.
    collected = packing.classes, packing.sources, packing.grads
    contents = (settings, [*modules], plan, *collected)
    packed = PackedPlan()
    try:
        pickling: Any = types.SimpleNamespace(
            __name__=__name__, Pickler=_with_packing(Pickler, packing)
        )
        checks = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # they take half of the time
        try:
            torch.save(contents, packed.path, pickle_module=pickling, pickle_protocol=5)
        finally:
            torch.serialization.set_crc32_options(checks)
    except BaseException as error:  # also an interrupt: no copy of the data is left
        packed.close()
        if isinstance(error, Exception):  # any reducer of any class may raise anything
            raise PlanError(_explain_failure(plan, packing, error)) from error
        raise
    return packed


def unpack(path: str, *, restores: bool = True) -> tuple[Plan, frozenset[type]]:
    """Load what `pack` wrote into this process's ``__main__``, with its modules and sources.

    With `restores`, also sets the random states and settings of the notebook; the plan must have
    been packed with `is_fresh` then. Returns the plan, whose cell has ``__main__`` as its
    namespace, and the classes of the notebook that came with it, unless ``__main__`` already had
    another class of that name.
    """
    import torch

    main = _main_namespace()
    contents: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    settings, modules, plan, classes, sources, grads = contents
    for name in modules:
        with contextlib.suppress(ImportError):  # it was made in the notebook's process
            importlib.import_module(name)
    for leaf, grad in grads:
        leaf.grad = grad
    linecache.cache.update(sources)
    for cls in classes:
        main.setdefault(cls.__qualname__, cls)
    if isinstance(plan.task, Cell):
        builtins.__dict__.update(plan.task.namespace.pop("__builtins__", {}))
        main.update(plan.task.namespace)
        plan = replace(plan, task=replace(plan.task, namespace=main))
    # A class that is sent back by value would be written into the notebook's own (cloudpickle).
    trackers = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    trackers.clear()
    if restores:
        process_state.restore(settings)
    arrived: list[type] = classes
    return plan, frozenset(cls for cls in arrived if main.get(cls.__qualname__) is cls)


def needed_variables(cell: Cell) -> dict[str, Any]:
    """Return the notebook's variables that a cell reads, by name.

    IPython's ``exit`` and ``quit`` are left out. Does not check whether the rest can be pickled.
    Raises `PlanError` for a tensor that would arrive without what it was computed from.
    """
    torch = sys.modules["torch"]
    needed = {n: value for n, value in variables(cell).items() if n not in _KERNEL_ONLY}
    for name, value in needed.items():
        if issubclass(type(value), torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise PlanError(
                f"`{name}` is computed from tensors that need gradients, and a fresh process would "
                f"get it without them. Send `{name}.detach()`, or compute it in the function."
            )
    return needed


def _used_submodules(cell: Cell) -> list[str]:
    """Return the loaded submodules that a cell names: ``import xml`` does not load ``xml.etree``.

    Each by its full name, once. A module that an expression other than ``a.b.c`` reaches is not
    found.
    """
    names: dict[str, None] = {}
    for node in ast.walk(ast.parse(cell.source)):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        root = cell.namespace.get(node.id) if isinstance(node, ast.Name) and path else None
        name = root.__name__ if type(root) is types.ModuleType else ""
        for part in path if name else ():
            name = f"{name}.{part}"
            if name in sys.modules:
                names[name] = None
    return list(names)


def _explain_failure(plan: Plan, packing: Packing, error: Exception) -> str:
    """Return which variable cannot be sent to another process, and what to do.

    Pickles the variables again, one at a time, without tensors' data. If each can be sent, the text
    states that they cannot be sent together, with `error`.
    """

    def dump(value: Any) -> None:
        _with_packing(_Probe, packing)(io.BytesIO()).dump(value)

    task = plan.task
    candidates = {} if isinstance(task, Cell) else {task.name: task.function}
    candidates.update(task.namespace if isinstance(task, Cell) else arguments(task))
    for name, value in candidates.items():
        try:
            dump(value)
        except Exception as reason:  # as above
            path, part = result_pickler.find_unpicklable(value, dump, name)
            remedy = "Build it inside the training function."
            if isinstance(part, types.FunctionType):  # what fails is inside it already
                remedy = "Define it in a file, and import it from there."
            return (
                f"`{path}`, a {result_pickler.type_name(part)}, cannot be sent to a fresh process "
                f"({reason}). {getattr(reason, 'remedy', remedy)}"
            )
    return f"the cell's variables cannot be sent to a fresh process together ({error})"


class Packing:
    """What picklers know of the notebook, and what they have met of it."""

    def __init__(self, plan: Plan, there: Mapping[int, Part]) -> None:
        self.main, self.there = _main_namespace(), there
        self.classes: list[type] = []
        """The notebook's classes."""
        self.sources: dict[str, Any] = {}
        """Entries of `linecache` for functions of the notebook."""
        self.grads: list[tuple[Any, Any]] = []
        """Tensors and their gradients, which no pickle of a tensor has."""
        self.notebook_classes = result_pickler.notebook_classes()
        ipython = sys.modules.get("IPython")
        self.shell = ipython.get_ipython() if ipython is not None else None
        if isinstance(plan.task, Cell):
            self.add_source(plan.task.filename)

    def add_source(self, name: str) -> None:
        """Keep the source of a cell, for tracebacks and `inspect.getsource`.

        Does nothing for a file that exists, or whose source is unknown.
        """
        lines = linecache.getlines(name) if name not in self.sources else []
        if lines and not os.path.exists(name):
            # Without a time, linecache does not look for a file to compare it with.
            self.sources[name] = (sum(map(len, lines)), None, lines, name)


class _Namespace(dict[str, Any]):
    """Stands for the notebook's namespace, which functions that were defined in it share."""

    def __reduce__(self) -> Any:
        return _main_namespace, ()


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


class Pickler(CodePickler):
    packing: Packing

    def __init__(self, file: Any, protocol: int = 5) -> None:
        super().__init__(file, protocol=protocol)
        # cloudpickle (2.2 to 3.1) gives the functions of one namespace a common new one. These
        # get the rank's __main__, where the cell's own assignments reach them as in the notebook.
        self.globals_ref[id(self.packing.main)] = _Namespace(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what a rank has already or cannot get; leave the rest to `CodePickler`.

        A part that the rank has by itself becomes a reference; the shell becomes the rank's. Notes
        in `packing` which of the notebook's classes, sources and gradients were met. Raises
        `NotPortableError` for a compiled function, and what `check_can_leave_process` raises.
        """
        packing = self.packing
        if part := packing.there.get(id(obj)):
            return _get_own_part, part
        if packing.shell is not None and obj is packing.shell:
            return shell_of_rank, ()
        if isinstance(obj, type):
            if obj in packing.notebook_classes:
                packing.classes.append(obj)
        elif type(obj) is types.FunctionType:
            packing.add_source(obj.__code__.co_filename)
            if hasattr(obj, result_pickler.COMPILED):
                remedy = "Call torch.compile in the training function."
                raise NotPortableError("it was compiled", remedy)
        else:
            check_can_leave_process(obj)
            reduced = _reduce(obj, packing)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def _get_own_part(*part: str) -> Any:
    return get_part(part, _main_namespace())


def _with_packing(cls: type[Pickler], packing: Packing) -> type[Pickler]:
    """Return a subclass with its packing, as `torch.save` wants it: made from only a file."""
    return type(cls.__name__, (cls,), {"packing": packing})


class _Probe(Pickler):
    """Pickles everything except the data of tensors, which can always be pickled."""

    def persistent_id(self, obj: Any) -> Any:
        """Return "data" for a storage, in place of its bytes; None for all else."""
        torch = sys.modules["torch"]
        return "data" if torch.is_storage(obj) else None


class NotPortableError(TypeError):
    """A value could be pickled, but would not work in another process."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


_ACCELERATE_MODULES = ("accelerator", "state", "optimizer", "scheduler", "data_loader")
"""Those whose objects belong to one process."""


def check_can_leave_process(obj: Any) -> None:
    """Raise `TypeError` for an object that could be pickled, but would not work elsewhere.

    These are objects of Accelerate that belong to one process, and tensors on an accelerator, for
    which it is a `NotPortableError` with a remedy.
    """
    cls = type(obj)
    if cls.__module__.startswith("accelerate.") and not is_shared_state(obj):
        if cls.__module__.partition(".")[2] in _ACCELERATE_MODULES:
            raise TypeError("it belongs to an Accelerator of the notebook")
    elif isinstance(obj, sys.modules["torch"].Tensor) and obj.device.type not in ("cpu", "meta"):
        remedy = (
            "Move it to the CPU first: for a model, `model.cpu()`. The ranks move it to their GPUs."
        )
        raise NotPortableError(f"it is on {obj.device}", remedy)


def _reduce(obj: Any, packing: Packing) -> Any:
    """Return how to rebuild what cloudpickle and torch would not send, or not as well, if any.

    That is: Accelerate's shared state, an array of at least 64 KiB, and the notebook's cached
    functions and `NewType`. Adds a leaf tensor's gradient to `packing.grads`, and returns None.
    """
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    if is_shared_state(obj):
        return shared_state, ()
    if isinstance(obj, torch.Tensor):
        if obj.is_leaf and obj.grad is not None:
            packing.grads.append((obj, obj.grad))
        return None
    if numpy is not None and type(obj) is numpy.ndarray and obj.nbytes >= 1 << 16:
        # As a tensor on the same memory, it is mapped, not copied.
        with warnings.catch_warnings(), contextlib.suppress(TypeError, ValueError):  # odd dtypes
            warnings.simplefilter("ignore", UserWarning)  # that the array is read-only
            return _make_array, (torch.from_numpy(obj), bool(obj.flags.writeable))
        return None
    if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
        return _make_cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, typing.NewType) and obj.__module__ == "__main__":
        return typing.NewType, (obj.__name__, obj.__supertype__)
    return None


def _make_array(tensor: Any, writeable: bool) -> Any:
    array = tensor.numpy()
    if not writeable:
        array.flags.writeable = False
    return array


def _make_cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def shell_of_rank() -> Any:
    """Return the IPython shell of this process, so that magics of the cell work in a rank.

    Makes it if it does not exist: its namespace is ``__main__``, and it keeps no history. From now
    on, its `clear_output` does nothing.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    quiet = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])
    vars(shell.display_pub)["clear_output"] = lambda *_args, **_kwargs: None
    return shell
