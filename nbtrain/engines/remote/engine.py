"""The base of engines that run ranks on other hosts.

A separate process (`driver`) talks to the cluster. A process per node (`node_ranks`) starts ranks
there as the spawn engine does here, and what they write is copied into the run folder
(`transport.file_sync`), so that for everything else in nbtrain it is a run like any other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ...errors import LaunchError
from ...findings import Finding
from ...planning.plan import Call, Plan
from ...system.files import Tail
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import event_tail, new_events
from ...transport import payload
from ...transport.job import Job
from ...transport.limits import CONNECT_TIMEOUT_S
from ...worker.rank_environment import rank_environment
from ..base import SIGNALS, Action, Engine, Exit, Ranks
from ..limits import UNKILLABLE_AFTER_S
from . import dependencies
from .client import DriverClient, kept
from .driver import Driver
from .node_ranks import NodeOrder, node_events
from .nodes import Node, NodeRequest

_TEXTS = ("note", "waiting")
"""The kinds of messages that are texts and become events."""


class RemoteEngine(Engine):
    """Starts ranks on other hosts. `resolve` comes first: only the cluster knows what it has."""

    can_stay = True
    checks_host = False
    on_cluster = True

    driver: ClassVar[type[Driver]]
    """What talks to the cluster, in a process of its own. Its module has a `main`."""

    def __init__(self) -> None:
        self._client: DriverClient | None = None
        self._modules: tuple[str, ...] = ()
        self._sources = ""
        """The notebook's folder, if the ranks need the modules in it and nodes may not see it."""
        self._environment: dict[str, str] = {}
        """The variables that ranks have of this process, where its environment is theirs."""

    def _join(self, cause: object, connect: Callable[[DriverClient], list[Any]]) -> list[Any]:
        """Join a cluster by a new driver, or by that of the last run; return the cluster's nodes.

        The driver of the last run is used again if it was started for the same `cause`. Raises
        `LaunchError` if the cluster cannot be joined.
        """
        self._client = kept.pop(self.name, None)
        if self._client is not None:
            with contextlib.suppress(LaunchError):  # its cluster, or its part here, may have ended
                has_all = self._client.environment.keys() <= os.environ.keys()
                if has_all and self._client.cause == (os.getpid(), cause):
                    self._client.send(self.driver.nodes)
                    nodes: list[Node] = self._client.answer(CONNECT_TIMEOUT_S)
                    return nodes
            self._client.close_and_reap()
        self._client = DriverClient(self.driver)
        self._client.cause = os.getpid(), cause
        return connect(self._client)

    def _find_sources(self, plan: Plan) -> str:
        """Return the notebook's folder if the ranks may need modules in it, otherwise ""."""
        folder = Path.cwd()
        is_needed = plan.takes_tasks or dependencies.beside(plan.task, folder)
        return str(folder) if is_needed else ""

    def bundle(self, plan: Plan, per_node: int) -> dict[str, float]:
        """Return what a node must have free for its ranks, by the names of the cluster."""
        return {}

    def prepare(self, plan: Plan) -> None:
        """Choose nodes, check them, and send the payload of the ranks.

        Waits for nodes up to the plan's `wait_for_nodes` s, and prints that. Raises `LaunchError`
        or `PlanError`; `discard` then gives back what was reserved.
        """
        client, (least, most) = self._require_client(), plan.spread or (1, 1)
        per_node = (plan.num_processes or 1) // most
        modules = dependencies.find_packages(plan.task)
        is_imported = {name: name in sys.modules for name in modules}
        request = NodeRequest(
            nodes=(least, most),
            per_node=per_node,
            modules={**is_imported, "nbtrain": True, "torch": True},
            bundle=self.bundle(plan, per_node),
            patience_s=plan.wait_for_nodes,
            sources=self._sources,
        )
        client.send(self.driver.place, request)
        with contextlib.closing(
            payload.pack(plan, leaves_host=True)
        ) as packed:  # while the nodes get ready
            answer = client.answer(on_message=printer(plan))
            self.notes = (*self.notes, *(Finding("node", text) for text in answer))
            path = packed.path.replace("/proc/self/", f"/proc/{os.getpid()}/")
            client.request(self.driver.store_payload, path)

    def discard(self) -> None:
        """Keep the driver for the next launch if its run has ended here, otherwise leave it.

        A process that was forked for the run closes its own copy.
        """
        client, self._client = self._client, None
        if client is None:
            return
        with contextlib.suppress(LaunchError):
            if client.is_free:
                client.send(Driver.rest)  # its answer is read before that to the next request
                kept[self.name] = client
                return
        client.close_and_reap()

    def import_ahead(self, job: Job, modules: Sequence[str]) -> Callable[[], bool]:
        """Have each node import modules once for its ranks."""
        self._modules = tuple(modules)
        return lambda: False

    def start(self, job: Job) -> Ranks:
        """Request the start of the ranks, and return them before they have started.

        Deletes the stacks of an earlier attempt. Raises `LaunchError` if the driver has ended.
        """
        most = (job.plan.spread or (1, 1))[1]
        own = rank_environment(job, 0, os.environ)  # those of a rank are not the notebook's
        env = {n: v for n, v in self._environment.items() if n not in own}
        # Nodes get the task packed, with the classes it needs.
        plan = replace(job.plan, task=Call(len), env={**env, **job.plan.env})
        part = replace(job, plan=plan, shared_classes=frozenset())
        order = NodeOrder(part, str(Path.cwd()), clock.offset(), modules=self._modules)
        for rank in range(job.world_size):  # of an earlier attempt, whose processes are gone
            job.folder.stacks(rank).unlink(missing_ok=True)
        client, logs = (
            self._require_client(),
            [job.folder.path / node_events(i) for i in range(most)],
        )
        tails = [event_tail(path) for path in logs]
        for tail, path in zip(tails, logs, strict=True):  # after the events of earlier attempts
            tail.skip_to(path.stat().st_size if path.exists() else 0)
        client.send(Driver.start, order)
        return RemoteRanks(job, client, tails)

    def _require_client(self) -> DriverClient:
        if self._client is None:
            raise LaunchError("the connection to the cluster was closed")
        return self._client


