"""What an engine is: something that turns a `Job` into running ranks and can end them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..events import Event
from ..plan import Plan
from ..worker import Job


@dataclass(frozen=True)
class Exit:
    """A rank that is gone; `returncode` is negative for a signal, None where nobody knows it.

    `cause` says why, where the engine knows: its node is lost. `verdict` says how that counts.
    """

    rank: int
    returncode: int | None
    time: float
    cause: str = ""
    verdict: str = ""


class Ranks(Protocol):
    """Ranks that were started, until `close`. Every method may be called at any time."""

    @property
    def error(self) -> BaseException | None:
        """The rank's exception itself, where the rank ran in this very process."""
        ...

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that was started, also of those that are gone.

        Empty as long as something else is waited for.
        """
        ...

    @property
    def nodes(self) -> Mapping[int, str]:
        """The host of each rank that does not run on this one, where its process can be seen."""
        ...

    @property
    def alive(self) -> frozenset[int]:
        """The ranks whose end has not been returned by `wait` yet."""
        ...

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended since the last call; wait up to `timeout` s for one."""
        ...

    def news(self) -> list[Event]:
        """Return what befell the run since the last call, other than an end of a rank."""
        ...

    def interrupt(self, ranks: Collection[int]) -> None:
        """Raise KeyboardInterrupt in ranks."""
        ...

    def terminate(self, ranks: Collection[int]) -> None:
        """End ranks, their child processes included, by SIGTERM."""
        ...

    def kill(self, ranks: Collection[int]) -> None:
        """End ranks, their child processes included, by SIGKILL."""
        ...

    def settle(self, timeout: float) -> bool:
        """Wait up to `timeout` s for what ranks that are gone left elsewhere; whether it is here.

        Asked until it is, or nobody wants to wait any more; then comes `close`.
        """
        ...

    def close(self) -> None:
        """Give back what belongs to the launch; kill ranks that are not gone by then."""
        ...


class Engine(Protocol):
    """One way for ranks to come to life."""

    @property
    def runs_here(self) -> bool:
        """Whether the rank is this very process: one rank, no forking, no watching."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What to mind about where the ranks will run, once they are prepared."""
        ...

    def prepare(self, plan: Plan) -> None:
        """Do what may refuse the plan. Raises `PlanError`; nothing was started."""
        ...

    def discard(self) -> None:
        """Let go of what was prepared, whether it was started or not."""
        ...

    def start(self, job: Job) -> Ranks:
        """Start every rank. Raises `LaunchError`, leaving none behind."""
        ...
