"""Reports the bars of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ..hooks import Observer


class Bars(Observer):
    """Writes where a bar is."""

    purpose = "reporting bars"

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank

    def on_bar(self, number: int, closed: bool, shown: Mapping[str, Any]) -> None:
        """Report a bar that has moved."""
        event = ev.Progress(clock.now(), self._rank, bar=number, closed=closed, **shown)
        self._writer.write(event)
