"""What a forked rank inherits without anyone saying so: random states, settings, logging.

A fresh process gets the same, as plain values.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

# What reads a setting of torch's, and what writes it. One that this torch has not is left out.
_SETTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "dtype": (
        lambda t: t.get_default_dtype(),
        lambda t, v: t.set_default_dtype(v),
    ),
    "device": (
        lambda t: str(t.get_default_device()),
        lambda t, v: t.set_default_device(v) if v != "cpu" else None,
    ),
    "grad": (
        lambda t: t.is_grad_enabled(),
        lambda t, v: t.set_grad_enabled(v),
    ),
    "anomaly": (
        lambda t: t.is_anomaly_enabled(),
        lambda t, v: t.autograd.set_detect_anomaly(v) if v else None,
    ),
    "deterministic": (
        lambda t: t.get_deterministic_debug_mode(),
        lambda t, v: t.set_deterministic_debug_mode(v),
    ),
    "matmul": (
        lambda t: t.get_float32_matmul_precision(),
        lambda t, v: t.set_float32_matmul_precision(v),
    ),
    "cudnn.benchmark": (
        lambda t: t.backends.cudnn.benchmark,
        lambda t, v: setattr(t.backends.cudnn, "benchmark", v),
    ),
    "cudnn.deterministic": (
        lambda t: t.backends.cudnn.deterministic,
        lambda t, v: setattr(t.backends.cudnn, "deterministic", v),
    ),
    "cudnn.tf32": (
        lambda t: t.backends.cudnn.allow_tf32,
        lambda t, v: setattr(t.backends.cudnn, "allow_tf32", v),
    ),
    "sdp.flash": (
        lambda t: t.backends.cuda.flash_sdp_enabled(),
        lambda t, v: t.backends.cuda.enable_flash_sdp(v),
    ),
    "sdp.efficient": (
        lambda t: t.backends.cuda.mem_efficient_sdp_enabled(),
        lambda t, v: t.backends.cuda.enable_mem_efficient_sdp(v),
    ),
    "sdp.math": (
        lambda t: t.backends.cuda.math_sdp_enabled(),
        lambda t, v: t.backends.cuda.enable_math_sdp(v),
    ),
}


def collect() -> dict[str, Any]:
    """Return this process's random states, and the settings that a training may depend on."""
    import torch

    numpy = sys.modules.get("numpy")
    settings: dict[str, Any] = {}
    for name, (read, _) in _SETTINGS.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            settings[name] = read(torch)
    return {
        "random": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
        "torch": torch.get_rng_state(),
        # Of a kernel that was seeded and has no CUDA yet, a forked rank's GPU gets this seed.
        "seed": torch.initial_seed(),
        "settings": settings,
        "recursion": sys.getrecursionlimit(),
        "warnings": [entry for entry in warnings.filters if _can_go(entry)],
        "logging": _loggers(),
    }


def restore(collected: dict[str, Any]) -> None:
    """Make this process's what `collect` returned in another."""
    import torch

    sys.setrecursionlimit(collected["recursion"])
    warnings.filters[:] = collected["warnings"]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    _set_loggers(collected["logging"])
    for name, value in collected["settings"].items():
        with contextlib.suppress(AttributeError, RuntimeError):
            _SETTINGS[name][1](torch, value)
    random.setstate(collected["random"])
    if collected["numpy"] is not None:
        import numpy

        numpy.random.set_state(collected["numpy"])
    torch.cuda.manual_seed_all(collected["seed"])  # remembered until there is CUDA
    torch.set_rng_state(collected["torch"])


def _can_go(entry: Any) -> bool:
    """Whether a warning's filter is one of Python's or of an installed package's."""
    return getattr(entry[2], "__module__", "__main__") != "__main__"


def _loggers() -> dict[str, Any]:
    """Return the levels of loggers, and the format of a root that prints."""
    known = logging.Logger.manager.loggerDict.items()
    levels = {n: one.level for n, one in known if isinstance(one, logging.Logger) and one.level}
    printing = [h for h in logging.root.handlers if type(h) is logging.StreamHandler]
    formatter = printing[0].formatter if printing else None
    return {
        "root": logging.root.level,
        "levels": levels,
        "prints": bool(printing),
        "format": formatter._fmt if formatter is not None else None,
    }


def _set_loggers(told: dict[str, Any]) -> None:
    if told["prints"] and not logging.root.handlers:
        logging.basicConfig(format=told["format"] or logging.BASIC_FORMAT)
    logging.root.setLevel(told["root"])
    for name, level in told["levels"].items():
        logging.getLogger(name).setLevel(level)
