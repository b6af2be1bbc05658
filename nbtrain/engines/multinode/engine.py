"""The ranks of one node of several: the fork engine's, started when all nodes have met.

Until then there are none, but the launcher already draws the board, reacts to ■ and counts the
time. Afterwards they have ended when the ranks of all nodes have.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait as wait_for

from ...errors import LaunchError
from ...planning.plan import Plan
from ...planning.world import Placement, Rendezvous
from ...system.text import plural
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.diagnosis.failures import describe_returncode, is_secondary_failure
from ...transport import result_pickler
from ...worker.job import Job
from ..base import SIGNALS, Action, Exit, Ranks
from ..fork import ForkEngine
from ..process.children import ChildRanks
from ..process.forking import fork_process, ready_to_fork
from . import agent
from .agent import AllParted, PeerReport

PATIENCE = 4.0
"""Seconds that the agent has to end by itself."""


class AgentClient:
    """The kernel's end of the agent, the process that agrees with those of other nodes."""

    def __init__(self, nodes: Rendezvous, job: Job) -> None:
        self._connection, agent_end = Pipe()
        log = job.folder.launcher_log
        body = partial(agent.main, agent_end, nodes, job.world_size, log, os.getpid())
        try:
            with contextlib.closing(agent_end), ready_to_fork():
                pid = fork_process(body)
        except OSError as error:
            self._connection.close()  # the traceback of an error that is kept would hold it
            reason = f"no process could be forked to join the other nodes ({error.strerror})"
            raise LaunchError(reason) from error
        self._process = ChildRanks()
        self._process.add(0, pid)

    def send(self, status: str, reason: str = "") -> None:
        """Report how the ranks of this node are doing."""
        with contextlib.suppress(OSError):  # it has ended: `receive` will return that
            self._connection.send((status, reason))

    def receive(self, timeout: float = 0.0) -> object | None:
        """Return its next message, waiting up to `timeout` s; `EOFError` once it has ended."""
        try:
            return self._connection.recv() if wait_for([self._connection], timeout) else None
        except (EOFError, OSError):
            return EOFError()

    def close(self, patience: float = 0.0) -> None:
        """Wait up to `patience` s for its end, then end it."""
        ends = time.monotonic() + patience
        while self._process.alive and (left := ends - time.monotonic()) > 0:
            self._process.wait(left)
        self._process.close()
        self._connection.close()


class MultinodeEngine(ForkEngine):
    """Forks one process per rank of this node, once the other nodes are ready."""

    can_stay = False

    def __init__(self, nodes: Rendezvous) -> None:
        self.nodes = nodes
        self.agent: AgentClient | None = None
        """The agent of the last attempt, if there was one."""

    def prepare(self, plan: Plan) -> None:
        """Import torch, once for all processes."""
        import torch  # noqa: F401

    def discard(self) -> None:
        """Report to the other nodes that this one does not try again, if it failed."""
        if self.agent is not None:
            self.agent.send("over")
            self.drop_agent(PATIENCE)

    def start(self, job: Job) -> Ranks:
        """Return the ranks that will be there when all nodes have met."""
        return JoinedRanks(self, job)

    def drop_agent(self, patience: float = 0.0) -> None:
        """End the agent, after up to `patience` s in which it may end by itself."""
        if self.agent is not None:
            self.agent.close(patience)
            self.agent = None


