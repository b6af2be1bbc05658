"""The board's colours: mid-tones that read on white and on black, and are told apart by all.

Each has a contrast of more than 4 : 1 on #fff and on #111; no colour can have 4.5 on both.
"""

BLUE = "#357fc0"
GREEN = "#1f8a5b"
RED = "#d64545"
AMBER = "#a87400"
GREY = "#787878"
TRACK = "rgba(128,128,128,.25)"

STATUS = {
    "starting": GREY,
    "running": BLUE,
    "compiling": BLUE,
    "saving": BLUE,
    "waiting": AMBER,
    "slow?": AMBER,
    "stuck?": AMBER,
    "stopping": AMBER,
    "failing": RED,
    "done": GREEN,
    "succeeded": GREEN,
    "failed": RED,
    "stopped": GREY,
    "interrupted": AMBER,
    "timed out": AMBER,
}


def of(status: str) -> str:
    """Return the colour of a status or a badge."""
    return STATUS.get(status, GREY)
