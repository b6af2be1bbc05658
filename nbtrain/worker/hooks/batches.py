"""Hooks for the batches of torch's loaders, and of loaders that read through them.

A loader that another loader reads is left out, because its batches are parts of the other's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from ...system.instrumentation import patch
from .observer import notify

_thread = threading.local()
"""`is_loading`: in the `__next__` of a loader."""


def watch() -> None:
    """Notify of batches."""
    iterator = "torch.utils.data.dataloader:_BaseDataLoaderIter"  # seen in torch 2.7 to 2.13
    patch(iterator, "__next__", _next)
    patch(iterator, "_next_index", _next_index)


def _next(original: Any, it: Any) -> Any:
    """Return a loader's next batch, and notify before and after it, or of the loader's end.

    A loader that another one reads, in the same thread, is not reported.
    """
    if getattr(_thread, "is_loading", False):
        return original(it)
    notify.on_fetch_or_backward(True)
    began = time.monotonic()
    _thread.is_loading = True
    try:
        batch = original(it)
    except StopIteration:
        notify.on_loader_end(it)
        raise
    finally:
        _thread.is_loading = False
    notify.on_batch(it, batch, began, _reads_ahead(sys._getframe(2)))
    return batch


def _next_index(original: Any, it: Any) -> Any:
    indexes = original(it)
    notify.on_batch_indexes(it, indexes)
    return indexes


def _reads_ahead(caller: FrameType) -> bool:
    """Return whether a batch is read by Accelerate's loader, one ahead; seen in 1.0 to 1.15."""
    code = caller.f_code
    return code.co_name == "__iter__" and code.co_filename.endswith(_ACCELERATES)


_ACCELERATES = os.path.join("accelerate", "data_loader.py")
