"""Limits of what a run's displays show, and how often they draw it."""

from __future__ import annotations

from typing import NamedTuple


class BoardLimits(NamedTuple):
    """What a board draws at most. Drawings that take more bytes are left out or become coarser."""

    board_bytes: int
    """Of the whole board, as HTML."""
    strip_bytes: int
    """Of the strips of ranks."""
    log_bytes: int
    """Of all logs together."""
    log_lines: int
    """Of each log."""
    epochs: int
    """Rows of the table of epochs."""


LIVE_BOARD = BoardLimits(33_000, 4_500, 4_000, log_lines=12, epochs=5)
"""During the run, when a board is sent several times per second."""

FINAL_BOARD = BoardLimits(150_000, 16_000, 60_000, log_lines=60, epochs=10)
"""After the run, when a board is saved with the notebook."""

MAX_RANK_ROWS = 16
"""With more ranks, only those that differ from the others have a row or a line."""

MAX_DRAWN_RANKS = 64
"""Strips, and entries of a menu. Of more ranks, neighbours share a strip."""

MAX_NAMED_RANKS = 6
"""Ranks that have a row of their own because they differ."""

MIN_GROUP_RANKS = 3
"""Fewer ranks are not grouped: each has a row, and a line of logs that differs in the rank's number
stays as it is. Between two ranks, it is unknown which one differs from the normal."""

MIN_GAP_SHARE = 0.05
"""A difference in progress or pace that is shown. Less is chance: ranks report at different
moments."""

MAX_LISTED = 8
"""Lines for nodes, logs of single ranks, metrics of a summary."""

MAX_RESULTS = 32
"""Different results of ranks, and values that they saved."""

MAX_MERGED_LOGS = 24
"""Different logs whose lines are merged. The time for it grows with their number squared."""

MAX_LOG_LINE_CHARS = 160
"""Longer lines of a board's log are cut."""

MIN_STRIP_COLUMNS = 6
"""Strips are drawn from this many bins of time, and never have fewer columns."""

MIN_STEP_OVERLAP = 0.3
"""Two metrics count alike if the last step of one is at least this share of the other's. Else one
counts epochs and the other steps."""

# How often something is drawn.

BOARD_DELAY_S = 1.0
"""A task on live ranks that ends sooner has no board."""

MIN_DRAW_INTERVAL_S = 0.2
MAX_DRAW_INTERVAL_S = 2.0
"""Time between two drawings of a run that changes. The longer one is used if all cores are busy."""

MAX_BYTES_PER_S = 120_000
"""What the updates of a display send: a large board is drawn less often."""

MAX_DRAW_CORE_SHARE = 0.004
"""The share of a core that drawing takes while the ranks use all cores."""

OUTPUT_INTERVAL_S = 0.5
"""How long what ranks print or display is gathered. Other ranks may print the same line a little
later, and a rank may draw a figure again at every step."""

PROGRESS_INTERVAL_S = 5.0
"""Time between two lines of progress of a rank in plain text."""

STATUS_INTERVAL_S = 15.0
"""Time between two sentences for a screen reader while only numbers change."""

DRAW_RETRY_S = 5.0
"""Time between a failed drawing and the next attempt."""
