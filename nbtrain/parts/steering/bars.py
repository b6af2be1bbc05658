"""Ends the loops of a training over bars of tqdm, as those of `nbtrain.progress`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...part_api import Observer, patch


class _Loop:
    """A loop over a bar."""

    is_inside = False
    """Whether the loop's body runs; otherwise the bar fetches the next item."""
    reads_loader = False
    """Whether the bar fetches batches of a loader."""
    is_ended = False


class BarLoops(Observer):
    """The loops over bars that this process is in, from the outermost in."""

    purpose = "steering"

    def __init__(self) -> None:
        self._open: list[_Loop] = []
        for cls in ("tqdm.std:tqdm", "tqdm.notebook:tqdm_notebook", "tqdm.rich:tqdm_rich"):
            patch(cls, "__iter__", self._iterate)

    def __len__(self) -> int:
        return len(self._open)

    def _iterate(self, original: Any, bar: Any) -> Iterator[Any]:
        """Iterate over a bar, until its loop is ended."""
        loop, items = _Loop(), original(bar)
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

    def end_outer(self, *, has_loader: bool) -> None:
        """End all loops at their next item, but not that of the present epoch.

        That is the loop that reads a loader; without a loader, the innermost of several.
        """
        self.end()
        for loop in self._open:
            loop.is_ended = not loop.reads_loader
        if not has_loader and len(self._open) > 1:
            self._open[-1].is_ended = False
