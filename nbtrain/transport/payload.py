"""Packs what a rank in a fresh interpreter needs of the notebook, and unpacks it in each rank.

One file in memory holds the plan, the values its cell or function refers to, the state of the
random generators and the source of the notebook's functions. It is what ``torch.save`` writes, by
a cloudpickle of our own, so that tied weights stay tied, an optimizer keeps pointing at its model,
and functions of the notebook keep sharing one namespace. Every rank maps the tensors copy-on-write
(``torch.load(mmap=True)``): however many ranks there are, the data is in memory once until one of
them writes to it. What would not work where it arrives is refused.
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
import pickle
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import cloudpickle

from ..errors import PlanError
from ..planning.accelerate_objects import is_shared_state, shared_state
from ..planning.plan import Call, Cell, Plan, Task
from ..planning.task_values import arguments, owner_name, variables
from ..system.files import memory_descriptor
from . import process_state, result_pickler
from .result_pickler import CodePickler
from .weights.model_parts import Part, get_part

STATES = "_nbtrain_states"
"""The name under which the states come of what a process has already: see `pack_values`."""

_KERNEL_ONLY = ("exit", "quit")  # IPython's hold the shell; an interpreter has its own


class PackedPlan:
    """A packed plan. `path` opens it in a process that inherits `descriptors`."""

    def __init__(self) -> None:
        if (descriptor := memory_descriptor()) is not None:
            self._file: Any = open(descriptor, "rb")  # noqa: SIM115
            self.descriptors: tuple[int, ...] = (descriptor,)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="nbtrain-")  # noqa: SIM115
            self.descriptors = ()
            self.path = self._file.name

    def close(self) -> None:
        """Let go of it; ranks that have opened it keep what they mapped."""
        self._file.close()


def pack(
    plan: Plan,
    *,
    is_fresh: bool = True,
    leaves_host: bool = False,
    there: Mapping[int, Part] | None = None,
) -> PackedPlan:
    """Pack a plan for processes, `is_fresh` ones get this one's random states and settings, too.

    What `leaves_host` lacks the key by which processes of this host trust each other. Of what is
    `there`, by its id, only its name goes.

    Raises `PlanError` naming the variable that cannot go.
    """
    task = plan.task
    modules = submodules(task.source, task.namespace) if isinstance(task, Cell) else []
    around = process_state.collect(with_key=not leaves_host) if is_fresh else None
    return _packed(_with_needed_names(plan), modules, around, there or {})


def _packed(
    plan: Plan,
    modules: Sequence[str] = (),
    around: dict[str, Any] | None = None,
    there: Mapping[int, Part] | None = None,
) -> PackedPlan:
    import torch

    main = vars(sys.modules["__main__"])
    packing = Packing(main, plan, there or {})
    # What comes late is known only when all before it is packed.
    late = packing.late_classes, packing.late_sources, packing.late_grads
    contents = (around, [*modules], _marked(plan), *late)
    packed = PackedPlan()
    try:
        if around is None and isinstance(plan.task, Cell) and not plan.task.namespace:
            with open(packed.path, "wb") as file:  # no tensor: torch's archive costs time
                bound(Pickler, packing)(file).dump(contents)
            return packed
        pickling: Any = types.SimpleNamespace(__name__=__name__, Pickler=bound(Pickler, packing))
        with _unchecked(torch):
            torch.save(contents, packed.path, pickle_module=pickling, pickle_protocol=5)
    except BaseException as error:  # an interrupt too: no copy of the data stays behind
        packed.close()
        if isinstance(error, Exception):  # any reducer of any class may raise anything
            raise PlanError(_explained(plan, packing, error)) from error
        raise
    return packed


def pack_values(
    values: Mapping[str, Any], states: Mapping[str, Any], there: Mapping[int, Part]
) -> PackedPlan:
    """Pack values that no cell reads, by name. Raises `PlanError`.

    `states` are of values that are there, and load them (`model_parts.dump_state`).
    """
    plan = Plan(Cell("", "", {**values, **({STATES: states} if states else {})}), "values")
    return _packed(plan, there=there)


def unpack(path: str, *, restores: bool = True) -> tuple[Plan, frozenset[type]]:
    """Load what `pack` wrote, into this process's ``__main__``.

    With `restores`, the random states and settings of the notebook, too.

    Returns the plan, and the classes of the notebook that came with it.
    """
    main = vars(sys.modules["__main__"])
    contents = _contents(path)
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
    if restores:
        process_state.restore(around)
    return plan, frozenset(c for c in classes if main.get(c.__qualname__) is c)


def _contents(path: str) -> Any:
    """Load a file of `torch.save`, or a plain pickle."""
    import torch

    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            return pickle.load(file)
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _with_needed_names(plan: Plan) -> Plan:
    """Reduce a cell's namespace to what the cell may read of it; name the object of a method."""
    task = plan.task
    if not isinstance(task, Cell):
        return replace(plan, task=replace(task, owner=owner_name(task)))
    needed = needed_names(task)
    if "display" in task.source and hasattr(builtins, "display"):  # IPython's, among the builtins
        needed["__builtins__"] = {"display": builtins.display}
    return replace(plan, task=replace(task, namespace=needed))


