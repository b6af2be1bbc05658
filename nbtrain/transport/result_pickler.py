"""Pickles values that a rank returns to the notebook.

It differs from cloudpickle in three ways. A class that the notebook had before the ranks were
forked arrives as that very class, so that ``except MyError`` and ``isinstance`` work. A tensor on
an accelerator arrives on the CPU, because loading it elsewhere would initialise the accelerator in
the kernel. An error names the part that cannot be pickled by its path inside the value.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import cloudpickle

from ..errors import ResultNotPicklable
from ..planning.task_values import is_class, module_of
from ..system.text import format_bytes
from .limits import RESCUE_MAX_BYTES

COMPILED = "_torchdynamo_orig_callable"
"""What torch.compile sets on a function that it makes (torch 2.4 to 2.13); private."""

FROM_TRAINER = (
    "A Trainer cannot leave its rank. Return what you need of it: trainer.evaluate(), "
    "trainer.predict(test_set) or trainer.state.log_history."
)


def notebook_classes() -> frozenset[type]:
    """Return the classes that ``__main__`` defines now. Ranks that are forked later share them.

    A class that was imported, is inside another or has been replaced is not among them.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    classes: list[type] = [v for v in list(main.values()) if is_class(v)]
    own = [cls for cls in classes if module_of(cls) == "__main__"]
    return frozenset(cls for cls in own if main.get(cls.__qualname__) is cls)


def _class_of_main(name: str) -> Any:
    """Return the notebook's class of that name. Raises `AttributeError` if it is gone."""
    try:
        return vars(sys.modules["__main__"])[name]
    except KeyError:
        raise AttributeError(f"the notebook no longer has the class {name}") from None


REDUCERS: dict[str, Callable[[Any], Any]] = {}
"""Reducers (see `pickle.Pickler`) that parts of nbtrain add, by the package of a value's class."""


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle whose functions keep the names of their source files.

    Since 3.1.3, cloudpickle replaces these with "<dynamic-code>", so that equal functions are equal
    bytes. A traceback then shows no line of the notebook's functions, `inspect.getsource` fails,
    and a debugger shows nothing.
    """

    def dump(self, obj: Any) -> None:
        """Pickle a value to the file. Raises `PicklingError` in place of `SystemExit`."""
        try:
            super().dump(obj)
        except SystemExit as error:  # from a user's __reduce__: it must not end this process
            raise pickle.PicklingError(f"it calls sys.exit({error.code!r})") from error

    def reducer_override(self, obj: Any) -> Any:
        """Reduce modules by name, code with its file, and values of frameworks by `REDUCERS`.

        Everything else is left to cloudpickle.
        """
        # A module of another class, such as `torch.backends.cudnn`, which cloudpickle rejects.
        is_module = issubclass(type(obj), types.ModuleType)
        name = obj.__name__ if is_module and type(obj) is not types.ModuleType else None
        if name is not None and sys.modules.get(name) is obj:  # cloudpickle rejects it
            return importlib.import_module, (name,)
        if type(obj) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if a == "<dynamic-code>" else a for a in arguments)
        if REDUCERS and (reduce := REDUCERS.get(str(type(obj).__module__).partition(".")[0])):
            reduced = reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


class ResultPickler(CodePickler):
    def __init__(self, file: io.BytesIO, shared: frozenset[type]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        """Reduce shared classes by name, tensors of other devices to the CPU, storages to bytes.

        Everything else is left to `CodePickler`.
        """
        if isinstance(obj, type) and obj in self._shared:
            return _class_of_main, (obj.__qualname__,)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _reduce_tensor(torch, obj)
        if torch is not None and torch.is_storage(obj):
            return _reduce_storage(obj)
        return super().reducer_override(obj)


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Return how to rebuild a tensor of another device as one on the CPU.

    `NotImplemented` for a tensor on the CPU or the meta device. Gradients are left out; whether it
    needs one, and whether it is a Parameter, are kept.
    """
    if tensor.device.type in ("cpu", "meta"):
        return NotImplemented
    moved = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    else:
        moved.requires_grad_(tensor.requires_grad)
    return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reduce_storage(storage: Any) -> Any:
    """Return how to rebuild a tensor's memory from one copy. torch makes three here, three there.

    `NotImplemented` for memory that is empty or not on the CPU. torch also cannot rebuild memory of
    float8 or uint16, which has no typed storage (torch 2.13).
    """
    memory = getattr(storage, "_untyped_storage", storage)
    if memory.device.type != "cpu" or not memory.nbytes():
        return NotImplemented
    data = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
    # The tensor gives an untyped storage its dtype, and expects it in this form.
    dtype = sys.modules["torch"].uint8 if memory is storage else storage.dtype
    return _storage_of, (pickle.PickleBuffer(data), dtype)


