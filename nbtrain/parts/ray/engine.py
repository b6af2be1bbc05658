"""The ray engine: it runs ranks on the nodes of a Ray cluster.

A separate process (`driver`) talks to Ray. One actor per node (`node_actor`, `node_ranks`)
starts ranks there as the spawn engine does here, and what they write is copied into the run folder
(`transport.file_sync`), so that for everything else in nbtrain it is a run like any other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...part_api import (
    CONNECT_TIMEOUT_S,
    SIGNALS,
    UNKILLABLE_AFTER_S,
    Action,
    Call,
    Engine,
    Exit,
    Finding,
    Job,
    LaunchError,
    Plan,
    Ranks,
    clock,
    event_tail,
    interpreter_command,
    new_events,
    own_address,
    payload,
    rank_environment,
)
from ...part_api import events as ev
from ...system.files import Tail
from . import dependencies
from .driver import Driver
from .node_ranks import NodeOrder, node_events
from .reservation import Node, NodeRequest, bundle, cluster_address, nodes_with_room

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Driver, P], Awaitable[T]]

_ELSEWHERE = "8.8.8.8"
"""An address that is not of this host: to find out its own as Ray does. Nothing is sent there."""

_ANSWERS = ("answer", "refusal")
"""The kinds of the messages that end a request."""

_TEXTS = ("note", "waiting")
"""The kinds of messages that are texts and become events."""


class DriverClient:
    """Starts the driver. It ends when this end of the socket, and all copies of it, are closed."""

    def __init__(self) -> None:
        launcher_end, driver_end = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        order = {"path": [p for p in sys.path if p], "socket": driver_end.fileno()}
        try:
            self._process = subprocess.Popen(
                interpreter_command(f"{Driver.__module__}", order),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[driver_end.fileno()],
                start_new_session=True,  # an interrupt of the kernel is not for it
            )
        except BaseException as error:  # an interrupt: its traceback would keep the socket open
            launcher_end.close()
            self._output.close()
            if isinstance(error, OSError):
                reason = f"no process could be started ({error.strerror})"
                raise LaunchError(reason) from error
            raise
        finally:
            driver_end.close()
        self._connection: Connection[Any, Any] = Connection(launcher_end.detach())
        self._unanswered = 0  # each request has one answer, and they come in order
        self.is_free = False
        """Whether the driver has ended a run, all of it, and does nothing else."""
        self.last_answer = ""
        """Its kind: an answer, or a refusal."""
        self.cause: object = None
        """What it was started for; see `RayEngine._connect`."""

    def request(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the driver; return its answer. Raises `LaunchError` for a refusal."""
        self.send(method, *args, **kwargs)
        answer: T = self.answer()
        return answer

    def send(self, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Request a call of a driver's method, without waiting for its answer.

        Raises `LaunchError` if the driver has ended.
        """
        try:
            self.is_free = False
            self._connection.send((method.__name__, args, kwargs))
            self._unanswered += 1
        except OSError as error:
            raise self._driver_error() from error

    def answer(
        self, patience: float | None = None, on_message: Callable[[str, Any], None] | None = None
    ) -> Any:
        """Wait for the answer to the last request, and return it; None without an open request.

        Answers to earlier requests are dropped, other messages go to `on_message`. Raises
        `LaunchError` for a refusal, if nothing at all comes for `patience` seconds (None: no
        limit), and if the driver has ended.
        """
        kind, answer = "answer", None
        while self._unanswered:
            messages = self.messages(patience)
            if not messages:
                raise LaunchError("the process that talks to Ray does not answer")
            for message in messages:
                if message[0] in _ANSWERS:  # the last of them counts
                    kind, answer = message
                elif on_message is not None:
                    on_message(*message)
        if kind == "refusal":
            raise LaunchError(str(answer))
        return answer

    def messages(self, patience: float | None) -> list[tuple[str, Any]]:
        """Return the messages that came, answers too; wait for the first up to `patience` s.

        None waits without a limit. Empty if none came. Raises `LaunchError` if the driver has
        ended.
        """
        messages: list[tuple[str, Any]] = []
        try:
            while self._connection.poll(0 if messages else patience):
                messages.append(self._connection.recv())
                if messages[-1][0] in _ANSWERS:
                    self._unanswered -= 1
                    self.last_answer = messages[-1][0]
        except (EOFError, OSError) as error:
            if not messages:  # else at the next call: its last messages count
                raise self._driver_error() from error
        return messages

    @property
    def is_awaited(self) -> bool:
        """Whether a request was not answered yet."""
        return self._unanswered > 0

    def _driver_error(self) -> LaunchError:
        """Return the error of a driver that has ended, with the last line that it printed."""
        output = b""
        with contextlib.suppress(OSError, ValueError):
            output = os.pread(self._output.fileno(), 1 << 16, 0)
        lines = output.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1][:300] if lines else "it printed no reason"
        return LaunchError(f"the process that talks to Ray has ended ({reason})")

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
        self._output.close()

    def close_and_reap(self) -> None:
        """Close this end, and leave no zombie: others may have copies of it until a run's end."""
        self.close()
        threading.Thread(target=self.reap, name="nbtrain-ray", daemon=True).start()

    def reap(self) -> None:
        """Wait for the driver's end."""
        with contextlib.suppress(ChildProcessError):
            self._process.wait()


class _Kept:
    """What this process keeps for its next launch."""

    driver: DriverClient | None = None
    """A driver that has joined a cluster, and that a launch like the one before may use again."""
    cluster: _OwnCluster | None = None
    """The cluster of ``--address local``."""

    def forget_driver(self) -> None:
        """Leave the driver to the process that this one was forked from: it ends with that."""
        if self.driver is not None:
            self.driver.close()
            self.driver = None


kept = _Kept()
os.register_at_fork(after_in_child=kept.forget_driver)


class _OwnCluster:
    """The cluster that a kernel starts for ``--address local``: its driver keeps it.

    It stays, so that only the first launch waits for Ray, and ends with the kernel and the runs
    that the kernel left behind: they have copies of the driver's socket.
    """

    def __init__(self) -> None:
        self.pid, self.environment = os.getpid(), dict(os.environ)
        self._client = DriverClient()
        try:
            self._client.request(Driver.connect, "local", None)
            self.address, self.auth_mode = self._client.request(Driver.address)
        except BaseException:  # an interrupt, too
            self._client.close_and_reap()
            raise
        self.close_and_reap = self._client.close_and_reap

    def changes(self) -> dict[str, str]:
        """Return the variables of the environment that its processes have otherwise, or not."""
        return {n: v for n, v in os.environ.items() if self.environment.get(n) != v}

    def is_usable(self) -> bool:
        """Ask the driver for its nodes, and return whether this process can use the cluster.

        False if the driver does not answer, belongs to another process, or cannot give ranks the
        variables of the environment.
        """
        is_same = not any(map(_is_read_at_start, self.changes()))
        has_all = self.environment.keys() <= os.environ.keys()
        if self.pid == os.getpid() and is_same and has_all:
            with contextlib.suppress(LaunchError):  # Ray or its driver has died
                self._client.send(Driver.nodes)
                self._client.answer(CONNECT_TIMEOUT_S)
                return True
        return False


def _own() -> _OwnCluster:
    """Return the local cluster of this kernel; start one if the last cannot be used.

    Waits for Ray. The last one is left to end with the runs that use it. Raises `LaunchError` if
    none can be started.
    """
    last, kept.cluster = kept.cluster, None
    try:
        if last is not None and last.is_usable():
            kept.cluster = last
    finally:  # an interrupt leaves half an answer behind
        if last is not None and kept.cluster is None:
            last.close_and_reap()
    if kept.cluster is None:
        kept.cluster = _OwnCluster()
    return kept.cluster


def _is_read_at_start(name: str) -> bool:
    """Whether Ray, Python, the loader or a driver reads a variable when their process starts."""
    return name.startswith(("RAY_", "PYTHON", "LD_", "CUDA_")) or name.endswith("_VISIBLE_DEVICES")


class RayEngine(Engine):
    """Starts ranks on a cluster. `resolve` comes first: only the cluster knows what it has."""

    name = "ray"
    can_stay = True
    checks_host = False
    on_cluster = True

    def __init__(self) -> None:
        self._client: DriverClient | None = None
        self._modules: tuple[str, ...] = ()
        self._environment: dict[str, str] = {}
        """The variables that ranks have of this process, where its environment is theirs."""

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Connect, and return the plan with its number of ranks, and the kind of device.

        ``local`` may start a cluster. With `wait_for_nodes`, nodes are reserved and waited for,
        which is printed. Raises `PlanError` for options that do not suit, and `LaunchError` where
        there is no cluster or too little room.
        """
        self.check_options(plan)
        cluster_address(plan.address, os.environ)
        address, auth_mode = plan.address, ""
        if address == "local":
            own = _own()
            address, auth_mode, self._environment = own.address, own.auth_mode, own.changes()
        folder = Path.cwd()
        needs_sources = plan.takes_tasks or dependencies.beside(plan.task, folder)
        nodes = self._connect(address, str(folder) if needs_sources else None, auth_mode)
        gpus = max((int(node.total.get("GPU", 0)) for node in nodes), default=0)
        least, most = plan.spread or (1, 1)
        per_node = (plan.num_processes or most * (gpus or 1)) // most
        each = {**({"GPU": 1.0} if gpus else {}), **plan.resources}
        able = len(nodes_with_room(nodes, bundle(per_node, each)))
        if able < most and plan.wait_for_nodes:
            needed = bundle(per_node, each)
            request = NodeRequest((least, most), per_node, needed, plan.wait_for_nodes)
            self._require_client().send(Driver.reserve, request)
            able = self._require_client().answer(on_message=_printer(plan))
        count = min(most, max(least, able))
        if count < most:
            ranks = f"{count * per_node} of {most * per_node} ranks"
            text = f"{ranks}: {able} of {most} nodes have room."
            self.notes = [Finding("fewer-nodes", text)]
        plan = replace(plan, spread=(least, count), resources=each)
        return self.with_ranks(plan, count * per_node), "cuda" if each.get("GPU") else "cpu"

    def _connect(self, address: str | None, sources: str | None, auth_mode: str) -> list[Node]:
        """Join a cluster by a new driver, or by that of the last run; return the cluster's nodes.

        The driver of the last run is used again if address, sources and environment are the same.
        Raises `LaunchError` if the cluster cannot be joined.
        """
        read = {n: v for n, v in os.environ.items() if n.startswith(("RAY_", "PYTHON"))}
        files = dependencies.fingerprint(Path(sources)) if sources else None
        cause = (os.getpid(), address, auth_mode, read, sources, files)
        self._client, kept.driver = kept.driver, None
        if self._client is not None:
            with contextlib.suppress(LaunchError):  # its cluster, or Ray in it, may have ended
                if self._client.cause == cause:
                    self._client.send(Driver.nodes)
                    nodes: list[Node] = self._client.answer(CONNECT_TIMEOUT_S)
                    return nodes
            self._client.close_and_reap()
        self._client = DriverClient()
        self._client.cause = cause
        return self._client.request(Driver.connect, address, sources, auth_mode)

    def home_address(self, plan: Plan) -> str:
        """Return this host's address on the way to the cluster.

        It is 127.0.0.1 for a local cluster, or without a route. Raises `PlanError` if the cluster's
        address is invalid.
        """
        if plan.address == "local":
            return "127.0.0.1"
        address, _ = cluster_address(plan.address, os.environ)
        host = (address or "").rpartition(":")[0].strip("[]")
        return own_address(host or _ELSEWHERE) or "127.0.0.1"

    def prepare(self, plan: Plan) -> None:
        """Reserve nodes, check them, and send the payload of the ranks.

        Waits for nodes up to the plan's `wait_for_nodes` s, and prints that. Raises `LaunchError`
        or `PlanError`; `discard` then gives back what was reserved.
        """
        client, (least, most) = self._require_client(), plan.spread or (1, 1)
        per_node = (plan.num_processes or 1) // most
        modules = {name: name in sys.modules for name in dependencies.find_packages(plan.task)}
        request = NodeRequest(
            nodes=(least, most),
            per_node=per_node,
            bundle=bundle(per_node, plan.resources),
            patience=plan.wait_for_nodes,
            modules={**modules, "nbtrain": True, "torch": True},
        )
        client.send(Driver.place, request)
        with contextlib.closing(
            payload.pack(plan, leaves_host=True)
        ) as packed:  # while the nodes get ready
            answer = client.answer(on_message=_printer(plan))
            self.notes = (*self.notes, *(Finding("node", text) for text in answer))
            path = packed.path.replace("/proc/self/", f"/proc/{os.getpid()}/")
            client.request(Driver.store_payload, path)

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
                kept.driver = client
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


def _printer(plan: Plan) -> Callable[[str, Any], None]:
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
