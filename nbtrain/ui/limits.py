"""Limits of what a run's displays show, and how often they draw it."""

from __future__ import annotations

from typing import NamedTuple


class BoardLimits(NamedTuple):
    """What a board draws at most of logs and epochs."""

    log_bytes: int
    """Of all logs together, as HTML. Older lines are left out."""
    log_lines: int
    """Of each log."""
    epochs: int
    """Rows of the table of epochs."""


LIVE_BOARD = BoardLimits(4_000, log_lines=12, epochs=5)
"""During the run, when a board is sent several times per second."""

FINAL_BOARD = BoardLimits(60_000, log_lines=60, epochs=10)
"""After the run, when a board is saved with the notebook."""

MAX_DRAWN_RANKS = 64
"""Strips, and entries of a menu. Of more ranks, neighbours share a strip."""

MIN_STEP_OVERLAP = 0.3
"""Two metrics count alike if the last step of one is at least this share of the other's. Else one
counts epochs and the other steps."""

# How often something is drawn.

MIN_DRAW_INTERVAL_S = 0.2
"""Time between two drawings of a run that changes."""

MAX_DRAW_INTERVAL_S = 1.0
"""The same if nothing changes, or if all cores are busy: a drawing takes about 5 ms of one. For so
long, displays in a terminal wait for other ranks that may print the same line, and a task on live
ranks has no board."""

REPORT_INTERVAL_S = 10.0
"""Time between two lines of progress of a rank in plain text, between two sentences for a screen
reader while only numbers change, between two means of the machine for a tracker, and between a
failed drawing and the next attempt."""
