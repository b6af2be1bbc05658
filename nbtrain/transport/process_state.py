"""Gives a fresh process what a forked rank inherits: random states, settings, logging."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import random
import sys
import warnings
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
"""The functions of torch that read a setting and that write it. Missing ones are skipped."""

_CUDNN_FLAGS = ("benchmark", "deterministic", "allow_tf32")
"""Settings of torch that are attributes."""


class _ProcessSettings:
    """What multiprocessing sends to a process that it spawns. Loading it puts it into force.

    It is loaded before the notebook's values, which may need it: proxies of a manager connect, and
    modules may read the arguments when they are imported. The start method is left out: a
    DataLoader's workers that a rank would spawn do not have the notebook's classes.
    """

    def __init__(self, with_key: bool) -> None:
        key = bytes(multiprocessing.current_process().authkey) if with_key else b""
        logs = bool(getattr(multiprocessing.util, "_log_to_stderr", False))
        self._arguments = ([*sys.argv], key, logs)

    def __reduce__(self) -> Any:
        return _set_process, self._arguments


def _set_process(argv: list[str], authkey: bytes, log_to_stderr: bool) -> None:
    """Set ``sys.argv``, multiprocessing's key and its logging to what the kernel has.

    An empty key (from another host) and False leave this process as it is.
    """
    sys.argv[:] = argv
    if authkey:  # it is empty on another host
        multiprocessing.current_process().authkey = authkey
    if log_to_stderr:
        multiprocessing.util.log_to_stderr()


def collect(*, with_key: bool = True) -> dict[str, Any]:
    """Return this process's random states, and the settings that a training may depend on.

    For `restore`, in another process. `with_key` includes multiprocessing's key, which proves that
    a process is of this host. numpy's state is left out if numpy is not loaded.
    """
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
        with contextlib.suppress(RuntimeError):  # allow_tf32 clashes with fp32_precision
            settings[name] = getattr(torch.backends.cudnn, name)
    return {
        "process": _ProcessSettings(with_key),
        "random": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
        "torch": torch.get_rng_state(),
        # A forked rank seeds its GPU with it, if the kernel was seeded before CUDA was initialised.
        "seed": torch.initial_seed(),
        "settings": settings,
        "device": str(default_device()),
        "recursion": sys.getrecursionlimit(),
        # Without filters for the notebook's own categories, which are unknown to the process.
        "warnings": [
            entry
            for entry in warnings.filters
            if getattr(entry[2], "__module__", "__main__") != "__main__"
        ],
        "levels": {**levels, "root": logging.root.level},
        "formats": [h.formatter._fmt if h.formatter is not None else None for h in printing],
    }


def default_device() -> Any:
    """Return torch's default device in this thread: the CPU if no other was set."""
    import torch

    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.7, once a default device was reset
        return torch.device("cpu")


def restore(collected: dict[str, Any]) -> None:
    """Set this process's random states and settings to what `collect` returned in another.

    Settings that this torch does not have are skipped. Logging gets a handler only if there is no
    handler yet. If the other process had no numpy, numpy is seeded afresh here, if it is loaded.
    """
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
    elif "numpy" in sys.modules:  # else it has the same state in all ranks of a fork server
        sys.modules["numpy"].random.seed()
    torch.cuda.manual_seed_all(collected["seed"])  # kept until CUDA is initialised
    torch.set_rng_state(collected["torch"])
