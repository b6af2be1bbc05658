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
from ..system import gpus, tpu
from ..tracking.events import Event
from ..transport.job import Job

CRASHED = 70
"""Exit code of a rank whose worker itself failed (EX_SOFTWARE)."""

Action = Literal["interrupt", "terminate", "kill"]

SIGNALS: Mapping[Action, signal.Signals] = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": getattr(signal, "SIGKILL", signal.SIGTERM),  # Windows has one way to end a process
}
"""The signal that ranks are sent for each action; it is what they die of, if they do."""


@dataclass(frozen=True)
class Exit:
    """The end of a rank."""

    rank: int
    returncode: int | None
    """Negative for a signal; None where nobody knows it."""
    time: float
    cause: str = ""
    """Why the rank ended, where the engine knows: its node is lost, for example."""
    verdict: str = ""
    """How the end counts ('failed', 'stopped'), where the engine knows."""
    code: str = ""
    """Of the cause, as `events.Exited` has it."""


class Ranks(ABC):
    """Ranks that were started, until `close`. Every method may be called at any time."""

    error: BaseException | None = None
    """The rank's exception itself, where the rank ran in this very process."""

    @property
    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The process of each rank that was started, also of those that have ended.

        Empty as long as something else is waited for.
        """

    @property
    def nodes(self) -> Mapping[int, str]:
        """The host of each rank that does not run on this one, where its process can be seen."""
        return {}

    @property
    @abstractmethod
    def alive(self) -> frozenset[int]:
        """The ranks whose end has not been returned by `wait` yet."""

    @abstractmethod
    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended since the last call; wait up to `timeout` s for one."""

    def news(self) -> list[Event]:
        """Return what happened to the run since the last call, other than the end of a rank."""
        return []

    @abstractmethod
    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Have `ranks` interrupted (KeyboardInterrupt), or ended with their child processes."""

    @abstractmethod
    def close(self) -> None:
        """Give back what belongs to the launch; kill ranks that have not ended by then."""


class Engine(ABC):
    """One way for ranks to come to life, for one launch: resolve, prepare, start, discard.

    What others must know of an engine it declares here; nobody else asks for its name.
    """

    name: str
    """What a run on this engine is called in its manifest and on the board."""
    forks_kernel = False
    """Whether ranks inherit this process's state, an accelerator that was initialised included."""
    runs_in_kernel = False
    """Whether the rank is this very process: one rank, no forking, no watching."""
    ranks_stay = False
    """Whether the ranks were there before the run, and stay after it."""
    can_stay = False
    """Whether ranks of this engine may be live: they can connect to the notebook, and wait."""
    checks_host = True
    """Whether the ranks use this host's devices and memory, so that preflight looks at them."""
    tpu_device = ""
    """torch's name of a TPU, where the engine drives one; else it has GPUs, or the CPU."""
    on_cluster = False
    """Whether the plan's `address`, `spread`, `resources` and `wait_for_nodes` mean anything."""
    can_downcast = False
    """Whether the plan's `downcast_bf16` means anything."""

    notes: Sequence[Finding] = ()
    """What to mind about the places of the ranks, once they are prepared."""

    def check_options(self, plan: Plan) -> None:
        """Refuse options that mean nothing on this engine. Raises `PlanError`."""
        if plan.downcast_bf16 and not self.can_downcast:
            raise PlanError(
                "downcast_bf16 is for a TPU with torch_xla; leave it out with this engine"
            )
        cluster_options = plan.address or plan.spread or plan.resources or plan.wait_for_nodes
        if cluster_options and not self.on_cluster:
            raise PlanError(
                "address, nodes, resources and wait_for_nodes need a Ray cluster: add -e ray"
            )

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Replace every 'auto' by what this host offers; return the kind of device, too.

        Raises `PlanError` for what the engine cannot do; nothing was started.
        """
        self.check_options(plan)
        env = {**os.environ, **plan.env}
        if self.tpu_device:
            ranks = tpu.ranks(tpu.find(env=env), plan.num_processes, env, self.name)
            return self.resolved(plan, ranks), self.tpu_device
        count = gpus.gpu_count(env)
        ranks = plan.num_processes or count or gpus.CPU_DEFAULT
        return self.resolved(plan, ranks), "cuda" if count else "cpu"

    def resolved(self, plan: Plan, ranks: int) -> Plan:
        """Return the plan with this engine, a number of ranks and a precision."""
        precision = plan.mixed_precision or "no"
        return replace(plan, engine=self.name, num_processes=ranks, mixed_precision=precision)

    def prepare(self, plan: Plan) -> None:
        """Do what may still refuse the plan. Raises `PlanError`; nothing was started."""
        return

    def import_ahead(self, job: Job, modules: Sequence[str]) -> Callable[[], bool]:
        """Begin to import modules once for all ranks, in a process that is not this one.

        Returns what says whether that goes on; the ranks are started after it.
        """
        return lambda: False

    def home_address(self, plan: Plan) -> str:
        """Return the address by which live ranks reach this host; '': they are on it."""
        return ""

    def occupied(self) -> contextlib.AbstractContextManager[None]:
        """Keep the ranks that stay for a task that the cell does not wait for."""
        return contextlib.nullcontext()

    def discard(self) -> None:
        """Let go of what was prepared, whether it was started or not."""
        return

    @abstractmethod
    def start(self, job: Job) -> Ranks:
        """Start every rank. Raises `LaunchError`, leaving none behind."""