def _storage_of(data: bytearray, dtype: Any) -> Any:
    """Rebuild a typed storage on the memory of `data`, without a copy.

    Results in run folders refer to this function by its name.
    """
    import torch

    memory = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=memory, dtype=dtype, _internal=True)


class _ReferringPickler(ResultPickler):
    """Pickles what the notebook has as a reference to it.

    A class of its own: `persistent_id` costs a call for each object.
    """

    def __init__(self, file: io.BytesIO, shared: frozenset[type], known: Mapping[int, Any]) -> None:
        super().__init__(file, shared)
        self._known = known

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to what the notebook has; None for what is pickled.

        Raises `TypeError` for a `DTensor` that the notebook does not have.
        """
        reference = self._known.get(id(obj))
        if reference is None and type(obj).__name__ == "DTensor":
            raise TypeError("a part of it is a shard of a tensor")
        return reference


class _PartUnpickler(pickle.Unpickler):
    """Resolves references by `get_part`. Python 3.13.0 ignores a method set on an instance."""

    def __init__(self, file: IO[bytes], get_part: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._get_part = get_part

    def persistent_load(self, pid: Any) -> Any:
        return self._get_part(pid)


class _LimitedBuffer(io.BytesIO):
    """Raises `ValueError` when it would hold more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        """Append bytes and return their number. Raises `ValueError` instead at the limit."""
        if self.tell() + memoryview(data).nbytes > self._limit:
            raise ValueError(f"it takes more than {format_bytes(self._limit)}")
        return super().write(data)


def dumps(
    value: Any,
    shared: frozenset[type] = frozenset(),
    known: Mapping[int, Any] | None = None,
    limit: int | None = None,
) -> bytes:
    """Pickle a value for the notebook; return the bytes.

    `known` maps the ids of objects that the notebook has to references, which are sent instead;
    such bytes need `loads` with `get_part`. `shared` classes are sent by name. Raises what parts of
    the value raise, and `ValueError` for more than `limit` bytes.
    """
    buffer = io.BytesIO() if limit is None else _LimitedBuffer(limit)
    pickler = _ReferringPickler(buffer, shared, known) if known else ResultPickler(buffer, shared)
    pickler.dump(value)
    return buffer.getvalue()


def loads(data: bytes, get_part: Callable[[Any], Any] | None = None) -> Any:
    """Rebuild a value that `dumps` pickled, in the process that forked the rank or in another.

    `get_part` returns the object for a reference. Raises what unpickling raises, and `RuntimeError`
    in place of `SystemExit`.
    """
    return load(io.BytesIO(data), get_part)


def load(file: IO[bytes], get_part: Callable[[Any], Any] | None = None) -> Any:
    """Rebuild a value from an open file, as `loads` does from bytes."""
    try:
        return (_PartUnpickler(file, get_part) if get_part else pickle.Unpickler(file)).load()
    except SystemExit as error:  # as in `CodePickler.dump`
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from error


