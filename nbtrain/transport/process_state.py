"""Sets up what a forked rank inherits implicitly: random states, settings, logging.

A fresh process gets the same, as plain values.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import random
import sys
import warnings
from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import Any

_SETTINGS = {
    "get_default_dtype": "set_default_dtype",
    "is_grad_enabled": "set_grad_enabled",
    "is_anomaly_enabled": "set_anomaly_enabled",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
}
"""What reads a setting of torch's, and what writes it. One that this torch lacks is left out."""

_CUDNN_FLAGS = ("benchmark", "deterministic", "allow_tf32")
"""Settings of torch that are attributes."""


@dataclass(frozen=True)
class _ProcessSettings:
    """What multiprocessing sends to a process that it spawns; in force as soon as it is loaded.

    But for the start method: workers of a DataLoader that start afresh from a rank lack the
    notebook's classes.

    The values that are loaded after it may need it: proxies of a manager connect, and modules may
    read the arguments when they are imported.
    """

    argv: list[str]
    authkey: bytes
    """The key by which processes of one host trust each other; empty for another host."""
    log_to_stderr: bool

    def __reduce__(self) -> Any:
        return _set_process, astuple(self)


def _process_settings(with_key: bool) -> _ProcessSettings:
    return _ProcessSettings(
        [*sys.argv],
        bytes(multiprocessing.current_process().authkey) if with_key else b"",
        bool(getattr(multiprocessing.util, "_log_to_stderr", False)),
    )


def _set_process(argv: list[str], authkey: bytes, log_to_stderr: bool) -> None:
    sys.argv[:] = argv
    if authkey:
        multiprocessing.current_process().authkey = authkey
    if log_to_stderr:
        multiprocessing.util.log_to_stderr()


def collect(*, with_key: bool = True) -> dict[str, Any]:
    """Return this process's random states, and the settings that a training may depend on."""
    import torch

    numpy = sys.modules.get("numpy")
    known = logging.Logger.manager.loggerDict.items()
    levels = {n: log.level for n, log in known if isinstance(log, logging.Logger) and log.level}
    printing = [h for h in logging.root.handlers if type(h) is logging.StreamHandler]
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        with contextlib.suppress(AttributeError, RuntimeError):
            settings[name] = attrgetter(name)(torch)()
    for name in _CUDNN_FLAGS:
        with contextlib.suppress(RuntimeError):  # allow_tf32, beside torch's newer fp32_precision
            settings[name] = getattr(torch.backends.cudnn, name)
    return {
        "process": _process_settings(with_key),
        "random": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
        "torch": torch.get_rng_state(),
        # Of a kernel that was seeded and has no CUDA yet, a forked rank's GPU gets this seed.
        "seed": torch.initial_seed(),
        "settings": settings,
        "device": str(default_device()),
        "recursion": sys.getrecursionlimit(),
        # Filters of Python's categories and of installed packages': others may not be there.
        "warnings": [
            entry
            for entry in warnings.filters
            if getattr(entry[2], "__module__", "__main__") != "__main__"
        ],
        "levels": {**levels, "root": logging.root.level},
        "formats": [h.formatter._fmt if h.formatter is not None else None for h in printing],
    }


def default_device() -> Any:
    """Return the device on which torch makes tensors in this thread."""
    import torch

    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.4, once the default was set to None
        return torch.device("cpu")


def restore(collected: dict[str, Any]) -> None:
    """Give this process what `collect` returned in another."""
    import torch

    sys.setrecursionlimit(collected["recursion"])
    warnings.filters[:] = collected["warnings"]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    if collected["formats"] and not logging.root.handlers:
        logging.basicConfig(format=collected["formats"][0] or logging.BASIC_FORMAT)
    for name, level in collected["levels"].items():
        logging.getLogger(name).setLevel(level)
    for name, value in collected["settings"].items():
        with contextlib.suppress(AttributeError, RuntimeError):
            if name in _SETTINGS:
                attrgetter(_SETTINGS[name])(torch)(value)
            else:
                setattr(torch.backends.cudnn, name, value)
    if collected["device"] != "cpu":  # a default that is set slows every call down
        torch.set_default_device(collected["device"])
    random.setstate(collected["random"])
    if collected["numpy"] is not None:
        import numpy

        numpy.random.set_state(collected["numpy"])
    elif "numpy" in sys.modules:  # a rank that was forked has the state of its siblings
        sys.modules["numpy"].random.seed()
    torch.cuda.manual_seed_all(collected["seed"])  # remembered until there is CUDA
    torch.set_rng_state(collected["torch"])
