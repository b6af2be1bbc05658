"""What a rank in a fresh interpreter needs of the notebook: packed there, unpacked in each rank.

One file in memory holds the plan, the values its cell or function refers to, the state of the
random generators and the source of the notebook's functions. It is what ``torch.save`` writes, by
a cloudpickle of our own, so that tied weights stay tied and an optimizer keeps pointing at its
model. Every rank maps the tensors copy-on-write (``torch.load(mmap=True)``): however many ranks
there are, the data is in memory once until one of them writes to it.
"""

from __future__ import annotations

import builtins
import contextlib
import linecache
import os
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import cloudpickle

from . import serialize
from .cell import names_read
from .errors import PlanError
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
    plan = _with_needed_names(plan)
    packing = _Packing(main, plan)
    pickling: Any = types.SimpleNamespace(__name__=__name__, Pickler=_bound(_Pickler, packing))
    parcel = Parcel()
    try:
        # Last what is known only when all before it is packed.
        contents = (_ambient(), plan, packing.late_classes, packing.late_sources)
        torch.save(contents, parcel.path, pickle_module=pickling, pickle_protocol=5)
    except Exception as error:  # any reducer of any class may raise anything
        parcel.close()
        raise PlanError(_explained(plan, packing, error)) from error
    return parcel


def unpack(path: str) -> Cargo:
    """Load what `pack` wrote, into this process's ``__main__``."""
    import torch

    main = vars(sys.modules["__main__"])
    contents = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    ambient, plan, classes, sources = cast("tuple[Any, Plan, list[type], dict[str, Any]]", contents)
    linecache.cache.update(sources)
    for cls in classes:
        main.setdefault(cls.__qualname__, cls)
    task = plan.task
    if isinstance(task, Cell):
        builtins.__dict__.update(task.namespace.pop("__builtins__", {}))
        main.update(task.namespace)
        plan = replace(plan, task=replace(task, namespace=main))
    # Else a class that goes back by value would be written into the notebook's own (cloudpickle).
    trackers = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    trackers.clear()
    _restore(ambient)
    return Cargo(plan, frozenset(c for c in classes if main.get(c.__qualname__) is c))


def _with_needed_names(plan: Plan) -> Plan:
    """Reduce a cell's namespace to what the cell may read of it."""
    task = plan.task
    if not isinstance(task, Cell):
        return plan
    names = names_read(task.source, task.filename) | {p.name for p in task.parameters}
    needed = {n: task.namespace[n] for n in sorted(names & task.namespace.keys())}
    for name in _KERNEL_ONLY:
        needed.pop(name, None)
    if "display" in names and hasattr(builtins, "display"):  # IPython's, among the builtins
        needed["__builtins__"] = {"display": builtins.display}
    return replace(plan, task=replace(task, namespace=needed))


