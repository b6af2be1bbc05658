"""Everything that nbtrain uses of torch_xla, most of it private; the same from 2.5 to 2.9.

`load` imports it and `join` initialises it: in a rank, never in the kernel. The other functions use
a torch_xla that is imported already.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any, NamedTuple

from ...part_api import LaunchError, MissingExtra
from .chips import XLA_INSTALL

PLACE = (
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
"""Variables with a process's place among several. torch_xla sets those that are not set, so
one left by the host, or by an attempt in the kernel, would give every rank the same place."""

BOUNDS = (
    ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"),
    ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
)
"""Variables that torch_xla sets likewise, each with the host's variable that it is computed from.
If torch_xla cannot read the host's metadata, the first of a pair replaces a missing second."""


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
        raise MissingExtra(
            f"a TPU needs torch_xla, which is not installed: {XLA_INSTALL}"
        ) from error
    except (ImportError, AttributeError, OSError) as error:  # another torch than it was built for
        raise LaunchError(_unfit(error)) from error


def _unfit(error: Exception) -> str:
    """Return why torch_xla does not work with this torch, and what to install."""
    torch = getattr(sys.modules.get("torch"), "__version__", "?")
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"torch_xla does not work with torch {torch} ({type(error).__name__}: {reason}). "
        f"Install versions that belong together: {XLA_INSTALL}"
    )


def _runtime() -> tuple[Any, Any]:
    """Return ``_internal.pjrt`` and ``runtime``; raise `AttributeError` if they lack a function."""
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
    """Return the device type of torch_xla (``TPU``, ``CPU``), without initialising it."""
    return str(_runtime()[1].device_type() or "")


def forget_place(env: MutableMapping[str, str], keep: Collection[str] = ()) -> None:
    """Remove from `env`, except for `keep`, what would give a rank another one's place.

    Bounds of a process become those of the host, unless the host's are set.
    """
    for name in PLACE:
        if name not in keep:
            env.pop(name, None)
    for name, by_host in BOUNDS:
        if name not in keep and name in env:
            env.setdefault(by_host, env[name])
            del env[name]
    if env.get("TPU_SKIP_MDS_QUERY"):
        env.setdefault("TPU_WORKER_ID", "0")  # which CLOUD_TPU_TASK_ID may have replaced


def join(rank: int, world_size: int) -> list[Any]:
    """Become one of several processes on this host's TPU; return the devices it drives.

    Does what ``xmp.spawn`` does in its workers. Of two devices (on a TPU v2 or v3), each needs a
    thread. Call it once, before anything else uses XLA.
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


def xla_library() -> Any:
    """Return torch_xla's native library, once torch_xla is completely imported."""
    return getattr(sys.modules.get("torch_xla"), "_XLAC", None)


def start_autograd() -> None:
    """Make torch create its backward queues, one per device: two threads at once create too few."""
    torch: Any = sys.modules["torch"]
    torch.ones(1, requires_grad=True).sum().backward()


def drive(device: Any) -> None:
    """Make `device` the default one of the calling thread."""
    library = xla_library()
    library._xla_set_default_device(device)
    _runtime()[1]._init_world_size_ordinal()


def ordinal() -> int:
    """Return the calling thread's number among all devices: Accelerate's process index."""
    return int(_runtime()[1].global_ordinal())


def finish_at_exit() -> None:
    """Wait for the devices, and release them when the process ends.

    Do not call it after a failure: it would wait for a peer that has ended.
    """
    finish()
    # The kernel's own registration went with its other exit handlers when it was forked.
    atexit.register(sys.modules["torch_xla"]._prepare_to_exit)


def finish() -> None:
    """Wait until the devices have finished all queued work."""
    torch_xla: Any = sys.modules["torch_xla"]
    torch_xla.sync()
    _model().wait_device_ops()


def after_step(call: Callable[..., None], *args: Any) -> None:
    """Run `call` once, in this thread, after the current step has been given to the device.

    ``torch_xla.sync()`` does that, and so do its loaders and optimizers.
    """
    _model().add_step_closure(call, args)


def on_cpu(tensors: Sequence[Any]) -> list[Any]:
    """Return copies of tensors on the CPU, fetched together, after computing what is pending."""
    library = xla_library()
    return list(library._xla_get_cpu_tensors(list(tensors))) if tensors else []


class Compilations(NamedTuple):
    """The programs that this process compiles."""

    begun: int
    done: int
    seconds: float
    """Of compiling, in all."""
    reused: int
    """How often it ran a program that it had."""


def compilations() -> Compilations | None:
    """Return what torch_xla has counted; None where it does not, or nothing was compiled yet."""
    try:
        begun = xla_library()._xla_counter_value("UncachedCompile")
        done = xla_library()._xla_metric_data("CompileTime")
        reused = xla_library()._xla_counter_value("CachedCompile")
    except AttributeError:
        return None
    if begun is None:
        return None
    number, nanoseconds = done[:2] if done else (0, 0.0)
    return Compilations(begun, number, nanoseconds / 1e9, reused or 0)


def _model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")
