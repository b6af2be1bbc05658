"""What feeds a training: where its loaders stand, how much they gave, how long it waited for it."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from .. import stopping
from ..imports import when_imported
from .hooks import Hooks


class Place(NamedTuple):
    """Where a loader stands: its data set, the number of this pass, batches so far and in all."""

    data: int
    number: int
    batch: int
    batches: int | None


class _Pass:
    """What a pass over a loader gave since the last step, and whether that is for steps at all."""

    __slots__ = ("feeds", "given", "is_aside")

    def __init__(self) -> None:
        self.given = 0
        self.is_aside = False  # as a validation is: read to its end, or where nothing is learned
        self.feeds = False


class _Thread(threading.local):
    inside = False  # a loader's `__next__`


class Feed:
    """Counts what loaders give: batches, samples, and the seconds that were waited for them.

    Those that the training waited: not a loader that another one reads from, nor one that a
    thread of the user's reads ahead. Samples are those that steps were taken with, as far as that
    can be told: a validation's are none; without any step, all.
    """

    def __init__(self, hooks: Hooks, tick: Callable[[float, float], None]) -> None:
        self._hooks, self._tick = hooks, tick
        self.waited = 0.0
        self.samples: int | None = None
        self.on_batch: Callable[[Any], None] | None = None
        """Who wants to see each batch."""
        self._thread = _Thread()
        self._trainers = {threading.main_thread().ident}  # and who took the last step
        self._number = 0  # of passes over any data
        self._place: Place | None = None  # of the last batch
        self._feeding: Place | None = None  # of the last one before a step
        self._epochs: dict[int, tuple[int, int]] = {}  # by data set: passes that fed, the last
        self._has_stepped = False
        self._pass = _Pass()  # of the last batch
        self._given: set[_Pass] = set()  # those that gave something since the last step
        self._lock = threading.Lock()  # loaders are read in threads, too

    def install(self) -> None:
        """Watch torch's loaders, now or when they are imported."""
        when_imported("torch.utils.data.dataloader", self._watch)

    def stepped(self) -> None:
        """Take note that a step was taken, by this thread, with the last batch."""
        self._trainers = {threading.main_thread().ident, threading.get_ident()}
        place = self._place
        self._credit(place)
        if place is not None and place is not self._feeding:
            self._feeding = place
            passes, number = self._epochs.get(place.data, (0, -1))
            if place.number > number:
                self._epochs[place.data] = passes + 1, place.number

    def _credit(self, place: Place | None) -> None:
        """Count what was given since the last step, but for passes that steps do without."""
        is_known = not self._epochs or (place is not None and place.data in self._epochs)
        with self._lock:
            samples = self.samples if self._has_stepped else None
            fed = {found for found in self._given if found.feeds or not found.is_aside}
            if not fed and is_known:  # read to its end before: a list was made of it, say
                fed = {self._pass} & self._given
            for found in self._given:
                if found in fed:
                    found.feeds = True
                    samples = (samples or 0) + found.given
                found.given = 0
            self._given.clear()
            self.samples, self._has_stepped = samples, True

    def where(self) -> dict[str, int | None]:
        """Return where the loader stands that feeds the steps: its epoch, batch and batches."""
        place = self._feeding or self._place
        if place is None:
            return {}
        epoch = self._epochs.get(place.data, (None,))[0]
        return {"epoch": epoch, "batch": place.batch, "batches": place.batches}

    def _watch(self, module: ModuleType) -> None:
        iterator = module._BaseDataLoaderIter  # seen in torch 2.4 to 2.13
        advance, choose = iterator.__next__, iterator._next_index
        on_batch = self._hooks.harmless(self._on_batch)
        on_index = self._hooks.harmless(self._on_index)
        on_end = self._hooks.harmless(self._on_end)

        @functools.wraps(advance)
        def next_batch(it: Any) -> Any:
            if self._thread.inside:
                return advance(it)
            stopping.before_next(fetch=True)
            start = time.monotonic()
            self._thread.inside = True
            try:
                batch = advance(it)
            except StopIteration:
                on_end(it)
                raise
            finally:
                self._thread.inside = False
            on_batch(it, batch, start)
            return batch

        @functools.wraps(choose)
        def next_index(it: Any) -> Any:
            index = choose(it)
            on_index(it, index)
            return index

        iterator.__next__, iterator._next_index = next_batch, next_index

    def _on_index(self, it: Any, index: Any) -> None:
        """Remember of how many samples a batch will be made, whatever is made of them."""
        if not it._auto_collation or it._dataset_kind != 0:
            return
        asked = vars(it).get("_nbtrain_asked")
        if asked is None or asked[0] is not it._sampler_iter:  # the first, or of a new pass
            asked = it._nbtrain_asked = it._sampler_iter, deque()
        asked[1].append(len(index) if hasattr(index, "__len__") else None)

    def _on_batch(self, it: Any, batch: Any, start: float) -> None:
        now = time.monotonic()
        if threading.get_ident() in self._trainers:
            self.waited += now - start
        place, count = vars(it).get("_nbtrain_place"), it._num_yielded
        if place is None or count == 1:
            self._number += 1
            place = Place(id(it._dataset), self._number, count, _length(it))
            it._nbtrain_pass = _Pass()
        self._place = it._nbtrain_place = Place(place.data, place.number, count, place.batches)
        _, asked = vars(it).get("_nbtrain_asked", (None, ()))
        size = asked.popleft() if asked else _batch_size(it, batch)
        self._take(it._nbtrain_pass, size)
        if self.on_batch is not None:
            self.on_batch(batch)
        self._tick(start, now)

    def _take(self, its: _Pass, size: int | None) -> None:
        with self._lock:
            its.is_aside = not sys.modules["torch"].is_grad_enabled()
            self._pass = its
            if size is not None:
                its.given += size
                self._given.add(its)
                if not self._has_stepped:
                    self.samples = (self.samples or 0) + size

    def _on_end(self, it: Any) -> None:
        if "_nbtrain_pass" in vars(it):
            it._nbtrain_pass.is_aside = True


def _length(iterator: Any) -> int | None:
    """Return how many batches a loader will give; None where nobody knows."""
    try:
        return len(iterator) if iterator._dataset_kind == 0 else None
    except Exception:  # a sampler without a length, or with one of its own making
        return None


def _batch_size(it: Any, batch: Any) -> int | None:
    """Return how many samples a batch of a stream holds; None where that is not certain.

    torch's own collating puts them in the first dimension. A user's may do anything with them:
    but a batch is made of as many as were asked for, unless it is the last.
    """
    from torch.utils.data import default_collate

    if not it._auto_collation:  # the data set makes its batches, if they are any
        return None
    sizes = (tensor.shape[0] for tensor in tensors(batch) if len(tensor.shape))
    if it._collate_fn is default_collate:
        return next(sizes, None)
    wanted = getattr(it._index_sampler, "batch_size", None)
    return wanted if wanted in sizes else None


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors of a batch, from the first on."""
    if hasattr(batch, "shape"):
        yield batch
    elif depth and isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part, depth - 1)