def needed_names(cell: Cell) -> dict[str, Any]:
    """Return what a cell reads of the notebook, without what belongs to its process alone.

    Raises `PlanError` for a tensor that would not arrive as it is.
    """
    needed = {n: value for n, value in variables(cell).items() if n not in _KERNEL_ONLY}
    check_graphs(needed)
    return needed


def check_graphs(namespace: dict[str, Any]) -> None:
    """Refuse a tensor that was computed from others that need gradients: it would not be here."""
    torch = sys.modules["torch"]
    for name, value in namespace.items():
        if issubclass(type(value), torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise PlanError(
                f"`{name}` is computed from tensors that need gradients, and a fresh process would "
                f"get it without them. Send `{name}.detach()`, or compute it in the function."
            )


def submodules(source: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the submodules that a source names (``xml.etree``): importing ``xml`` brings none."""
    names: dict[str, None] = {}
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
                names[name] = None
    return list(names)


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


def _marked(plan: Plan) -> tuple[Plan, list[tuple[_Mark, Any, Any]]]:
    """Return the plan without its values, and these, each behind a mark with its name.

    Each has a key: a cell's and keyword arguments their name, positional ones their index, the
    function None.
    """
    task = plan.task
    if isinstance(task, Cell):
        values: dict[Any, Any] = task.namespace
        bare: Task = replace(task, namespace={})
    else:
        values = {None: task.function, **dict(enumerate(task.args)), **task.kwargs}
        bare = replace(task, function=len, args=(), kwargs={})
    labels = {key: f"argument{key}" if type(key) is int else f"`{key}`" for key in values}
    labels[None] = f"`{task.name if isinstance(task, Call) else ''}`"
    return replace(plan, task=bare), [(_Mark(labels[key]), key, v) for key, v in values.items()]


def _unmarked(marked: tuple[Plan, list[Any]], main: dict[str, Any]) -> Plan:
    """Return the plan with its values again; a cell's go into `main`."""
    plan, values = marked[0], {key: value for _, key, value in marked[1]}
    task = plan.task
    if isinstance(task, Cell):
        builtins.__dict__.update(values.pop("__builtins__", {}))
        main.update(values)
        return replace(plan, task=replace(task, namespace=main))
    function = values.pop(None)
    args = tuple(values.pop(index) for index in [key for key in values if type(key) is int])
    return replace(plan, task=replace(task, function=function, args=args, kwargs=values))


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

    def dump(value: Any) -> None:
        bound(Probe, packing)(io.BytesIO()).dump(value)

    for name, value in _candidates(plan.task):
        try:
            dump(value)
        except Exception as reason:  # as above
            path, part = result_pickler.find_unpicklable(value, dump, name)
            remedy = "Build it inside the training function."
            if isinstance(part, types.FunctionType):  # what is in the way is inside already
                remedy = "Define it in a file, and import it from there."
            return (
                f"`{path}`, a {result_pickler.type_name(part)}, cannot be sent to a fresh process "
                f"({reason}). {getattr(reason, 'remedy', remedy)}"
            )
    return f"the cell's variables cannot be sent to a fresh process together ({error})"


def _candidates(task: Task) -> Iterator[tuple[str, Any]]:
    if isinstance(task, Call):
        yield task.name, task.function
    yield from (task.namespace if isinstance(task, Cell) else arguments(task)).items()


class Packing:
    """Makes picklers that know the notebook, and remembers what of it they met."""

    def __init__(self, main: dict[str, Any], plan: Plan, there: Mapping[int, Part]) -> None:
        self.main, self.there = main, there
        self.classes: dict[type, None] = {}
        self.files: dict[str, None] = {}
        if isinstance(plan.task, Cell):
            self.files[plan.task.filename] = None
        self.shared = result_pickler.notebook_classes()
        ipython = sys.modules.get("IPython")
        self.shell = ipython.get_ipython() if ipython is not None else None
        self.late_classes: Any = _Late(lambda: list(self.classes))
        self.late_sources: Any = _Late(self._sources)
        self.grads: list[tuple[Any, Any]] = []
        self.late_grads: Any = _Late(lambda: list(self.grads))

    def _sources(self) -> dict[str, Any]:
        """The source of what was defined in cells, for tracebacks and `inspect.getsource`."""
        sources: dict[str, Any] = {}
        for name in self.files:
            lines = linecache.getlines(name)
            if lines and not os.path.exists(name):
                # Without a time: linecache would look for the file to compare it with.
                sources[name] = (sum(map(len, lines)), None, lines, name)
        return sources


@dataclass(frozen=True)
class _Late:
    """Is pickled as what `value` returns when its turn comes."""

    value: Callable[[], Any]


class _Namespace(dict[str, Any]):
    """Stands for the notebook's namespace: whatever was defined in it refers to it again."""

    def __reduce__(self) -> Any:
        return _main_namespace, ()


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


class Pickler(CodePickler):
    packing: Packing

    def __init__(self, file: Any, protocol: int = 5) -> None:
        super().__init__(file, protocol=protocol)
        # cloudpickle (2.2 to 3.1) gives the functions of one namespace a common new one; these
        # get the rank's __main__, where the cell's own assignments reach them as in the notebook.
        self.globals_ref[id(self.packing.main)] = _Namespace(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        packing = self.packing
        if part := packing.there.get(id(obj)):
            return _part_there, part
        if type(obj) is _Late:
            late = obj.value()
            return type(late), (late,)
        if packing.shell is not None and obj is packing.shell:
            return shell_of_rank, ()
        if isinstance(obj, type):
            if obj in packing.shared:
                packing.classes[obj] = None
        elif type(obj) is types.FunctionType:
            packing.files[obj.__code__.co_filename] = None
            if hasattr(obj, result_pickler.COMPILED):
                raise CompiledError("it was compiled")
        else:
            refuse_what_belongs_to_one_process(obj)
            reduced = _reduced(obj, packing)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def _part_there(*part: str) -> Any:
    return get_part((part[0], part[1], part[2]), _main_namespace())


def bound(cls: type[Pickler], packing: Packing) -> type[Pickler]:
    """Return the class as `torch.save` wants it: one that needs only a file."""
    return type(cls.__name__, (cls,), {"packing": packing})


class Probe(Pickler):
    """Pickles everything but the data of tensors, which always can be."""

    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        return "data" if torch.is_storage(obj) else None


class CompiledError(TypeError):
    """What torch.compile made of a function belongs to one process."""

    remedy = "Call torch.compile in the training function."


class OnDeviceError(TypeError):
    """A tensor on a GPU belongs to the process that has it there."""

    remedy = (
        "Move it to the CPU first: for a model, `model.cpu()`. The ranks move it to their GPUs."
    )


_OF_ONE_PROCESS = ("accelerator", "state", "optimizer", "scheduler", "data_loader")


def refuse_what_belongs_to_one_process(obj: Any) -> None:
    """Raise TypeError for what could be pickled, but would not work where it arrives."""
    cls = type(obj)
    if cls.__module__.startswith("accelerate.") and not is_shared_state(obj):
        if cls.__module__.partition(".")[2] in _OF_ONE_PROCESS:
            raise TypeError("it belongs to an Accelerator of the notebook")
    elif isinstance(obj, sys.modules["torch"].Tensor) and obj.device.type not in ("cpu", "meta"):
        raise OnDeviceError(f"it is on {obj.device}")


def _reduced(obj: Any, packing: Packing) -> Any:
    """Return how to rebuild what cloudpickle and torch would not send, or not as well."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    if is_shared_state(obj):
        return shared_state, ()
    if isinstance(obj, torch.Tensor):
        if obj.is_leaf and obj.grad is not None:  # no pickle of a tensor has it
            packing.grads.append((obj, obj.grad))
        return _tensor_as_bytes(obj, torch)
    if numpy is not None and type(obj) is numpy.ndarray and obj.nbytes >= 1 << 16:
        return _array_as_tensor(obj, torch)
    if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
        return _cached_again, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, typing.NewType) and obj.__module__ == "__main__":
        return typing.NewType, (obj.__name__, obj.__supertype__)
    return None


def _tensor_as_bytes(tensor: Any, torch: Any) -> Any:
    """Rebuild an ordinary tensor from plain bytes: torch refuses one memory as two types."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not ordinary or tensor.device.type != "cpu" or not tensor.is_leaf:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return None
    if vars(tensor) or tensor._backward_hooks:
        return None
    place = tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
    return _tensor_of, (tensor.untyped_storage(), *place, tensor.requires_grad)


def _tensor_of(
    storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> Any:
    import torch

    data = getattr(storage, "_untyped_storage", storage)
    tensor = torch.empty(0, dtype=dtype).set_(data, offset, size, stride)
    return tensor.requires_grad_(requires_grad)


def _array_as_tensor(array: Any, torch: Any) -> Any:
    """Rebuild a numpy array from a tensor on the same memory: tensors are mapped, not copied."""
    with warnings.catch_warnings(), contextlib.suppress(TypeError, ValueError):  # dtype, strides
        warnings.simplefilter("ignore", UserWarning)  # of an array that is read only
        return _numpy_of, (torch.from_numpy(array), bool(array.flags.writeable))
    return None


def _numpy_of(tensor: Any, writeable: bool) -> Any:
    array = tensor.numpy()
    if not writeable:
        array.flags.writeable = False
    return array


def _cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def shell_of_rank() -> Any:
    """Return an IPython shell for the rank, so that magics of the cell work there."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    quiet = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])
    vars(shell.display_pub)["clear_output"] = lambda *_args, **_kwargs: None
    return shell
