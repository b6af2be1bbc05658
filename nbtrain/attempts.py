"""From the start of the ranks to their end, and again where another attempt may go better."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace

from .engines import Engine
from .engines.janitor import Janitor
from .folder import set_aside
from .outcome import is_echo
from .state import RankState, RunState
from .supervise import Interrupts, Supervisor
from .verdict import line
from .worker import Job

FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds before the second attempt, twice as many before each further one, and at most."""

ROOM = 66
"""The longest folder of temporary files in which sockets can be made: a path of one has 107 bytes,
103 on macOS, and a run's folder with a socket of nbtrain or `multiprocessing` adds 37."""

_MISTAKES = (
    "SyntaxError",
    "IndentationError",
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
)
"""What a function that never works raises before its first step, at every attempt."""


def carry_out(
    engine: Engine, job: Job, supervisor: Supervisor, interrupts: Interrupts
) -> BaseException | None:
    """Start and watch, attempt after attempt, until the run is over.

    Returns an exception that is at hand as such, not in the run folder.
    """
    job = replace(job, scratch=_scratch())
    janitor: Janitor | None = None
    supervisor.look_at_cards()
    try:
        while True:
            ranks = engine.start(job)
            try:
                if janitor is None and job.scratch and not engine.runs_here:
                    janitor = Janitor(job.scratch)  # now: the ranks are more urgent
                supervisor.watch(ranks, interrupts)
                supervisor.settle(ranks, interrupts)
            finally:
                ranks.close()
            state = supervisor.state
            if not supervisor.has_failed or not may_go_better(state):
                break
            reason = f"attempt {state.attempt} of {state.attempts} failed: {told(state)}"
            set_aside(job.folder, job.world_size, state.attempt)
            number = state.attempt + 1
            if not supervisor.begin_again(number, reason, wait_before(number), interrupts):
                break
            job = replace(job, attempt=number)
    except BaseException as error:  # an interrupt too: written here, raised by the caller
        supervisor.abort(f"{type(error).__name__}: {error}")
        return error
    finally:
        if janitor is not None:
            janitor.close()
        if job.scratch:
            shutil.rmtree(job.scratch, ignore_errors=True)
    supervisor.look_at_cards()
    supervisor.finish()
    return ranks.error


def _scratch() -> str:
    usual = tempfile.gettempdir()
    try:
        return tempfile.mkdtemp(prefix="nbtrain-", dir=usual if len(usual) <= ROOM else "/tmp")
    except OSError:  # a full disk: the run may not need it
        return ""


def wait_before(number: int) -> float:
    """Return the seconds before the `number`-th attempt: what was in the way may be gone then."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (number - 2))


def may_go_better(state: RunState) -> bool:
    """Whether there is another attempt, and the failure is none that it would only repeat."""
    if state.attempt >= state.attempts:
        return False
    if state.elsewhere is not None and (state.elsewhere.final or _is_only_echoed(state)):
        return not state.elsewhere.final  # it is for the node that failed to say
    began = any(_has_begun(rank) for rank in state.ranks)
    return began or not all(_is_mistake(rank) for rank in _causes(state))


def told(state: RunState) -> str:
    """Word why an attempt failed: the first failure that is no echo of another."""
    causes = _causes(state)
    if state.elsewhere is not None and _is_only_echoed(state):
        return state.elsewhere.text
    if not causes:
        return "no rank said why"
    first = min(causes, key=lambda rank: rank.ended or 0.0)
    return f"rank {first.rank}: {line(first)}"


def _causes(state: RunState) -> list[RankState]:
    failed = [rank for rank in state.ranks if rank.status == "failed"]
    return [rank for rank in failed if not is_echo(rank.error or "")] or failed


def _is_only_echoed(state: RunState) -> bool:
    return all(is_echo(rank.error or "") for rank in state.ranks if rank.status == "failed")


def _is_mistake(rank: RankState) -> bool:
    return (rank.error or "").partition(":")[0] in _MISTAKES


def _has_begun(rank: RankState) -> bool:
    """Whether a rank got beyond its first step."""
    steps = rank.trained.steps if rank.trained is not None else 0
    return steps > 0 or any(bar.n > 0 for bar in rank.bars.values()) or rank.step is not None
