"""Hooks for the batches of torch's loaders, and of loaders that read through them; their passes.

A loader that another loader reads is left out, because its batches are parts of the other's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
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


@dataclass(eq=False)
class LoaderPass:
    """A pass over a loader's data, kept with its iterator."""

    iterator: weakref.ref[Any]
    dataset: int
    """The id of its data set."""
    number: int
    """Counts the passes over any data."""
    batches: int | None
    """Of the whole pass; None where it is unknown."""
    before: int = 0
    """Batches of earlier passes over its loader."""
    batch: int = 0
    """The last one that may have been used, from 1."""
    fed: int = 0
    """The last batch before a step."""
    epoch: int | None = None
    """Which of the passes over its data set that fed steps; None before its first step."""
    ahead: int | None = 0
    """The samples of a batch that Accelerate has read ahead; None where they are unknown."""
    feeds: bool = False
    """Whether steps were taken with it."""
    is_training: bool = False
    """Whether steps were taken with it, or with an earlier pass over its loader."""
    is_aside: bool = False
    """Whether it is like a validation: read to its end, or without gradients."""
    reader: int = 0
    """The thread that has read its last batch."""

    @property
    def is_unfinished(self) -> bool:
        """Whether it can give more: ``next(iter(loader))`` leaves one that cannot."""
        iterator = self.iterator()
        return iterator is not None and iterator._nbtrain_pass is self


class LatestPasses:
    """The latest pass over each loader of a task."""

    def __init__(self) -> None:
        # By the loader's id, which CPython gives to another one when it is freed.
        self._passes: dict[int, tuple[weakref.ref[Any] | None, LoaderPass]] = {}

    def add(self, iterator: Any, new: LoaderPass) -> None:
        """Take note of a new pass; it continues what is known of its loader."""
        source, before = _loader_identity(iterator), self.find(iterator)
        if before is not None:
            new.before, new.is_training = before.before + before.batch, before.is_training
        reference: weakref.ref[Any] | None = None
        with contextlib.suppress(TypeError):  # a list as the batch sampler
            reference = weakref.ref(source)
        self._passes[id(source)] = reference, new

    def find(self, iterator: Any) -> LoaderPass | None:
        """Return the latest pass over the loader of an iterator, if there was one."""
        source = _loader_identity(iterator)
        reference, known = self._passes.get(id(source), (None, None))
        return known if reference is None or reference() is source else None

    @property
    def training_passes(self) -> list[LoaderPass]:
        """The latest passes of the loaders whose batches steps were taken with."""
        return [
            known
            for reference, known in self._passes.values()
            if known.is_training and (reference is None or reference() is not None)
        ]


def loader_of(iterator: Any) -> Any:
    """Return fastai's loader that one of torch's iterators reads for; None for another's."""
    source = iterator._dataset
    is_fastai = type(source).__module__ == "fastai.data.load" and hasattr(source, "d")
    return source.d if is_fastai else None


def _loader_identity(iterator: Any) -> Any:
    """Return an object that all passes over one loader share, and no other loader has."""
    of_fastai = loader_of(iterator)
    return iterator._index_sampler if of_fastai is None else of_fastai
