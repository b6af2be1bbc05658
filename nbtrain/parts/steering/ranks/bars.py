"""Ends the loops of a training over bars of tqdm, as those of `nbtrain.progress`, and over loaders.

The loaders are those of Accelerate, which read a batch ahead. If their data ended, they would treat
the batch that they have as the last, and make a step before all gradients are accumulated.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ....part_api import Observer, patch


class _Loop:
    """A loop over a bar, or over a loader of Accelerate."""

    is_inside = False
    """Whether the loop's body runs; otherwise the bar fetches the next item."""
    is_ended = False

    def __init__(self, loader: Any = None) -> None:
        self.loader, self.thread = loader, threading.get_ident()
        self.reads_loader = loader is not None
        """Whether its items are batches of a loader."""


class BarLoops(Observer):
    """The open loops over bars and over loaders of Accelerate, from the outermost in.

    `ends` returns whether the loop of a frame ends when it gets nothing. `on_loader_end` is called
    where a loader of Accelerate ends early. Its argument is whether the code begins another pass.
    """

    purpose = "steering"

    def __init__(
        self, ends: Callable[[FrameType], bool], on_loader_end: Callable[[bool], None]
    ) -> None:
        self._ends, self._on_loader_end = ends, on_loader_end
        self._open: list[_Loop] = []
        self._ended: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders
        for cls in ("tqdm.std:tqdm", "tqdm.notebook:tqdm_notebook", "tqdm.rich:tqdm_rich"):
            patch(cls, "__iter__", self._iterate_bar)
        for cls in ("DataLoaderShard", "DataLoaderDispatcher"):
            patch(f"accelerate.data_loader:{cls}", "__iter__", self._iterate_loader)

    @property
    def _around(self) -> list[_Loop]:
        """The loops of this thread."""
        return [loop for loop in self._open if loop.thread == threading.get_ident()]

    @property
    def bars(self) -> int:
        """The number of open loops over bars around a step of this thread."""
        return sum(loop.loader is None for loop in self._around)

    @property
    def has_loader(self) -> bool:
        """Whether a loop over a loader of Accelerate is open around a step of this thread."""
        return any(loop.loader is not None for loop in self._around)

    @property
    def is_ending(self) -> bool:
        """Whether a loop around a step of this thread ends at its next item."""
        return any(loop.is_ended for loop in self._around)

    def _iterate_bar(self, original: Any, bar: Any) -> Iterator[Any]:
        return self._iterate(original(bar), _Loop())

    def _iterate_loader(self, original: Any, loader: Any) -> Iterator[Any]:
        """Iterate over a loader of Accelerate, or not at all after its training has ended.

        Accelerate itself fails at a loader that gives the first rank no batch to share.
        """
        if loader in self._ended and self._ends(sys._getframe(1)):
            self._on_loader_end(True)
        # An evaluation has its own loop, which may be open while a step is made.
        elif not sys.modules["torch"].is_grad_enabled():
            yield from original(loader)
        else:
            yield from self._iterate(original(loader), _Loop(loader))

    def _iterate(self, items: Any, loop: _Loop) -> Iterator[Any]:
        """Iterate over the items, until the loop is ended."""
        self._open.append(loop)
        try:
            for item in items:
                loop.is_inside = True
                yield item
                if loop.is_ended and self._ends(sys._getframe(1)):
                    break
                loop.is_inside = loop.is_ended = False
        finally:
            items.close()  # which closes the bar
            self._open.remove(loop)
        if loop.loader in self._ended:
            self._on_loader_end(False)

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """Take note of the bars that fetch a batch: their loops are those of an epoch."""
        for loop in self._around:
            if fetch and not loop.is_inside:
                loop.reads_loader = True

    def end(self, *, bars: bool) -> None:
        """End all loops over loaders at their next batch; with `bars`, also those over bars."""
        self.end_later_passes()
        for loop in self._around:
            loop.is_ended = bars or loop.loader is not None

    def end_outer(self, *, has_loader: bool) -> None:
        """End all loops over bars at their next item, but not that of the present epoch.

        That is the loop that reads a loader; without a loader, the innermost of several.
        """
        for loop in self._around:
            loop.is_ended = not loop.reads_loader
        if not has_loader and self.bars > 1:
            self._around[-1].is_ended = False

    def end_later_passes(self) -> None:
        """Have the loaders of open loops give nothing after the present pass."""
        self._ended.update(loop.loader for loop in self._around if loop.loader is not None)
