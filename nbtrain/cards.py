"""What GPUs hold before a run's ranks start and after they are gone: is it given back?"""

from __future__ import annotations

import time
from collections.abc import Iterator

from . import devices, events

ANSWER, GIVEN_BACK = 5.0, 1.0
"""Seconds that the driver has to answer, and then to give back what ranks held that are gone."""

SLACK = 64 << 20
"""Bytes by which what a GPU holds may change without a reason of ours."""

_last: devices.GpuWatch | None = None


def look(device: str, before: events.Cards | None) -> Iterator[events.Cards]:
    """Yield what the GPUs hold, where there are any; with `before`, as soon as it is no more.

    What has not come back in a second is told as it is. A driver that does not answer is left
    alone, in a thread that it holds, and not asked again.
    """
    global _last
    if device != "cuda" or (_last is not None and not _last.is_over):
        return
    watch = _last = devices.GpuWatch(0.0, lambda _took: 0.05)
    found, deadline = None, time.monotonic() + ANSWER
    while time.monotonic() < deadline and not watch.is_over:
        if watch.seen:
            deadline = min(deadline, time.monotonic() + GIVEN_BACK) if found is None else deadline
            found = _told(watch.seen)
            if before is None or given_back(before, found):
                break
        time.sleep(0.01)
    watch.close()
    if found is not None:
        yield found


def given_back(before: events.Cards, after: events.Cards) -> bool:
    """Whether no GPU holds more than before."""
    held = {index: used for index, _, used in before.gpus}
    return all(used <= held.get(index, used) + SLACK for index, _, used in after.gpus)


def _told(gpus: tuple[devices.Gpu, ...]) -> events.Cards:
    told = tuple((gpu.index, gpu.name, gpu.used << 20) for gpu in gpus)
    return events.Cards(time.time(), -1, told)