def printer(plan: Plan) -> Callable[[str, Any], None]:
    """Return a function that prints what is being waited for: there is no board yet."""
    limit = f" ({plan.wait_for_nodes:g} s at most)" if plan.wait_for_nodes else ""

    def on_message(kind: str, text: Any) -> None:
        if kind == "waiting" and plan.view != "none":
            print(f"{text}{limit}", flush=True)

    return on_message


class RemoteRanks(Ranks):
    """Ranks on other hosts, which the driver starts and reports on.

    There are no `pids` until it has reported them as started.
    """

    def __init__(self, job: Job, client: DriverClient, tails: Sequence[Tail]) -> None:
        self._client, self._tails = client, tails
        self._pids: Mapping[int, int] = {}
        self._nodes: Mapping[int, str] = {}
        self._has_waited = False
        self._is_starting, self._is_closing = True, False
        self._alive = set(range(job.world_size))
        self._is_last = not 1 < job.attempt <= job.plan.max_restarts
        self._exits: list[Exit] = []
        self._news: list[ev.Event] = []

    def _begin(self, pids: Mapping[int, int], nodes: Mapping[int, str]) -> None:
        """Take the processes and nodes of ranks that have started; those without a node end."""
        self._is_starting, self._pids, self._nodes = False, pids, nodes
        if self._has_waited:
            self._news.append(ev.Waiting(clock.now(), -1, ""))
        now, absent = clock.now(), sorted(self._alive - set(pids))
        self._exits += [
            Exit(rank, None, now, "no node had room for it", "stopped") for rank in absent
        ]

    def _fail_to_start(self, reason: str) -> None:
        """Fail the attempt, for example because a node was lost while it started.

        Raises `LaunchError` if there is no next attempt, or the run never started.
        """
        if self._is_last:
            raise LaunchError(reason)
        self._is_starting, now = False, clock.now()
        cause = f"could not be started again: {reason.partition(chr(10))[0]}"
        self._exits += [Exit(rank, None, now, cause, "failed") for rank in sorted(self._alive)]

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def nodes(self) -> Mapping[int, str]:
        return self._nodes

    @property
    def alive(self) -> frozenset[int]:
        return frozenset(self._alive)

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended; see `Ranks.wait`. A message of any kind ends the waiting.

        Raises `LaunchError` if the ranks could not be started.
        """
        try:
            for kind, value in self._client.messages(0 if self._exits else timeout):
                if kind == "exit" and not self._is_starting:  # else of the attempt before
                    self._exits.append(value)
                elif kind in _TEXTS:
                    self._add_news(kind, value)
                elif kind == "answer" and self._is_starting:
                    self._begin(*value)
                elif kind == "refusal" and self._is_starting:
                    self._fail_to_start(value)
        except LaunchError as error:
            if self._is_starting:
                raise
            lost = self._alive - {e.rank for e in self._exits}
            now = clock.now()
            self._exits += [Exit(r, None, now, str(error), "failed") for r in sorted(lost)]
        exits = [e for e in self._exits if e.rank in self._alive]
        self._exits = []
        self._alive -= {e.rank for e in exits}
        return exits

    def _add_news(self, kind: str, text: str) -> None:
        """Keep a text of the driver as an event."""
        if kind == "waiting":
            self._news.append(ev.Waiting(clock.now(), -1, text))
            self._has_waited = True
        else:
            self._news.append(ev.RunNote.of(Finding("node", text)))

    def news(self) -> list[ev.Event]:
        """Return what nodes reported of themselves and of their ranks' processes."""
        news, self._news = self._news, []
        for tail in self._tails:
            news += new_events(tail)
        return news

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Have ranks sent a signal, and except for an interrupt their child processes, too.

        While the ranks start, any signal gives up the start: all of them count as ended by it.
        """
        with contextlib.suppress(LaunchError):  # `wait` sees it
            if not self._is_starting:
                self._client.send(Driver.signal, frozenset(ranks), action)
                return
            self._is_starting, code = False, -SIGNALS[action]
            self._exits += [Exit(rank, code, clock.now()) for rank in sorted(self._alive)]
            self._send_close()

    def _send_close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._client.send(Driver.close)

    def close(self) -> None:
        """End what is left on the nodes, and wait up to 15 s for that."""
        with contextlib.suppress(LaunchError):
            self._send_close()
            self._client.answer(UNKILLABLE_AFTER_S)
            self._client.is_free = self._client.last_answer == "answer"
        if self._client.is_awaited:  # the ranks that it cannot end end with it
            self._client.close()
        self._alive.clear()
