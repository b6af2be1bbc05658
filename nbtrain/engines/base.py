"""Defines an engine: a class that starts the ranks of a `Job` and can end them."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import PlanError
from ..findings import Finding
from ..planning.plan import Plan
from ..system import gpus
from ..tracking.events import Event
from ..transport.job import Job

Action = Literal["interrupt", "terminate", "kill"]

SIGNALS: Mapping[Action, signal.Signals] = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": getattr(signal, "SIGKILL", signal.SIGTERM),  # Windows has only SIGTERM
}
"""The signal for each action."""


@dataclass(frozen=True)
class Exit:
    """The end of a rank."""

    rank: int
    returncode: int | None
    """Negative for a signal; None if unknown."""
    time: float
    cause: str = ""
    """Why the rank ended, if the engine knows, for example that its node was lost."""
    verdict: str = ""
    """The rank's status then ('failed', 'stopped'), if the engine knows."""
    code: str = ""
    """The code of the cause, as in `events.Exited`."""


class Ranks(ABC):
    """Started ranks, until `close`. Every method may be called at any time."""

    error: BaseException | None = None
    """The rank's exception, if the rank ran in this process."""

    @property
    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The process of each started rank, including those that have ended.

        Empty until the ranks start.
        """

    @property
    def nodes(self) -> Mapping[int, str]:
        """The host of each rank whose process is visible but runs on another host."""
        return {}

    @property
    @abstractmethod
    def alive(self) -> frozenset[int]:
        """The ranks whose end `wait` has not returned yet."""

    @abstractmethod
    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended since the last call; wait up to `timeout` s for one."""

    def news(self) -> list[Event]:
        """Return the events of the run since the last call, except the ends of ranks."""
        return []

    @abstractmethod
    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Interrupt `ranks` (KeyboardInterrupt), or end them with their child processes."""

    @abstractmethod
    def close(self) -> None:
        """Kill the ranks that have not ended, and release the resources of the launch."""


class Engine(ABC):
    """A way to start ranks, for one launch: `resolve`, `prepare`, `start`, `discard`.

    The attributes describe to the rest of nbtrain what the engine can do, so that no other code
    needs to know its name.
    """

    name: str
    """The name in the run's manifest and on the board."""
    forks_kernel = False
    """Whether ranks inherit this process's state, including an initialised accelerator."""
    runs_in_kernel = False
    """Whether the only rank is this process, so that nothing is forked or watched."""
    ranks_stay = False
    """Whether the ranks exist before the run and after it."""
    can_stay = False
    """Whether ranks of this engine can stay: they connect to the notebook, and wait for tasks."""
    checks_host = True
    """Whether the ranks use this host's devices and memory, so that preflight checks them."""
    device = ""
    """torch's name of the device of all ranks; "" for GPUs or, without any, the CPU."""
    on_cluster = False
    """Whether ranks run on other hosts, without the user's terminal, and `address`, `spread`,
    `resources` and `wait_for_nodes` have an effect."""

    notes: Sequence[Finding] = ()
    """Notes for the user after `prepare`."""

    def check_options(self, plan: Plan) -> None:
        """Refuse options that have no effect on this engine. Raises `PlanError`."""
        cluster_options = plan.address or plan.spread or plan.resources or plan.wait_for_nodes
        if cluster_options and not self.on_cluster:
            raise PlanError(
                "address, resources and wait_for_nodes need -e ray, and nodes needs -e ray or "
                "-e slurm"
            )

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Fill in the engine, the number of ranks and the precision; return plan and device type.

        Without `num_processes`, there is one rank per GPU of this host, or 2 on the CPU without
        any. The device type is "cuda" or "cpu"; an engine of another device overrides this method.
        Raises `PlanError` if the engine cannot run the plan or refuses one of its options. Nothing
        has been started then.
        """
        self.check_options(plan)
        env = {**os.environ, **plan.env}
        count = gpus.gpu_count(env)
        ranks = plan.num_processes or count or gpus.DEFAULT_CPU_RANKS
        return self.with_ranks(plan, ranks), "cuda" if count else "cpu"

    def with_ranks(self, plan: Plan, ranks: int) -> Plan:
        """Return the plan with this engine, the number of ranks and a precision."""
        precision = plan.mixed_precision or "no"
        return replace(plan, engine=self.name, num_processes=ranks, mixed_precision=precision)

    def prepare(self, plan: Plan) -> None:
        """Do what can fail before the start. Raises `PlanError`. Nothing has been started then."""
        return

    def import_ahead(self, job: Job, modules: Sequence[str]) -> Callable[[], bool]:
        """Start to import modules once for all ranks, in another process; called before `start`.

        Returns a function that returns whether the import is still running. An engine that imports
        nothing ahead returns one that is always False.
        """
        return lambda: False

    def home_address(self, plan: Plan) -> str:
        """Return the address to which ranks that stay connect; '' if they run on this host."""
        return ""

    def reserve(self) -> contextlib.AbstractContextManager[None]:
        """Reserve ranks that stay for a task that the cell does not wait for."""
        return contextlib.nullcontext()

    def submit(self, job: Job) -> bool:
        """Have a scheduler start the run later, if this engine does that; return whether it does.

        `start` is not called then: the scheduler's job calls `run_submitted`.
        Raises `PlanError` or `LaunchError` if the scheduler refuses, and nothing was submitted.
        """
        return False

    def discard(self) -> None:
        """Release what was prepared, after a start and without one."""
        return

    @abstractmethod
    def start(self, job: Job) -> Ranks:
        """Start every rank. Raises `LaunchError`; no rank is running then."""
