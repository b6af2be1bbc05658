"""Finds out why a rank ended if its return code misleads and its host knows more."""

from __future__ import annotations

import signal
from typing import NamedTuple

from ..system import host
from ..system.text import format_bytes
from ..tracking import events as ev
from ..tracking.run_folder import RunFolder
from ..tracking.state import RankState
from . import limits
from .failures import DISK_FULL, describe_returncode


class Cause(NamedTuple):
    """Why a rank ended; empty if only its return code is known."""

    text: str = ""
    evidence: str = ""
    """The facts behind the text."""
    code: str = ""
    """As in `events.Exited`."""


class OomKills:
    """Separates ranks that the system killed to free memory from those killed by someone else.

    The evidence is the system's count of such kills in this container, or on this host. The count
    names no process, so each kill since this object was made explains the death of one rank.
    """

    def __init__(self) -> None:
        self._explained_kills = host.oom_kills()
        self._host_kills = host.oom_kills_of_host()

    def explain_sigkill(self, *, node: str = "", memory_bytes: int | None = None) -> Cause:
        """Return why a rank of this host was killed by a SIGKILL that nbtrain did not send.

        Call it once per rank: an explained death uses up one kill of the system's count. `node` is
        the name of this host if it is not the launcher's, `memory_bytes` what the rank used in its
        last measurement. Empty if the count cannot be read and `node` is "".
        """
        place = f" on {node}" if node else ""
        before, count = self._explained_kills, host.oom_kills()
        if before is None or count is None:
            return Cause(f"was killed by SIGKILL{place}" if node else "")
        if count <= before:
            evidence = f"the system's count of out-of-memory kills is still {count}"
            host_kills = host.oom_kills_of_host()
            if None not in (self._host_kills, host_kills) and host_kills == self._host_kills:
                text = f"was killed by SIGKILL{place}, but not because memory ran out"
                return Cause(text, evidence, ev.NOT_MEMORY)
            # A limit outside of this container, which shows only its own, may have been reached.
            change = "cannot be read" if host_kills is None else "rose meanwhile"
            evidence = f"{evidence}; the count of the host {change}"
            return Cause(f"was killed by SIGKILL{place}", evidence)
        self._explained_kills = before + 1
        evidence = f"the system's count of out-of-memory kills rose from {before} to {count}"
        use = f"; the rank held {format_bytes(memory_bytes)} when last seen" if memory_bytes else ""
        bound = f"{host.memory().limit_text}{place}{use}"
        text = f"ran out of memory and was killed by the system ({bound})"
        return Cause(text, evidence, ev.OUT_OF_MEMORY)


class ExitCauses:
    """Explains the ends of a run's ranks on this host.

    Ranks that stay (`ranks_stay`) existed before the run, so their engine explains SIGKILL.
    """

    def __init__(self, folder: RunFolder, *, ranks_stay: bool = False) -> None:
        self._folder = folder
        self._oom_kills = None if ranks_stay else OomKills()

    def find_cause(self, rank: RankState, returncode: int | None, was_killed: bool) -> Cause:
        """Return what this host knows about the end of a rank; an empty `Cause` if nothing.

        For SIGKILL: whether memory ran out, but nothing if nbtrain sent it (`was_killed`); call it
        once per rank. For an exit code without a reported failure: whether the disk is full.
        """
        folder = self._folder
        if returncode == -signal.SIGKILL:
            if was_killed or self._oom_kills is None:
                return Cause()
            return self._oom_kills.explain_sigkill(memory_bytes=rank.usage.memory)
        space = host.space(folder.path)
        has_reported = folder.failure(rank.rank).exists() or rank.error
        has_space = space is None or space.free > limits.FULL_DISK_BYTES
        if has_reported or has_space or (returncode or 0) < 0:
            return Cause()
        end = describe_returncode(returncode)
        text = f"{end}, and the disk of the run folder ({folder.path}) is full"
        return Cause(text, code=DISK_FULL)
