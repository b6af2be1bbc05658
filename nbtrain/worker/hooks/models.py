"""Models: as they are built, wrapped, and run in another precision."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .observer import notify

_WRAPPERS = (
    "torch.nn.parallel.distributed:DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",  # torch 2.7 to 2.13
    "deepspeed.runtime.engine:DeepSpeedEngine",
)


def watch_building() -> None:
    """Notify of modules that get submodules."""
    when_imported("torch.nn.modules.module", _watch_modules)


def _watch_modules(module: ModuleType) -> None:
    # Nothing of Module's is replaced: what a model calls of it may be compiled.
    undo_later(module.register_module_module_registration_hook(_built).remove)
    undo_later(module.register_module_parameter_registration_hook(_built).remove)


def _built(module: Any, *_: Any) -> None:
    notify.on_module_change(module)


def watch_wrapping() -> None:
    """Notify of wrappers that connect the ranks."""
    for wrapper in _WRAPPERS:
        patch(wrapper, "__init__", _wrap)


def _wrap(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    original(wrapper, *args, **kwargs)
    notify.on_model_wrap(wrapper)


def watch_autocast() -> None:
    """Notify of the start of autocast."""
    patch("torch.amp.autocast_mode:autocast", "__enter__", _enter)


def _enter(original: Any, autocast: Any, *args: Any) -> Any:
    notify.on_autocast(autocast)
    return original(autocast, *args)
