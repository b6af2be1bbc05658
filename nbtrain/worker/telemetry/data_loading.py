"""What feeds a training: where its loaders stand, the samples they gave, the time they took."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from ...system.instrumentation import patch
from .. import stopping
from .evidence.metric_shares import MetricShares
from .evidence.work_sample import WorkSampler
from .safe_hooks import telemetry

ENDLESS = 1_000_000_000
"""Batches of a pass that nobody waits for: its sampler has a length, and the loop another end."""


class LoaderPosition(NamedTuple):
    """Where a loader stands."""

    dataset: int
    """The id of its data set."""
    pass_number: int
    """Counts the passes over any data."""
    batch: int
    batches: int | None
    """Of the whole pass; None where it is unknown."""


class DataLoadingMeter:
    """Counts what loaders give: batches, samples, and the seconds that the training waits for them.

    A loader that another one reads from is not counted twice, and the training does not wait for
    one that a thread of the user's reads ahead. Samples are those of the steps, as far as that is
    known, without a validation's; before any step, all. The batch that Accelerate's loader reads
    ahead of each step counts when that step may come.
    """

    def __init__(self, tick: Callable[[float, float], None], work: WorkSampler) -> None:
        self._tick, self._work = tick, work
        self.metrics = MetricShares(self._samples_of_pass)
        self.waited = 0.0
        self.samples: int | None = None
        self.fed_passes = 0
        """Passes over any data that fed steps."""
        self.batch_listener: Callable[[Any], None] | None = None
        """Is called with each batch."""
        self._thread = threading.local()  # `is_loading`: in the `__next__` of a loader
        self._trainers = {threading.main_thread().ident}  # and the thread of the last step
        self._passes = 0  # over any data
        self._position: LoaderPosition | None = None  # of the last batch
        self._fed: LoaderPosition | None = None  # of the last batch before a step
        self._epochs: dict[int, tuple[int, int]] = {}  # by data set: passes that fed, the last
        self._has_stepped = False
        self._empty = 0  # samples of a loader that gave no batch
        self._pending: dict[int, int] = {}  # by pass: samples since the last step
        self._ahead: dict[int, int | None] = {}  # by pass: samples of the batch read ahead
        self._iterators: dict[int, weakref.ref[Any]] = {}  # by pass
        self._feeding: set[int] = set()  # passes that steps were taken with
        self._aside: set[int] = set()  # as a validation is: read to its end, or without gradients
        self._lock = threading.Lock()  # loaders are read in threads, too

    def install(self) -> None:
        """Watch torch's loaders, now or when they are imported."""
        iterator = "torch.utils.data.dataloader:_BaseDataLoaderIter"  # seen in torch 2.4 to 2.13
        patch(iterator, "__next__", self._next)
        patch(iterator, "_next_index", self._next_index)
        self.metrics.install()

    def stepped(self) -> None:
        """Count the last batch for a step that this thread has taken."""
        self._trainers = {threading.main_thread().ident, threading.get_ident()}
        self._credit()
        position = self._position
        if position is not None and position is not self._fed:
            self._fed = position
            passes, last = self._epochs.get(position.dataset, (0, -1))
            if position.pass_number > last:
                self._epochs[position.dataset] = passes + 1, position.pass_number
                self.fed_passes += 1

    def _credit(self) -> None:
        """Count the samples since the last step, without those of passes that feed no step."""
        with self._lock:
            feeding = self._pending.keys() - (self._aside - self._feeding)
            if len(feeding) > 1:  # one may be of a batch that was only looked at
                live = {number for number in feeding if self._goes_on(number)}
                feeding = (live | feeding & self._feeding) or feeding
            if not feeding and self._position is not None:  # read to its end before, into a list
                feeding = self._pending.keys() & {self._position.pass_number}
            samples = self.samples if self._has_stepped else None
            if feeding:
                samples = (samples or 0) + sum(self._pending[number] for number in feeding)
            self._feeding |= feeding
            self._pending.clear()
            self.samples, self._has_stepped = samples, True

    def _goes_on(self, number: int) -> bool:
        """Whether a pass can give more: ``next(iter(loader))`` leaves one that cannot."""
        ref = self._iterators.get(number)
        it = ref() if ref is not None else None
        return it is not None and it._nbtrain_position.pass_number == number

    def position(self) -> dict[str, int | None]:
        """Return the epoch, batch and number of batches of the loader that feeds the steps."""
        position = self._fed or self._position
        if position is None:
            return {}
        epoch = self._epochs.get(position.dataset, (None,))[0]
        return {"epoch": epoch, "batch": position.batch, "batches": position.batches}

    def _samples_of_pass(self) -> int:
        """Return how many samples the last pass has given since the last step."""
        return self._pending.get(self._passes, 0)

    def _next(self, original: Callable[[Any], Any], it: Any) -> Any:
        if getattr(self._thread, "is_loading", False):
            return original(it)
        if stopping.active is not None:
            stopping.active.before_next(fetch=True)
        start = time.monotonic()
        self._thread.is_loading = True
        try:
            batch = original(it)
        except StopIteration:
            self._end_pass(it)
            raise
        finally:
            self._thread.is_loading = False
        self._count_batch(it, batch, start, _reads_ahead(sys._getframe(2)))
        return batch

    def _next_index(self, original: Callable[[Any], Any], it: Any) -> Any:
        index = original(it)
        self._remember_size(it, index)
        return index

    @telemetry
    def _remember_size(self, it: Any, index: Any) -> None:
        """Remember how many samples were asked for: collating may make anything of them."""
        if not it._auto_collation or it._dataset_kind != 0:
            return
        asked = vars(it).get("_nbtrain_asked")
        if asked is None or asked[0] is not it._sampler_iter:  # the first, or of a new pass
            asked = it._nbtrain_asked = it._sampler_iter, deque()
        asked[1].append(len(index) if hasattr(index, "__len__") else None)

    @telemetry
    def _count_batch(self, it: Any, batch: Any, start: float, is_ahead: bool) -> None:
        now = time.monotonic()
        if threading.get_ident() in self._trainers:
            self.waited += now - start
        position, count = vars(it).get("_nbtrain_position"), it._num_yielded
        if position is None or count == 1:
            self._passes += 1
            self._iterators = {n: ref for n, ref in self._iterators.items() if ref() is not None}
            self._ahead = {n: size for n, size in self._ahead.items() if n in self._iterators}
            self._iterators[self._passes] = weakref.ref(it)
            position = LoaderPosition(id(it._dataset), self._passes, count, _length(it))
            self.metrics.begin_pass(batch)
        batch_number = count - is_ahead
        place = LoaderPosition(
            position.dataset, position.pass_number, batch_number, position.batches
        )
        self._position = it._nbtrain_position = place
        _, asked = vars(it).get("_nbtrain_asked", (None, ()))
        size = asked.popleft() if asked else _batch_size(it, batch)
        if is_ahead:
            before = self._ahead.get(place.pass_number, 0)
            self._ahead[place.pass_number], size = size, before
        self._count_samples(place.pass_number, size)
        if self._work.is_sampling:
            self._work.see_batch(batch)
        if self.batch_listener is not None:
            self.batch_listener(batch)
        self._tick(start, now)

    def _count_samples(self, number: int, size: int | None) -> None:
        with self._lock:
            if not sys.modules["torch"].is_grad_enabled():
                self._aside.add(number)
            if size is not None:
                self._pending[number] = self._pending.get(number, 0) + size
                if not self._has_stepped:
                    self.samples = (self.samples or 0) + size

    @telemetry
    def _end_pass(self, it: Any) -> None:
        place = vars(it).get("_nbtrain_position")
        if place is None:
            self._note_empty(it)
            return
        if place.pass_number in self._ahead:
            self._position = it._nbtrain_position = place._replace(batch=it._num_yielded)
            self._count_samples(place.pass_number, self._ahead.pop(place.pass_number))
        self._aside.add(place.pass_number)

    def _note_empty(self, it: Any) -> None:
        """Take note of a pass over data that gave no batch, as it was left out."""
        if it._dataset_kind == 0 and getattr(it._index_sampler, "drop_last", False):
            self._empty = self._empty or len(it._dataset)

    def nothing_read(self) -> str:
        """Return a note if loaders over data were read, and none gave any batch; "" else."""
        if not self._empty or self._passes:
            return ""
        return (
            f"no batch came from a loader of {self._empty:,} samples, so that nothing was trained: "
            "each rank's part of them is smaller than a batch. Make `batch_size` smaller, or leave "
            "out `drop_last=True`"
        )


