"""Finds out why a rank ended when its return code misleads and its host knows more."""

from __future__ import annotations

import signal
from typing import NamedTuple

from ..system import host
from ..system.text import format_bytes
from ..tracking import events as ev
from ..tracking.run_folder import RunFolder
from ..tracking.state import RankState
from .failures import describe_returncode

FULL = 1 << 16
"""Bytes free at which the run folder's file system counts as full: no report fits."""


class Cause(NamedTuple):
    """Why a rank ended; all empty where nobody knows more than its return code."""

    text: str = ""
    evidence: str = ""
    """What speaks for that."""
    code: str = ""
    """As in `events.Exited`."""


class OomKills:
    """Separates ranks that the system killed to free memory from those that somebody killed.

    The evidence is the system's own count of such kills in this container, or on this host. It
    names no process, so each kill since this object was made explains the death of one rank.
    """

    def __init__(self) -> None:
        self._explained = host.oom_kills()
        self._of_host = host.oom_kills_of_host()

    def explain(self, *, node: str = "", memory: int | None = None) -> Cause:
        """Return why a rank of this host was killed by SIGKILL that nbtrain did not send.

        `node` is the name of this host, where that is not the launcher's; `memory` the bytes that
        the rank held when last seen.
        """
        place = f" on {node}" if node else ""
        before, count = self._explained, host.oom_kills()
        if before is None or count is None:
            return Cause(f"was killed by SIGKILL{place}" if node else "")
        if count <= before:
            evidence = f"the system's count of out-of-memory kills is still {count}"
            of_host = host.oom_kills_of_host()
            if None not in (self._of_host, of_host) and of_host == self._of_host:
                text = f"was killed by SIGKILL{place}, but not because memory ran out"
                return Cause(text, evidence, ev.NOT_MEMORY)
            # A limit further up, which a container does not show, may have been reached.
            above = "cannot be read" if of_host is None else "rose meanwhile"
            evidence = f"{evidence}; the count of the host {above}"
            return Cause(f"was killed by SIGKILL{place}", evidence)
        self._explained = before + 1
        evidence = f"the system's count of out-of-memory kills rose from {before} to {count}"
        held = f"; the rank held {format_bytes(memory)} when last seen" if memory else ""
        cause = (
            f"ran out of memory and was killed by the system ({host.memory().bound}{place}{held})"
        )
        return Cause(cause, evidence, ev.OUT_OF_MEMORY)


class ExitCauses:
    """Explains the ends of the ranks of a run on this host.

    Ranks that stay were there before the run: who started them knows why they are killed.
    """

    def __init__(self, folder: RunFolder, *, ranks_stay: bool = False) -> None:
        self._folder = folder
        self._oom_kills = None if ranks_stay else OomKills()

    def cause_of(self, rank: RankState, returncode: int | None, was_killed: bool) -> Cause:
        """Return why a rank ended; `was_killed`: nbtrain sent it SIGKILL."""
        folder = self._folder
        if returncode == -signal.SIGKILL:
            if was_killed or self._oom_kills is None:
                return Cause()
            return self._oom_kills.explain(memory=rank.usage.memory)
        space = host.space(folder.path)
        has_reported = folder.failure(rank.rank).exists() or rank.error
        if has_reported or space is None or space.free > FULL or (returncode or 0) < 0:
            return Cause()
        end = describe_returncode(returncode)
        text = f"{end}, and the disk of the run folder ({folder.path}) is full"
        return Cause(text, code="disk full")
