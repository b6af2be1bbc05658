"""Gives a forked rank's loaders workers of their own.

A DataLoader with ``persistent_workers=True`` keeps its iterator, and with it the workers that the
notebook started. A rank that went on with them got answers to the notebook's requests (`KeyError`),
and told these workers to end when its copy of the iterator was deleted: after that, the notebook's
own loader waited for ever.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..system.instrumentation import patch
from . import api

_KINDS = {
    "torch.utils.data.dataloader": ("DataLoader", "_MultiProcessingDataLoaderIter"),
    "torchdata.stateful_dataloader.stateful_dataloader": (
        "StatefulDataLoader",
        "_StatefulMultiProcessingDataLoaderIter",
    ),
}
"""Loaders and their iterators, by module (private names of torch 2.4 to 2.13, torchdata 0.11)."""


def use_own_workers() -> None:
    """Have loaders start new workers in this process, and leave alone those that it inherited."""
    for module, (loader, iterator) in _KINDS.items():
        patch(f"{module}:{loader}", "__iter__", _iterate)
        patch(f"{module}:{iterator}", "_shutdown_workers", _shut_down)
        if api.world_size() > 1:  # else nobody takes another rank's batches
            patch(f"{module}:{iterator}", "_next_data", _next_data)


def _is_inherited(iterator: Any) -> bool:
    workers: Any = getattr(iterator, "_workers", None)
    return bool(workers) and workers[0]._parent_pid != os.getpid()


def _iterate(original: Any, loader: Any) -> Any:
    if _is_inherited(getattr(loader, "_iterator", None)):
        loader._iterator = None
    return original(loader)


def _shut_down(original: Any, iterator: Any) -> None:
    if not _is_inherited(iterator):
        original(iterator)
    elif iterator._worker_pids_set:  # torch knows its workers by its id, which may come again
        signals: Any = sys.modules["torch.utils.data._utils.signal_handling"]
        signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _next_data(original: Any, iterator: Any) -> Any:
    if _is_inherited(iterator):
        raise RuntimeError(
            "this iterator of a DataLoader belongs to the notebook, as its workers do. Call "
            "`iter(loader)` inside the training function"
        )
    return original(iterator)
