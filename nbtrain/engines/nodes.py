"""The ranks of one node of several: the fork engine's, begun when all nodes have met.

Until then there are none, and whoever watches them draws the board, hears ■ and counts the time.
Afterwards they are over when the ranks of all nodes are.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from multiprocessing.connection import wait as wait_for

from .. import events as ev
from .. import serialize
from ..errors import LaunchError
from ..nodes import Nodes, World
from ..outcome import describe_returncode, is_echo
from ..plan import Plan
from ..worker import Job
from .base import Exit, Ranks
from .fork import ForkEngine
from .node_agent import News, Parted, Trouble, fork_agent
from .processes import ChildRanks

PATIENCE = 4.0
"""Seconds that the process beside the ranks has to end, once it is told to."""


class Agent:
    """The process beside the ranks, seen from the kernel."""

    def __init__(self, nodes: Nodes, job: Job) -> None:
        pid, self._said = fork_agent(nodes, job.world_size, job.folder.launcher_log)
        self._process = ChildRanks()
        self._process.add(0, pid)

    def tell(self, status: str, why: str = "") -> None:
        """Say how the ranks of this node are doing."""
        with contextlib.suppress(OSError):  # it is gone: that will be heard
            self._said.send((status, why))

    def hear(self, timeout: float = 0.0) -> object | None:
        """Return what it says next, waiting up to `timeout` s; `EOFError` is its end."""
        try:
            return self._said.recv() if wait_for([self._said], timeout) else None
        except (EOFError, OSError):
            return EOFError()

    def close(self, patience: float = 0.0) -> None:
        """End it, if it does not by itself."""
        ends = time.monotonic() + patience
        while self._process.alive and (left := ends - time.monotonic()) > 0:
            self._process.wait(left)
        self._process.close()
        self._said.close()


class NodesEngine(ForkEngine):
    """Forks one process a rank of this node, once the others are there."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._agent: Agent | None = None

    def prepare(self, plan: Plan) -> None:
        """Import torch, once for all processes."""
        import torch  # noqa: F401

    def discard(self) -> None:
        """Tell the other nodes that this one is not tried again, if it failed."""
        if self._agent is not None:
            self._agent.tell("over")
            self.drop_agent(PATIENCE)

    def start(self, job: Job) -> Ranks:
        """Return the ranks that will be there when all nodes have met."""
        return NodeRanks(self, job)

    def agent(self) -> Agent | None:
        """Return the agent of the attempt before, if there was one."""
        return self._agent

    def drop_agent(self, patience: float = 0.0) -> None:
        """End the agent, if it does not by itself."""
        if self._agent is not None:
            self._agent.close(patience)
            self._agent = None

    def next_agent(self, job: Job) -> Agent:
        """Put the agent of a new attempt in the place of the one before."""
        self.drop_agent(PATIENCE)
        self._agent = Agent(self._nodes, job)
        return self._agent

    def fork(self, job: Job) -> Ranks:
        """Fork the ranks."""
        return super().start(job)

    @property
    def others(self) -> int:
        return self._nodes.count - 1


