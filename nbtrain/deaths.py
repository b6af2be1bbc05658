"""What a rank died of, where its return code misleads and its host knows more."""

from __future__ import annotations

import signal

from . import host
from .engines import Exit
from .folder import RunFolder
from .outcome import describe_returncode
from .state import RankState

FULL = 1 << 16
"""Bytes free at which the run folder's file system is full: no report fits."""


class Deaths:
    """Knows how many processes the system had killed for want of memory before the run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._oom_kills = host.oom_kills()

    def cause_of(self, ended: Exit, rank: RankState, ours: bool) -> tuple[str, tuple[str, ...]]:
        """Say what a rank died of, and what speaks for that; `ours`: it was sent SIGKILL."""
        if ended.cause:
            return ended.cause, ()
        folder = self._folder
        if ended.returncode == -signal.SIGKILL:
            return ("", ()) if ours else self._killed(rank)
        room = host.space(folder.path)
        told = folder.failure(ended.rank).exists() or rank.error
        if told or room is None or room.free > FULL or (ended.returncode or 0) < 0:
            return "", ()
        how = describe_returncode(ended.returncode)
        return f"{how}, and the disk of the run folder ({folder.path}) is full", ()

    def _killed(self, rank: RankState) -> tuple[str, tuple[str, ...]]:
        """Say whether a rank was killed for want of memory: the system's count of that tells.

        It counts for the whole cgroup: a kill explains one rank's death, not several.
        """
        before = self._oom_kills
        if before is None:
            return "", ()
        if (count := host.oom_kills() or 0) <= before:
            why = f"the system's count of processes killed for want of memory is still {count}"
            return "was killed by SIGKILL, and not for want of memory", (why,)
        self._oom_kills = before + 1
        why = f"the system's count of those went from {before} to {count}"
        held = rank.taken.memory
        seen = f"; it held {host.in_words(held)} when last seen" if held else ""
        whose = host.memory().whose
        return f"ran out of memory and was killed by the system ({whose}{seen})", (why,)