class _Packing:
    """Makes picklers that know the notebook, and remembers what of it they met."""

    def __init__(self, main: dict[str, Any], plan: Plan) -> None:
        self.main = main
        self.classes: dict[type, None] = {}
        self.files: dict[str, None] = {}
        if isinstance(plan.task, Cell):
            self.files[plan.task.filename] = None
        self.shared = serialize.notebook_classes()
        ipython = sys.modules.get("IPython")
        self.shell = ipython.get_ipython() if ipython is not None else None
        self.late_classes: Any = _Late(lambda: list(self.classes))
        self.late_sources: Any = _Late(self._sources)

    def _sources(self) -> dict[str, Any]:
        """The source of what was defined in cells, for tracebacks and `inspect.getsource`."""
        found: dict[str, Any] = {}
        for name in self.files:
            lines = linecache.getlines(name)
            if lines and not os.path.exists(name):
                # Without a time: linecache would look for the file to compare it with.
                found[name] = (sum(map(len, lines)), None, lines, name)
        return found


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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    packing: _Packing

    def __init__(self, file: Any, protocol: int = 5) -> None:
        super().__init__(file, protocol=protocol)
        # cloudpickle (2.2 to 3.1) gives the functions of one namespace a common new one; these
        # get the rank's __main__, where the cell's own assignments reach them as in the notebook.
        self.globals_ref[id(self.packing.main)] = _Namespace(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        packing = self.packing
        if type(obj) is _Late:
            return _same, (obj.value(),)
        if packing.shell is not None and obj is packing.shell:
            return _shell, ()
        if isinstance(obj, type):
            if obj in packing.shared:
                packing.classes[obj] = None
        elif type(obj) is types.FunctionType:
            packing.files[obj.__code__.co_filename] = None
        else:
            _refuse_what_belongs_to_one_process(obj)
            array = _array_as_tensor(obj)
            if array is not None:
                return _numpy_of, (array,)
        return super().reducer_override(obj)


def _bound(cls: type[_Pickler], packing: _Packing) -> type[_Pickler]:
    """Return the class as `torch.save` wants it: one that needs only a file."""
    return type(cls.__name__, (cls,), {"packing": packing})


class _Probe(_Pickler):
    """Pickles everything but the data of tensors, which always can be."""

    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        return "data" if torch.is_storage(obj) else None


_OF_ONE_PROCESS = ("accelerator", "state", "optimizer", "scheduler", "data_loader")


def _refuse_what_belongs_to_one_process(obj: Any) -> None:
    """Raise TypeError for what could be pickled, but would not work where it arrives."""
    cls = type(obj)
    if cls.__module__.startswith("accelerate."):
        if cls.__module__.partition(".")[2] in _OF_ONE_PROCESS:
            raise TypeError("it belongs to an Accelerator of the notebook's own process")
    elif isinstance(obj, sys.modules["torch"].Tensor) and obj.device.type not in ("cpu", "meta"):
        raise TypeError(f"it is on {obj.device}; move it to the CPU (.cpu()) first")


def _array_as_tensor(obj: Any) -> Any:
    """Return a numpy array as a tensor on the same memory: tensors are mapped, not copied."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray or obj.nbytes < 1 << 16:
        return None
    with warnings.catch_warnings(), contextlib.suppress(TypeError, ValueError):  # dtype, strides
        warnings.simplefilter("ignore", UserWarning)  # of an array that is read only
        return sys.modules["torch"].from_numpy(obj)
    return None


def _numpy_of(tensor: Any) -> Any:
    return tensor.numpy()


def _same(value: Any) -> Any:
    return value


def _shell() -> Any:
    """Return an IPython shell for the rank, so that magics of the cell work there."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    quiet = Config({"HistoryManager": {"enabled": False}})
    return InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])


def _explained(plan: Plan, packing: _Packing, error: Exception) -> str:
    """Say which variable cannot go to another process, and what to do."""
    probe = _bound(_Probe, packing)

    def dump(value: Any) -> None:
        probe(_Nowhere()).dump(value)

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
    yield getattr(task.function, "__name__", "the function"), task.function
    yield from ((f"argument {i}", v) for i, v in enumerate(task.args))
    yield from task.kwargs.items()


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _ambient() -> dict[str, Any]:
    """Return what a forked rank would inherit: random states, and torch's settings."""
    import torch

    numpy = sys.modules.get("numpy")
    return {
        "random": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
        "torch": torch.get_rng_state(),
        # Of a kernel that was seeded and has no CUDA yet, a forked rank's GPU gets this seed.
        "seed": torch.initial_seed(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _restore(ambient: dict[str, Any]) -> None:
    import torch

    random.setstate(ambient["random"])
    if ambient["numpy"] is not None:
        import numpy

        numpy.random.set_state(ambient["numpy"])
    torch.cuda.manual_seed_all(ambient["seed"])  # remembered until there is CUDA
    torch.set_rng_state(ambient["torch"])
    torch.set_default_dtype(ambient["dtype"])
    torch.set_float32_matmul_precision(ambient["matmul"])
    torch.use_deterministic_algorithms(ambient["deterministic"], warn_only=ambient["warn_only"])
    torch.backends.cudnn.benchmark = ambient["benchmark"]
