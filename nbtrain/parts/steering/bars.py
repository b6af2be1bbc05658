"""Ends the loops in which a training is over bars of tqdm, as those of `nbtrain.progress`.

And those over Accelerate's loaders. These read a batch ahead: if they found no other, the one that
they have would be the last, and Accelerate would make a step before all gradients are accumulated.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ...part_api import Observer, patch


class _Loop:
    """A loop over a bar, or over a loader of Accelerate."""

    is_inside = False
    """Whether the loop's body runs; otherwise the bar fetches the next item."""
    is_ended = False

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader
        self.reads_loader = loader is not None
        """Whether its items are batches of a loader."""


class BarLoops(Observer):
    """The loops over bars that this process is in, from the outermost in.

    `on_loader_over` is called at the end of Accelerate's loader that fed the training, once that is
    finished: with True, if the code asks for a later pass.
    """

    purpose = "steering"

    def __init__(self, on_loader_over: Callable[[bool], None]) -> None:
        self._on_loader_over = on_loader_over
        self._open: list[_Loop] = []
        self._over: weakref.WeakSet[Any] = weakref.WeakSet()
        for cls in ("tqdm.std:tqdm", "tqdm.notebook:tqdm_notebook", "tqdm.rich:tqdm_rich"):
            patch(cls, "__iter__", self._iterate_bar)
        for cls in ("DataLoaderShard", "DataLoaderDispatcher"):
            patch(f"accelerate.data_loader:{cls}", "__iter__", self._iterate_loader)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_loader(self) -> bool:
        """Whether the training is in a loop over a loader of Accelerate."""
        return any(loop.loader is not None for loop in self._open)

    def _iterate_bar(self, original: Any, bar: Any) -> Iterator[Any]:
        return self._iterate(original(bar), _Loop())

    def _iterate_loader(self, original: Any, loader: Any) -> Iterator[Any]:
        """Iterate over a loader; not at all if it fed a training that is finished.

        Accelerate fails at a loader that has no batch for the first rank to share.
        """
        if loader in self._over:
            self._on_loader_over(True)
            return
        # What is evaluated has its own loop, which may stand still while a step is made.
        if not sys.modules["torch"].is_grad_enabled():
            yield from original(loader)
            return
        yield from self._iterate(original(loader), _Loop(loader))
        if loader in self._over:
            self._on_loader_over(False)

    def _iterate(self, items: Any, loop: _Loop) -> Iterator[Any]:
        """Iterate over the items, until the loop is ended."""
        self._open.append(loop)
        try:
            for item in items:
                loop.is_inside = True
                yield item
                if loop.is_ended:
                    break
                loop.is_inside = False
        finally:
            items.close()  # which closes the bar
            self._open.remove(loop)

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """Take note of the bars that fetch a batch: their loops are those of an epoch."""
        for loop in self._open:
            if fetch and not loop.is_inside:
                loop.reads_loader = True

    def end(self) -> None:
        """End all loops at their next item."""
        for loop in self._open:
            loop.is_ended = True
            if loop.loader is not None:
                self._over.add(loop.loader)

    def end_outer(self, *, has_loader: bool) -> None:
        """End all loops at their next item, but not that of the present epoch.

        That is the loop that reads a loader; without a loader, the innermost of several.
        """
        self.end()
        for loop in self._open:
            loop.is_ended = not loop.reads_loader
        if not has_loader and len(self._open) > 1:
            self._open[-1].is_ended = False
