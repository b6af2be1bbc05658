"""Phases of a rank that are no training: it joins the others, compiles, or saves."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from ...tracking.events import JOINING
from .observer import notify


def watch() -> None:
    """Patch what saves, compiles, and joins a process group, to notify of these phases."""
    patch("torch.serialization", "_save", _save)  # not of a tensor that is pickled
    patch("safetensors.torch", "save_file", _save)
    for owner in ("torch.distributed.distributed_c10d", "torch.distributed"):
        patch(owner, "init_process_group", _join)
    when_imported("torch._dynamo.callback", _watch_compiler)


def _save(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _during("saving", original, *args, **kwargs)


def _join(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _during(JOINING, original, *args, **kwargs)


def _during(phase: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and notify of a phase that begins before it and ends after it."""
    notify.on_phase(phase)
    try:
        return original(*args, **kwargs)
    finally:
        notify.on_phase("")


def _watch_compiler(module: ModuleType) -> None:
    """Notify of torch.compile at work, through the compiler's own callbacks."""
    handler: Any = module.callback_handler
    for name, phase in (("start", "compiling"), ("end", "")):
        report = partial(_compiler, phase)
        getattr(handler, f"register_{name}_callback")(report)
        undo_later(partial(getattr(handler, f"remove_{name}_callback"), report))


def _compiler(phase: str, *_: Any) -> None:
    notify.on_phase(phase)