class JoinedRanks(Ranks):
    """Ranks that wait for other nodes, run beside them, and end with them."""

    def __init__(self, engine: MultinodeEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._ranks: Ranks | None = None
        self._first = 0
        self._waiting = frozenset(range(job.world_size))
        self._held: list[Exit] = []
        """The last ranks of this node to end, held back until the other nodes are done, too."""
        self._is_joining = self._has_parted = False
        self._has_failed = self._has_succeeded = self._is_ending = self._is_stopped = False
        self._lost_peers = set[int]()
        """The ranks that failed only because they lost ranks of other nodes."""
        self._news: list[ev.Event] = []
        if engine.agent is not None:
            self._agent = engine.agent
            self._agent.send("again")
        else:
            self._join()

    def _join(self) -> None:
        self._engine.drop_agent(PATIENCE)
        self._agent = self._engine.agent = AgentClient(self._engine.nodes, self._job)
        self._is_joining = True
        if self._job.attempt == 1:
            others = plural(self._engine.nodes.count - 1, "other node")
            self._news.append(ev.Waiting(clock.now(), -1, f"waiting for {others}"))

    @property
    def pids(self) -> dict[int, int]:
        return self._ranks.pids if self._ranks is not None else {}

    @property
    def alive(self) -> frozenset[int]:
        alive = self._ranks.alive if self._ranks is not None else self._waiting
        return alive | {held.rank for held in self._held}

    def news(self) -> list[ev.Event]:
        """Return what other nodes reported since the last call."""
        news, self._news = self._news, []
        return news

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended; see `Ranks.wait`."""
        if self._is_ending and self._ranks is None:
            return self._release()
        if self._ranks is None:
            self._await_others(timeout)
            return []
        if self._ranks.alive:
            ended = self._ranks.wait(timeout)
            self._listen(0.0)
            return self._hold_last(ended)
        self._listen(timeout)
        waits = self._has_succeeded or (self._lost_peers and not self._has_failed)
        return [] if waits and not (self._has_parted or self._is_ending) else self._release()

    def _await_others(self, timeout: float) -> None:
        """Start the ranks if all nodes have met. Raises `LaunchError` if they did not in time."""
        match self._agent.receive(timeout):
            case Placement() as world:
                self._first, self._is_joining = world.first, False
                self._ranks = ForkEngine.start(self._engine, replace(self._job, world=world))
                if self._job.attempt == 1:
                    self._announce(world)
            case AllParted():
                self._join()
            case LaunchError() as error:
                raise error
            case EOFError():
                raise LaunchError(
                    "the process that joins the other nodes ended: see "
                    f"{self._job.folder.launcher_log}"
                )
            case PeerReport(final=True) as report:  # others are of the attempt before
                self._add(report)

    def _announce(self, world: Placement) -> None:
        last = world.first + self._job.world_size - 1
        ranks = f"ranks {world.first} to {last}" if last > world.first else f"rank {last}"
        text = f"node {world.node} of {world.nodes}: {ranks} of {world.size}"
        if world.first:
            text += f"; this notebook shows rank {world.first} as rank 0, and so on"
        self._news.append(ev.Waiting(clock.now(), -1, ""))
        self._news.append(ev.RunNote(clock.now(), -1, text))

    def _listen(self, timeout: float) -> None:
        message = None if self._has_parted else self._agent.receive(timeout)
        while message is not None:
            if isinstance(message, EOFError):
                text = "the process that keeps in touch with the other nodes has ended"
                self._add(PeerReport(text, final=True))
            elif isinstance(message, PeerReport):
                self._add(message)
            if isinstance(message, (EOFError, AllParted)):  # nothing more will come
                self._has_parted, self._has_succeeded = True, False
                return
            message = self._agent.receive()

    def _add(self, report: PeerReport) -> None:
        if report.stopped:  # an interrupt there is one here: ranks have their time to save
            with contextlib.suppress(OSError):
                self._job.folder.stop_request_file.write_text(f"on {report.text}")
        else:
            failed = ev.PeerNodeFailed(clock.now(), -1, report.text, report.final)
            self._news.append(failed)

    def _hold_last(self, ended: list[Exit]) -> list[Exit]:
        """Report failures to the other nodes; return the ended ranks, but the last of the node.

        That one has ended once the other nodes have succeeded, too. If it only lost its peers, it
        is held until another node reports the reason, or the patience for that is over.
        """
        assert self._ranks is not None
        folder, codes = self._job.folder, {e.rank: e.returncode for e in ended}
        for rank in range(self._job.world_size):
            if folder.failure(rank).exists():  # it may need time to end
                self._report_failure(rank, None)
            elif rank in codes and not self._is_ending and not folder.result(rank).exists():
                self._report_failure(rank, codes[rank])
        if self._ranks.alive or self._has_failed or self._is_ending:
            return ended
        if not self._lost_peers:
            self._agent.send("succeeded")
            self._has_succeeded = True
            text = "done on this node; waiting for the others"
            self._news.append(ev.Waiting(clock.now(), -1, text))
        self._held = ended[-1:]
        return ended[:-1]

    def _report_failure(self, rank: int, returncode: int | None) -> None:
        """Report to the other nodes, once, why a rank failed; losing its peers is no reason."""
        if self._has_failed or self._is_stopped or rank in self._lost_peers:
            return
        headline, is_echo = describe_returncode(returncode), False
        with contextlib.suppress(OSError):
            data = self._job.folder.failure(rank).read_bytes()
            error = result_pickler.loads(data)[1]
            headline = error.headline
            is_echo = is_secondary_failure(error.type_name, error.text)
        text = f"rank {self._first + rank}: {headline}"
        if not is_echo:
            self._has_failed = True
            self._agent.send("failed", text)
            return
        if not self._lost_peers:
            self._agent.send("bereft", text)
        self._lost_peers.add(rank)

    def _release(self) -> list[Exit]:
        released, self._held = self._held, []
        return released

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Send ranks a signal; an interrupt is one on the other nodes, too."""
        if action == "interrupt" and not self._is_stopped:
            self._is_stopped = True
            self._agent.send("stopped")
        self._is_ending = True
        if self._ranks is not None:
            self._ranks.signal(ranks, action)
        elif self._waiting:
            if self._is_joining:  # it listens to the other nodes only
                self._engine.drop_agent()
            now, code = clock.now(), -SIGNALS[action]
            self._held = [Exit(rank, code, now) for rank in sorted(self._waiting)]
            self._waiting = frozenset()

    def close(self) -> None:
        """Give back what belongs to the launch; the agent belongs to the engine."""
        if self._ranks is not None:
            self._ranks.close()
