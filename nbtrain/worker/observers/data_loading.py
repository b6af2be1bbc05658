"""Watches the loaders of a training: their position, their samples, and the time they took."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ...findings import Finding
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ..hooks.batches import LoaderPass, loader_of
from ..rank_context import TrainingFigures
from .evidence.data_order import DataOrder
from .reports import Meter, ReportReason


class DataLoadingMeter(Meter):
    """Counts what loaders give: batches, samples, and the seconds that the training waits for them.

    The training does not wait for a loader that the user's thread reads ahead. Samples are those of
    the steps, if known, without those of a validation; before the first step, all samples. The
    batch that Accelerate's loader reads ahead counts when its step can come.
    """

    def __init__(self, figures: TrainingFigures, writer: EventWriter, rank: int) -> None:
        self._figures, self._writer, self._rank = figures, writer, rank
        self._order = DataOrder()
        self._waited = 0.0
        self._samples: int | None = None
        self._main = self._trainer = threading.main_thread().ident  # or the last step's thread
        self._newest: LoaderPass | None = None
        self._last: LoaderPass | None = None  # that gave a batch
        self._epochs: dict[int, tuple[int, int]] = {}  # by data set: passes that fed, the last
        self._datasets: dict[int, weakref.ref[Any]] = {}  # by id, which another may get
        self._has_stepped = self._has_fed = False
        self._empty = 0  # samples of a loader that gave no batch
        self._times = 1  # that each batch is given
        self._pending: dict[LoaderPass, int] = {}  # samples since the last step
        self._lock = threading.Lock()  # loaders are read in threads, too

    def on_step(self, optimizer: Any) -> None:
        """Credit the last batch to a step of this thread, and count a pass at its first step."""
        self._trainer = threading.get_ident()
        if self._pending or not self._has_stepped:
            self._credit()
        last = self._last
        if last is not None:
            last.fed = last.batch
            passes, newest = self._epochs.get(last.dataset, (0, -1))
            if last.number > newest:
                self._epochs[last.dataset] = passes + 1, last.number
                last.epoch = passes + 1
                self._figures.fed_passes += 1
                self._order.see_feeding_pass(last.iterator())
            self._figures.loader_place = last.epoch, last.fed, last.batches
            self._has_fed = True

    def _credit(self) -> None:
        """Count the samples since the last step, without those of passes that feed no step."""
        with self._lock:
            feeding = [each for each in self._pending if each.feeds or not each.is_aside]
            if len(feeding) > 1:  # one may be of a batch that was only looked at
                feeding = [each for each in feeding if each.feeds or each.is_unfinished] or feeding
            if not feeding and self._last in self._pending:  # read to its end before, into a list
                feeding = [self._last]
            samples = self._samples if self._has_stepped else None
            for each in feeding:
                samples = (samples or 0) + self._pending[each]
                each.feeds = each.is_training = True
            self._pending.clear()
            self._samples, self._has_stepped = samples, True

    def refresh(self) -> None:
        """Write what was found about the order of the data: on rank 0, as all run one program."""
        finding = self._order.take()
        if finding is not None and self._rank == 0:
            self._writer.write(ev.RunNote.of(finding))

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the waiting, the samples, and the position of the loader that feeds the steps."""
        _, batch, batches = self._figures.loader_place
        samples = self._samples
        return {"waited": self._waited, "samples": samples, "batch": batch, "batches": batches}

    def on_training_end(self, wait: bool) -> None:
        """Write what is left: with `wait`, also a note if loaders with data gave no batch."""
        self.refresh()
        if wait and self._empty and self._newest is None and not self._figures.steps:
            note = (
                f"a loader of {self._empty:,} samples gave no batch, so nothing was trained: each "
                "rank's part of the samples is smaller than a batch. Make `batch_size` smaller, or "
                "leave out `drop_last=True`"
            )
            self._writer.write(ev.RunNote.of(Finding("no-batch", note, flaw="no batch was read")))

    def on_batch_indexes(self, it: Any, index: Any) -> None:
        """Record how many samples a batch requests, because collating may change their number."""
        if not it._auto_collation or it._dataset_kind != 0:
            return
        asked = vars(it).get("_nbtrain_asked")
        if asked is None or asked[0] is not it._sampler_iter:  # the first, or of a new pass
            asked = it._nbtrain_asked = it._sampler_iter, deque()
        asked[1].append(len(index) if hasattr(index, "__len__") else None)

    def on_batch(self, it: Any, batch: Any, start: float, is_ahead: bool) -> None:
        """Count a batch and the time that the training waited for it.

        The first batch of a pass begins a new `LoaderPass`, kept as an attribute of the iterator.
        """
        reader = threading.get_ident()
        if reader in (self._main, self._trainer):
            self._waited += time.monotonic() - start
        passed, count = vars(it).get("_nbtrain_pass"), it._num_yielded
        if passed is None or count == 1:
            number = self._newest.number + 1 if self._newest is not None else 1
            passed = LoaderPass(weakref.ref(it), id(it._dataset), number, _length(it))
            self._figures.passes.add(it, passed)
            self._newest = it._nbtrain_pass = passed
            self._remember_dataset(it._dataset)
        passed.reader = reader
        passed.batch = count - is_ahead
        self._set_last(passed)
        _, asked = vars(it).get("_nbtrain_asked", (None, ()))
        size = asked.popleft() if asked else _batch_size(it, batch)
        if is_ahead:
            passed.ahead, size = size, passed.ahead
        self._count_samples(passed, size)

    def _set_last(self, passed: LoaderPass) -> None:
        """Take note of the pass that has given the last batch."""
        self._last = passed
        if not self._has_fed:
            self._figures.loader_place = passed.epoch, passed.batch, passed.batches

    def _remember_dataset(self, dataset: Any) -> None:
        """Restart the count for a data set with the id of a freed one, as of an earlier fold."""
        known = self._datasets.get(id(dataset))
        if known is not None and known() is not dataset:
            self._epochs.pop(id(dataset), None)
        with contextlib.suppress(TypeError):  # a list cannot be referenced weakly
            self._datasets[id(dataset)] = weakref.ref(dataset)

    def on_shared_batches(self, times: int) -> None:
        """Count each batch once, though it is given several times."""
        self._times = times

    def _count_samples(self, passed: LoaderPass, size: int | None) -> None:
        """Count the samples of a batch for the pass; before the first step, also in all."""
        with self._lock:
            size = size and size // self._times
            passed.is_aside |= not sys.modules["torch"].is_grad_enabled()
            if size is not None:
                self._pending[passed] = self._pending.get(passed, 0) + size
                if not self._has_stepped:
                    self._samples = (self._samples or 0) + size

    def on_loader_end(self, it: Any) -> None:
        """Take note that a pass has read all, as a validation does.

        Counts a batch that was read ahead. A pass without any batch is remembered for the end.
        """
        passed = vars(it).get("_nbtrain_pass")
        if passed is None:  # it gave no batch, perhaps since a small one is left out
            if it._dataset_kind == 0 and getattr(it._index_sampler, "drop_last", False):
                self._empty = self._empty or len(it._dataset)
            return
        passed.batch = it._num_yielded
        if passed.ahead:
            self._count_samples(passed, passed.ahead)
        if passed.ahead or passed is self._last:
            self._set_last(passed)
            passed.ahead = 0
        passed.is_aside = True