def _reads_ahead(caller: FrameType) -> bool:
    """Return whether a batch is read by Accelerate's loader, one ahead; seen in 1.0 to 1.15."""
    code = caller.f_code
    return code.co_name == "__iter__" and code.co_filename.endswith(_ACCELERATES)


_ACCELERATES = os.path.join("accelerate", "data_loader.py")


def _length(iterator: Any) -> int | None:
    """Return how many batches a loader will give; None where that is unknown."""
    try:
        length = len(iterator) if iterator._dataset_kind == 0 else None
        return length if length is not None and length < ENDLESS else None
    except Exception:  # a sampler without a length, or with an unusual one
        return None


def _batch_size(it: Any, batch: Any) -> int | None:
    """Return how many samples a batch of a stream holds; None where that is not certain.

    torch's own collating puts them in the first dimension. A user's may do anything, but every
    batch except the last is made of as many samples as were asked for.
    """
    if not it._auto_collation:  # the data set makes the batches, if any
        return None
    from torch.utils.data import default_collate

    sizes = (tensor.shape[0] for tensor in tensors(batch) if len(tensor.shape))
    if it._collate_fn is default_collate:
        return next(sizes, None)
    wanted = getattr(it._index_sampler, "batch_size", None)
    return wanted if wanted in sizes else None


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors of a batch in order."""
    if hasattr(batch, "shape"):
        yield batch
    elif depth and isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part, depth - 1)
