"""Whether ranks that report nothing work all the same: by their use of the CPU and of files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import events as ev
from ..state import RankState, RunState

IDLE = 0.05
"""Cores: a rank that uses less, its children included, does nothing."""

READ_OR_WRITTEN = 1 << 20
"""Bytes that a rank which does nothing reads and writes at most."""


CALM = 30.0
"""Seconds for which ranks do nothing, before that is said of them."""


class Activity:
    """Remembers, for each rank, when it last used the CPU; files are looked at when asked."""

    def __init__(self) -> None:
        self._busy: dict[int, float] = {}
        self._measured: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._begun = 0.0

    def observe(self, event: ev.Resources, now: float) -> None:
        """Take note of a measurement."""
        if event.cpu is not None:
            self._measured[event.rank] = now
            if event.cpu >= IDLE:
                self._busy[event.rank] = now

    def are_at_rest(self, ranks: Sequence[RankState], state: RunState, now: float) -> bool:
        """Whether ranks have done nothing for `CALM` seconds; to be asked now and then.

        False where that is not known: on another host, or where none was measured meanwhile.
        """
        pids = {r.rank: r.pid for r in ranks if r.pid is not None and not r.node}
        used = _bytes_used(pids)
        known = used.keys() == {r.rank for r in ranks} == self._bytes.keys()
        calm = known and all(
            used[rank] - self._bytes[rank] <= READ_OR_WRITTEN
            and self._busy.get(rank, 0.0) <= self._begun
            for rank in used
        )
        if not calm or any(gpu[-1] for gpu in (state.host.gpus if state.host else ())):
            self._bytes, self._begun = used, now
        was_measured = all(self._measured.get(rank, 0.0) > self._begun for rank in used)
        return was_measured and now - self._begun >= CALM

    def forget(self) -> None:
        """Begin again: the ranks moved."""
        self._bytes = {}


def _bytes_used(pids: Mapping[int, int]) -> dict[int, int]:
    """Return what processes have read and written so far, for those that this host shows."""
    used: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            used[rank] = sum(int(line.split()[1]) for line in lines[:2])
    return used