def _length(iterator: Any) -> int | None:
    """Return how many batches a loader will give; None where that is unknown."""
    try:
        loader = iterator if iterator._dataset_kind == 0 else loader_of(iterator)
        return len(loader) if loader is not None else None
    except Exception:  # a sampler without a length, or with an unusual one
        return None


def _batch_size(it: Any, batch: Any) -> int | None:
    """Return how many samples a batch of a stream holds; None if that is not certain.

    torch's own collating, and fastai's, put them in the first dimension. A user's may do anything,
    but every batch except the last contains the requested number of samples.
    """
    sizes = (tensor.shape[0] for tensor in tensors(batch) if len(tensor.shape))
    if loader_of(it) is not None:  # fastai itself counts by the first dimension, or a table's rows
        is_nest = isinstance(batch, (list, tuple, Mapping)) or not hasattr(batch, "__len__")
        return next(sizes, None) if is_nest else len(batch)
    if not it._auto_collation:  # the data set makes the batches, if any
        return None
    from torch.utils.data import default_collate

    if it._collate_fn is default_collate:
        return next(sizes, None)
    wanted = getattr(it._index_sampler, "batch_size", None)
    return wanted if wanted in sizes else None


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors of a batch in order, from lists, tuples and mappings up to `depth` deep."""
    if hasattr(batch, "shape"):
        yield batch
    elif depth and isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part, depth - 1)