def dump_result(value: Any, shared: frozenset[type] = frozenset()) -> bytes:
    """Pickle a rank's return value. Raises `ResultNotPicklable` naming the part that fails.

    To find that part, each part is pickled once more.
    """
    try:
        return dumps(value, shared)
    except Exception as error:  # any reducer of any class may raise anything
        path, part = find_unpicklable(value, lambda v: dumps(v, shared))
        subject = "it" if path == "result" else f"`{path}`, a {type_name(part)},"
        reason = f"a {type_name(value)} and {subject} cannot be pickled ({_describe(error)})"
        advice = "Return numbers, tensors, a state_dict instead."
        if type(value).__module__.startswith("torch.nn.parallel"):
            advice = "Return accelerator.unwrap_model(model) instead."
        elif _is_trainer(value):
            advice = (
                f"{FROM_TRAINER} You need not return the model. After this error, "
                "`nbtrain.last_run().load(model)` loads its trained weights."
            )
        raise ResultNotPicklable(f"the function returned {reason}. {advice}") from None


def dump_variable(value: Any, shared: frozenset[type], known: Mapping[int, Any]) -> bytes:
    """Pickle a variable, with references to what is `known`. Raises `ResultNotPicklable`.

    The error gives the variable's type, but not its name or the part that fails.
    """
    try:
        return dumps(value, shared, known)
    except Exception as error:
        reason = f"it is a {type_name(value)} that cannot be pickled ({_describe(error)})"
        advice = FROM_TRAINER if _is_trainer(value) else ""
        raise ResultNotPicklable(f"{reason}. {advice}".rstrip()) from None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_trainer(value: Any) -> bool:
    return any(cls.__name__ == "Trainer" for cls in type(value).__mro__)


def reading_trouble(data: bytes) -> str:
    """Return why a pickled value cannot be unpickled here; "" if it can, or is too large to try.

    Unpickles up to RESCUE_MAX_BYTES. Without this, the run would succeed and the user would meet
    the error when using the result.
    """
    try:
        if len(data) <= RESCUE_MAX_BYTES:
            loads(data)
    except Exception as error:  # from the classes of its parts
        return _describe(error)
    return ""


def type_name(value: Any) -> str:
    """Return the name of a value's class, with its module unless that is ``builtins``."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def find_unpicklable(
    value: Any, dump: Callable[[Any], object], path: str = "result", depth: int = 6
) -> tuple[str, Any]:
    """Return the path and the value of the innermost part that makes `dump` raise.

    The path continues `path`, as in "result[0].model". Searches up to `depth` levels; the value
    itself if no part raises, without a check that the value does.
    """
    for name, part in _named_parts(value) if depth else ():
        try:
            dump(part)
        except Exception:  # from the part's reducer
            return find_unpicklable(part, dump, path + name, depth - 1)
    return path, value


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a value, each with what an expression would append to name it.

    Items of dicts, lists and tuples, the attributes of other objects, and what functions refer to
    (" → name"). Nothing for classes and plain values.
    """
    if isinstance(value, dict):
        yield from ((f"[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, types.FunctionType) and not hasattr(value, COMPILED):
        code, last = value.__code__, value.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(last) : code.co_argcount]
        defaults = {**dict(zip(names, last, strict=True)), **(value.__kwdefaults__ or {})}
        yield from ((f"({k}=…)", v) for k, v in defaults.items())
        yield from ((f".{k}", v) for k, v in vars(value).items())
        with contextlib.suppress(ValueError):  # an empty closure cell
            yield from ((f" → {k}", v) for k, v in inspect.getclosurevars(value).nonlocals.items())
        # Also those of inner functions, without names of attributes. Private (cloudpickle 2.2-3.1).
        used, known = cloudpickle.cloudpickle._extract_code_globals(code), value.__globals__
        yield from ((f" → {k}", known[k]) for k in used if known.get(k, value) is not value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif "_parameters" in getattr(value, "__dict__", ()):  # a torch module
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from ((f".{k}", v) for k, v in vars(value).get(kind, {}).items())
        yield from ((f".{k}", v) for k, v in vars(value).items())
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType)):
        yield from ((f".{k}", v) for k, v in vars(value).items())
