"""All that nbtrain touches of torch_xla, most of it private: the same from 2.5 to 2.9.

`load` imports it, `join` initialises it: in a rank, never in the kernel. Whatever else is here
asks a torch_xla that somebody has imported.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any, NamedTuple

from .errors import LaunchError, MissingExtra

INSTALL = "pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*'"
"""What gives a host its TPU; 2.9 is the last torch_xla, and each needs its own torch."""

PLACE = (
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
"""Variables that say which of several processes this is. torch_xla sets those that are not set:
one that the host, or an attempt in the kernel, has left would make every rank the same one."""

BOUNDS = (
    ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"),
    ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
)
"""Variables that torch_xla sets likewise, and what it computes them from, by host. Where it is
told not to ask the host's metadata, the first of a pair stands in for a missing second."""


def loaded() -> Any:
    """Return torch_xla's own library if it is imported here; None if not, or not wholly."""
    return getattr(sys.modules.get("torch_xla"), "_XLAC", None)


def is_initialized() -> bool:
    """Whether this process has begun to use XLA: a fork of it never can."""
    return bool(getattr(loaded(), "_xla_runtime_is_initialized", bool)())


def load() -> None:
    """Import torch_xla, as any import of it would: it sets PJRT_DEVICE and the like.

    Raises `MissingExtra` or `LaunchError` where that is impossible.
    """
    try:
        importlib.import_module("torch_xla")
        _runtime()
    except ModuleNotFoundError as error:
        if error.name != "torch_xla":
            raise LaunchError(_unfit(error)) from error
        raise MissingExtra(f"a TPU needs torch_xla, which is not installed: {INSTALL}") from error
    except (ImportError, AttributeError, OSError) as error:  # another torch than it was built for
        raise LaunchError(_unfit(error)) from error


def _unfit(error: Exception) -> str:
    torch = getattr(sys.modules.get("torch"), "__version__", "?")
    told = (str(error).splitlines() or [""])[0]
    return (
        f"torch_xla cannot be used with torch {torch} ({type(error).__name__}: {told}). "
        f"Each needs the other's version: {INSTALL}"
    )


def _runtime() -> tuple[Any, Any]:
    """Return the modules ``_internal.pjrt`` and ``runtime``; see that they are what they were."""
    pjrt = importlib.import_module("torch_xla._internal.pjrt")
    runtime = importlib.import_module("torch_xla.runtime")
    for owner, names in (
        (pjrt, ("initialize_multiprocess", "initialize_singleprocess")),
        (runtime, ("_init_world_size_ordinal", "device_type", "global_ordinal", "world_size")),
    ):
        for name in names:
            getattr(owner, name)
    return pjrt, runtime


def device_type() -> str:
    """Return the kind of device that torch_xla would use, initialising none: ``TPU``, ``CPU``."""
    return str(_runtime()[1].device_type() or "")


def forget_place(env: MutableMapping[str, str], keep: Collection[str] = ()) -> None:
    """Take out of `env` what would give a rank another's place on the TPU, but for `keep`."""
    for name in PLACE:
        if name not in keep:
            env.pop(name, None)
    for name, by_host in BOUNDS:
        if name not in keep and name in env:
            env.setdefault(by_host, env[name])
            del env[name]
    if env.get("TPU_SKIP_MDS_QUERY"):
        env.setdefault("TPU_WORKER_ID", "0")  # for which CLOUD_TPU_TASK_ID may have stood in


def join(rank: int, world_size: int) -> list[Any]:
    """Become one of several processes on this host's TPU; return the devices it drives.

    Does what ``xmp.spawn`` does in its workers. Two devices, on a TPU v2 or v3, are for a thread
    each. To be called once, before anything else uses XLA.
    """
    pjrt, runtime = _runtime()
    if world_size == 1:
        pjrt.initialize_singleprocess()
    else:
        pjrt.initialize_multiprocess(rank, world_size)
    devices = _model().get_xla_supported_devices()
    if len(devices) == 1:
        runtime._init_world_size_ordinal()
    return list(devices)


def start_autograd() -> None:
    """Have torch make its queues for backward, one a device; two threads at once make too few."""
    torch: Any = sys.modules["torch"]
    torch.ones(1, requires_grad=True).sum().backward()


def drive(device: Any) -> None:
    """Make `device` the default one of the calling thread."""
    library = loaded()
    library._xla_set_default_device(device)
    _runtime()[1]._init_world_size_ordinal()


def ordinal() -> int:
    """Return the calling thread's number among all devices: Accelerate's process index."""
    return int(_runtime()[1].global_ordinal())


def settle() -> None:
    """Let the devices finish, and have them given back when the process ends.

    Not after a failure: a peer that is gone would be waited for.
    """
    finish()
    # The kernel's own registration went with its other exit handlers when it was forked.
    atexit.register(sys.modules["torch_xla"]._prepare_to_exit)


def finish() -> None:
    """Let the devices do what was asked of them so far."""
    torch_xla: Any = sys.modules["torch_xla"]
    torch_xla.sync()
    _model().wait_device_ops()


def leave_alone() -> None:
    """Have Accelerate and transformers take no XLA in this rank, where they are imported already.

    They would take it wherever torch_xla is installed, and each rank would train for itself.
    """
    for name, found_out in (  # seen in accelerate 1.15 and transformers 5.23
        ("accelerate.utils.imports", {"_torch_xla_available": False, "_tpu_available": False}),
        ("transformers.utils.import_utils", {"USE_TORCH_XLA": "0"}),
    ):
        module = sys.modules.get(name)
        if module is not None:
            vars(module).update(found_out)
            asked = getattr(module, "is_torch_xla_available", None)
            getattr(asked, "cache_clear", int)()  # a cached answer, where it is one


def after_step(call: Callable[..., None], *args: Any) -> None:
    """Have `call` called once, in this thread, when the step that is under way has been handed
    to the device: by ``torch_xla.sync()``, a loader, an optimizer that does it."""
    _model().add_step_closure(call, args)


def on_cpu(tensors: Sequence[Any]) -> list[Any]:
    """Return copies of tensors on the CPU, fetched at once; those not computed yet now are."""
    library = loaded()
    return list(library._xla_get_cpu_tensors(list(tensors))) if tensors else []


class Compilations(NamedTuple):
    """Programs that this process began to compile, those it has, in how many seconds, and how
    often it ran one that it had."""

    begun: int
    done: int
    seconds: float
    reused: int


def compilations() -> Compilations | None:
    """Return what torch_xla has counted; None where it does not count."""
    try:
        begun = loaded()._xla_counter_value("UncachedCompile")
        done = loaded()._xla_metric_data("CompileTime")
        reused = loaded()._xla_counter_value("CachedCompile")
    except AttributeError:
        return None
    if begun is None:
        return None
    number, nanoseconds = done[:2] if done else (0, 0.0)
    return Compilations(begun, number, nanoseconds / 1e9, reused or 0)


def _model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")
