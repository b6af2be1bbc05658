"""How what a notebook holds is pickled for a fresh process, where cloudpickle or torch would not.

Functions of the notebook keep sharing one namespace; tensors and large arrays become bytes that
are mapped; what would not work where it arrives is refused.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from . import serialize
from .plan import Cell, Plan


class Packing:
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
        self.grads: list[tuple[Any, Any]] = []
        self.late_grads: Any = _Late(lambda: list(self.grads))

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


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    packing: Packing

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
            if hasattr(obj, "_torchdynamo_orig_callable"):
                raise TypeError("it is compiled; compile it inside the training function")
        else:
            refuse_what_belongs_to_one_process(obj)
            reduced = _reduced(obj, packing)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def bound(cls: type[Pickler], packing: Packing) -> type[Pickler]:
    """Return the class as `torch.save` wants it: one that needs only a file."""
    return type(cls.__name__, (cls,), {"packing": packing})


class Probe(Pickler):
    """Pickles everything but the data of tensors, which always can be."""

    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        return "data" if torch.is_storage(obj) else None


_OF_ONE_PROCESS = ("accelerator", "state", "optimizer", "scheduler", "data_loader")


def refuse_what_belongs_to_one_process(obj: Any) -> None:
    """Raise TypeError for what could be pickled, but would not work where it arrives."""
    cls = type(obj)
    if cls.__module__.startswith("accelerate."):
        if cls.__module__.partition(".")[2] in _OF_ONE_PROCESS:
            raise TypeError("it belongs to an Accelerator of the notebook's own process")
    elif isinstance(obj, sys.modules["torch"].Tensor) and obj.device.type not in ("cpu", "meta"):
        raise TypeError(f"it is on {obj.device}; move it to the CPU (.cpu()) first")


def _reduced(obj: Any, packing: Packing) -> Any:
    """Return how to rebuild what cloudpickle and torch would not send, or not as well."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
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


def _same(value: Any) -> Any:
    return value


def _shell() -> Any:
    """Return an IPython shell for the rank, so that magics of the cell work there."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    quiet = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])
    vars(shell.display_pub)["clear_output"] = lambda *_args, **_kwargs: None
    return shell


class Nowhere:
    def write(self, data: Any) -> int:
        return len(data)
