"""Whether a loss explodes: it grows without end, step after step, and is still a number."""

from __future__ import annotations

import math

FIRST = 8
"""Losses at first that the others are compared with, the largest of them."""

TIMES = 1e6
"""How many times larger a loss has to be. Not of less than 1: some losses begin at 0."""

ROW = 8
"""Losses in a row that have to be so large, three in four larger than all before."""

RISE = 10.0
"""How many times larger than the first of that row the last one has to be."""


class LossGrowth:
    """Judges a loss by its values, in order. A loss that falls without end is no explosion.

    All of it together is what a step too large does: each makes the loss larger by a factor. A
    single large loss, one on another scale after a change of phase, the losses of two models in
    turns, or a reward that grows with what the model learns do not look like that.
    """

    def __init__(self) -> None:
        self.limit = -math.inf
        """`see` has to get each loss above it; of the first ones, all."""
        self.row = 0
        """Losses above the limit, without one below."""
        self.has_exploded = False
        self._count = 0
        self._start = 1.0
        self._records = 0
        self._lowest = self._top = 0.0

    def see(self, value: float) -> None:
        """Take a finite loss above the limit."""
        if self._count < FIRST:
            self._count += 1
            self._start = max(self._start, abs(value))
            if self._count == FIRST:
                self.limit = self._top = TIMES * self._start
            return
        self._lowest = self._lowest if self.row else value
        self.row += 1
        if value > self._top:
            self._records, self._top = self._records + 1, value
        self.has_exploded = self.has_exploded or (
            self.row >= ROW and 4 * self._records >= 3 * self.row and value >= RISE * self._lowest
        )

    def calm(self) -> None:
        """Take it that a loss was below the limit again."""
        self.row = self._records = 0
        self._top, self.has_exploded = self.limit, False