class NodeRanks:
    """Ranks that wait for other nodes, run beside them, and are over with them."""

    error: BaseException | None = None

    def __init__(self, engine: NodesEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._ranks: Ranks | None = None
        self._world: World | None = None
        self._waiting = frozenset(range(job.world_size))
        self._held: list[Exit] = []  # the last ranks of this node, which others are behind
        self._is_joining = self._is_deaf = False
        self._has_failed = self._has_succeeded = self._is_ending = self._is_stopped = False
        self._bereft = set[int]()  # ranks that only lost others
        self._news: list[ev.Event] = []
        self._agent = engine.agent()
        if self._agent is not None:
            self._agent.tell("again")
        else:
            self._join()

    def _join(self) -> None:
        self._agent, self._is_joining = self._engine.next_agent(self._job), True
        others = self._engine.others
        words = f"waiting for {others} other node{'s' if others > 1 else ''}"
        if self._job.attempt == 1:
            self._news.append(ev.Waiting(time.time(), -1, words))

    @property
    def pids(self) -> dict[int, int]:
        return self._ranks.pids if self._ranks is not None else {}

    @property
    def nodes(self) -> Mapping[int, str]:
        return {}

    @property
    def alive(self) -> frozenset[int]:
        there = self._ranks.alive if self._ranks is not None else self._waiting
        return there | {held.rank for held in self._held}

    def news(self) -> list[ev.Event]:
        """Return what other nodes did since the last call."""
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
            return self._keep_last(ended)
        self._listen(timeout)
        wants_more = self._has_succeeded or (self._bereft and not self._has_failed)
        is_over = self._is_deaf or self._is_ending or not wants_more
        return self._release() if is_over else []

    def _await_others(self, timeout: float) -> None:
        """Start the ranks if the others are there. Raises `LaunchError` if they do not come."""
        assert self._agent is not None
        match self._agent.hear(timeout):
            case World() as world:
                self._world, self._is_joining = world, False
                self._ranks = self._engine.fork(replace(self._job, world=world))
                self._tell_place(world)
            case Parted():
                self._join()
            case Trouble(text):
                raise LaunchError(text)
            case EOFError():
                raise LaunchError(
                    "the process that joins the other nodes ended: see "
                    f"{self._job.folder.launcher_log}"
                )
            case News(final=True) as news:  # else it is of the attempt before
                self._take(news)

    def _tell_place(self, world: World) -> None:
        if self._job.attempt > 1:
            return
        last = world.first + self._job.world_size - 1
        which = f"ranks {world.first} to {last}" if last > world.first else f"rank {last}"
        here = f"node {world.node} of {world.nodes}: {which} of {world.size}"
        if world.first:
            here += f"; what is called rank 0 here is rank {world.first}, and so on"
        self._news.append(ev.Waiting(time.time(), -1, ""))
        self._news.append(ev.Note(time.time(), -1, here))

    def _listen(self, timeout: float) -> None:
        assert self._agent is not None
        heard = None if self._is_deaf else self._agent.hear(timeout)
        while heard is not None:
            match heard:
                case News() as news:
                    self._take(news)
                case Parted():  # all have succeeded, or all is said
                    self._is_deaf, self._has_succeeded = True, False
                    return
                case EOFError():
                    self._take(News("what kept in touch with the other nodes is gone", final=True))
                    self._is_deaf, self._has_succeeded = True, False
                    return
            heard = self._agent.hear(0.0)

    def _take(self, news: News) -> None:
        if news.stopped:  # an interrupt there is one here: ranks have their time to save
            with contextlib.suppress(OSError):
                self._job.folder.stop_wish.write_text(f"on {news.text}")
        else:
            self._news.append(ev.Elsewhere(time.time(), -1, news.text, news.final))

    def _keep_last(self, ended: list[Exit]) -> list[Exit]:
        """Tell the others of ranks that ended, and keep those back that nobody is to miss yet."""
        assert self._ranks is not None
        assert self._agent is not None
        folder, codes = self._job.folder, {one.rank: one.returncode for one in ended}
        for rank in range(self._job.world_size):
            if folder.failure(rank).exists():  # it may take its time to end
                self._tell_failure(rank, None)
            elif rank in codes and not self._is_ending and not folder.result(rank).exists():
                self._tell_failure(rank, codes[rank])
        if self._ranks.alive or self._has_failed or self._is_ending:
            return ended
        if not self._bereft:
            self._agent.tell("succeeded")
            self._has_succeeded = True
            words = "done on this node; waiting for the others"
            self._news.append(ev.Waiting(time.time(), -1, words))
        self._held = ended[-1:]  # after an echo until others say why, or patience is over
        return ended[:-1]

    def _tell_failure(self, rank: int, returncode: int | None) -> None:
        """Tell the others why a rank failed, once; that it lost its peers is no reason."""
        if self._has_failed or self._is_stopped or rank in self._bereft:
            return
        assert self._world is not None
        assert self._agent is not None
        said = describe_returncode(returncode)
        with contextlib.suppress(OSError):
            said = serialize.loads(self._job.folder.failure(rank).read_bytes())[1].headline
        text = f"rank {self._world.first + rank}: {said}"
        if not is_echo(said):
            self._has_failed = True
            self._agent.tell("failed", text)
            return
        if not self._bereft:
            self._agent.tell("bereft", text)
        self._bereft.add(rank)

    def _release(self) -> list[Exit]:
        released, self._held = self._held, []
        return released

    def interrupt(self, ranks: Collection[int]) -> None:
        """Raise KeyboardInterrupt in ranks, and have the other nodes do so."""
        if not self._is_stopped and self._agent is not None:
            self._is_stopped = True
            self._agent.tell("stopped")
        self._end("interrupt", ranks, -signal.SIGINT)

    def terminate(self, ranks: Collection[int]) -> None:
        """End ranks by SIGTERM."""
        self._end("terminate", ranks, -signal.SIGTERM)

    def kill(self, ranks: Collection[int]) -> None:
        """End ranks by SIGKILL."""
        self._end("kill", ranks, -signal.SIGKILL)

    def _end(self, action: str, ranks: Collection[int], code: int) -> None:
        self._is_ending = True
        if self._ranks is not None:
            how: Callable[[Collection[int]], None] = getattr(self._ranks, action)
            how(ranks)
        elif self._waiting:
            if self._is_joining:  # it hears nothing but the others
                self._engine.drop_agent()
            now = time.time()
            self._held = [Exit(rank, code, now) for rank in sorted(self._waiting)]
            self._waiting = frozenset()

    def settle(self, timeout: float) -> bool:
        """Return at once: what ranks leave is here."""
        return True

    def close(self) -> None:
        """Give back what belongs to the launch; the agent is the engine's."""
        if self._ranks is not None:
            self._ranks.close()
