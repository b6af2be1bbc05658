"""The process that starts and follows the ranks of a run on other hosts.

The kernel has no thread, and no socket but one, for a cluster: this process does what its
`DriverClient` requests, copies what the nodes' ranks write into the run folder, and ends with the
launcher. Everything of the run on the cluster ends with it. How nodes are found and reached is the
subclass's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from ...errors import LaunchError
from ...planning.world import Placement
from ...system.files import write_atomically
from ...tracking import clock
from ...tracking.limits import POLL_INTERVAL_S, UNRESPONSIVE_AFTER_S
from ...tracking.run_folder import RunFolder
from ...transport.file_sync import FileCopies
from ...transport.orders import OrderReader
from .. import limits
from ..base import Action, Exit
from .node_ranks import NodeOrder, NodeRanks, RankExit
from .nodes import (
    Link,
    LinkError,
    LinkUnavailable,
    Method,
    Node,
    NodeLost,
    NodeRequest,
    PlacedNode,
    describe_error,
)

P = ParamSpec("P")
T = TypeVar("T")

_QUESTIONS = {"stacks": NodeRanks.write_stacks, "recorders": NodeRanks.dump_recorders}
"""The questions that anyone may write into the run folder (`RunFolder.ask_remote`)."""


def serve(kind: type[Driver], order: Mapping[str, Any]) -> None:
    """Serve the launcher at the other end of a socket, by a driver, until it closes."""
    connection: Connection[Any, Any] = Connection(order["socket"])
    driver = kind(connection)
    try:
        asyncio.run(driver.serve())
    finally:
        driver.shutdown()


@dataclass
class Member:
    """A node that takes part in a run."""

    node: Node
    link: Link
    order: NodeOrder
    copies: FileCopies
    running: set[int]
    """The ranks whose end was not reported yet."""
    answered: float = field(default_factory=time.monotonic)
    is_silent: bool = False


class Driver(ABC):
    """Carries out one request of the launcher after the other, and reports between them."""

    cluster = ""
    """What it talks to, in the texts of errors."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._request: NodeRequest | None = None
        self._members: list[Member] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_free = False
        """Whether a run has ended here, and no other has sent a request."""

    async def serve(self) -> None:
        """Call the methods that the launcher names until it closes the connection; reply in order.

        The requests run one after the other. A request to close cancels those before it, and so
        does the end of the connection.
        """
        loop = asyncio.get_running_loop()
        pending: list[asyncio.Task[None]] = []
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, args, kwargs = await loop.run_in_executor(None, self._receive)
                pending = [task for task in pending if not task.done()]
                if name == "close":
                    await self._cancel(pending)
                call = functools.partial(getattr(self, name), *args, **kwargs)
                pending.append(loop.create_task(self._answer_request(call, pending[-1:])))
        await self._cancel(pending)

    def _receive(self) -> Any:
        """Return the next request. Raises `EOFError` if no run follows the last for a long time."""
        while not self._connection.poll(limits.DRIVER_KEPT_S):
            if self._is_free:
                raise EOFError
        request = self._connection.recv()
        self._is_free = False
        return request

    async def _cancel(self, pending: Sequence[asyncio.Task[None]]) -> None:
        """Cancel requests in order, and answer each."""
        for task in pending:  # in order, because their answers must be
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    self._report("refusal", "it was cancelled")

    async def _answer_request(
        self, call: Callable[[], Awaitable[Any]], before: Sequence[asyncio.Task[None]]
    ) -> None:
        """Do what was requested, after the request `before` it, and answer."""
        try:
            if before:
                await asyncio.wait(before)
            self._report("answer", await call())
        except Exception as error:  # clusters raise many kinds: the launcher shows them
            self._report("refusal", describe_error(error))

    def _report(self, kind: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended: `serve` will see it
            self._connection.send((kind, value))

    # Requests

    @abstractmethod
    async def nodes(self) -> Sequence[Node]:
        """Return the nodes of the cluster that was joined, for another run."""

    @abstractmethod
    async def place(self, request: NodeRequest) -> list[str]:
        """Choose nodes, and start nbtrain's process on each; return the notes about them."""

    @abstractmethod
    async def store_payload(self, path: str) -> None:
        """Take the ranks' payload from a file, for each node."""

    @abstractmethod
    async def choose_nodes(self, *, again: bool) -> Sequence[PlacedNode]:
        """Return the nodes of the run; for a later attempt, choose those that are left `again`.

        Raises `LaunchError` if there are too few.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back the nodes of a run that has ended; do nothing if there are none."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the cluster, with nothing of this driver left on it."""

    async def start(self, order: NodeOrder) -> tuple[dict[int, int], dict[int, str]]:
        """Start the ranks of an order; return the process and the node of each.

        A later attempt first ends the one before, and chooses nodes again. From then on, the
        ranks' files are copied and their ends reported. Raises `LaunchError` for a node that fails,
        or too few nodes.
        """
        if order.job.attempt > 1:
            await self.close()
        placed = await self.choose_nodes(again=order.job.attempt > 1)
        assert self._request is not None
        home = order.job.folder
        self._members = _members(order, placed, self._request.per_node)
        ports = await self._on_all(lambda m: m.link.begin(m.order))
        # Now: the launcher may hand the run over to another process when it has begun.
        manifest = home.manifest.read_bytes()
        is_shared = all(
            await self._on_all(lambda m: m.link.call(NodeRanks.has_run_folder, manifest))
        )
        await self._on_all(lambda m: m.link.call(NodeRanks.keep_checkpoints, is_shared))
        clock.follow(order.clock)
        pids = await self._on_all(lambda m: _start_on(m, ports[0]))
        for member in self._members:
            self._follow(self._watch(member))
            self._follow(self._copy(member))
            self._follow(self._pass_on_orders(member))
        self._follow(self._answer_questions(home))
        nodes = {rank: m.node.name for m in self._members for rank in m.order.ranks}
        return {rank: pid for of_node in pids for rank, pid in of_node.items()}, nodes

    async def signal(self, ranks: Collection[int], action: Action) -> None:
        """Interrupt, terminate or kill ranks; return without waiting for their nodes."""
        for member in self._members:
            if member.running.intersection(ranks):
                self._follow(self._ask(member, NodeRanks.signal, ranks, action))

    # Steps of the requests

    async def _on_all(self, call: Callable[[Member], Awaitable[T]]) -> list[T]:
        """Make a call for all nodes at once; return the answers in the order of the nodes.

        Raises `LaunchError` with the node's name for any error.
        """

        async def on(member: Member) -> T:
            try:
                return await call(member)
            except Exception as error:  # of any kind: the user must learn which node it is of
                raise LaunchError(describe_error(error, member.node.name)) from error

        return list(await asyncio.gather(*map(on, self._members)))

    # In the background

    def _follow(self, work: Awaitable[Any]) -> None:
        """Do some work in the background, without the errors of a lost node."""

        async def follow() -> None:
            with contextlib.suppress(LinkError):  # `_watch` reports it
                await work

        task = asyncio.get_running_loop().create_task(follow())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, member: Member, method: Method[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a node, again after each break of the link; raise `LinkError` once it has ended."""
        while True:
            waiting = asyncio.ensure_future(member.link.call(method, *args, **kwargs))
            try:
                while not (await asyncio.wait([waiting], timeout=1.0))[0]:
                    self._note_silence(member)
                answer = waiting.result()
            except LinkUnavailable:
                self._note_silence(member)
                await asyncio.sleep(0.5)
                continue
            member.answered = time.monotonic()
            if member.is_silent:
                member.is_silent = False
                self._report("note", f"{member.node.name} answers again")
            return answer

    def _note_silence(self, member: Member) -> None:
        """Report, once, that a node has been silent for a while."""
        if not member.is_silent and time.monotonic() - member.answered > UNRESPONSIVE_AFTER_S + 1:
            member.is_silent = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - UNRESPONSIVE_AFTER_S))
            silence = f"{member.node.name} has not answered since {since}"
            self._report("note", f"{silence}; its ranks may still be running")

    async def _watch(self, member: Member) -> None:
        """Report the ranks of a node as they end, once all that they left is copied."""
        seen = 0
        try:
            while member.running:
                for ended in await self._ask(
                    member, NodeRanks.exits, seen, UNRESPONSIVE_AFTER_S - 1
                ):
                    seen += 1
                    await self._copy_rest(member, ended)
                    member.running.discard(ended.rank)
                    self._report("exit", ended)
        except Exception as error:  # of any kind: the launcher waits for the end of these ranks
            self._lose(member, error)

    async def _copy_rest(self, member: Member, ended: RankExit) -> None:
        """Copy the files that a rank left, and the rest of those that grew."""
        for name in ended.files:
            try:
                await self._copy_file(member, name)
            except OSError as error:  # here or there: the rank has ended in any case
                lost = f"{name} of {member.node.name} was lost"
                self._report("note", f"{lost}: {describe_error(error)}")
        lacking = member.copies.lacks(ended.sizes)
        while lacking:
            member.copies.add(await self._ask(member, NodeRanks.read, lacking, 0.0))
            before, lacking = lacking, member.copies.lacks(ended.sizes)
            if lacking == before:  # a full disk, for example
                break

    def _lose(self, member: Member, error: Exception) -> None:
        """Report the ranks of a lost node."""
        cause = str(error)
        if not isinstance(error, NodeLost):
            label = f"{member.node.name} ({member.node.address})"
            cause = f"the rank's end could not be reported: {describe_error(error, label)}"
        for rank in sorted(member.running):
            self._report("exit", Exit(rank, None, clock.now(), cause, "failed"))
        member.running.clear()

    async def _copy(self, member: Member) -> None:
        """Copy what the ranks of a node write, as they write it."""
        while member.running:
            parts = await self._ask(member, NodeRanks.read, dict(member.copies.have), 1.0)
            if parts:
                member.copies.add(parts)
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _answer_questions(self, home: RunFolder) -> None:
        """Pass on the questions in the run folder to the nodes until all ranks have ended.

        The file of each question is deleted, also if it cannot be read.
        """
        home.questions.mkdir(exist_ok=True, mode=0o700)
        while any(member.running for member in self._members):
            for path in home.questions.iterdir():
                if path.suffix == ".json":
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        question, *ranks = json.loads(path.read_text())
                        for member in self._members:
                            if here := member.running.intersection(ranks):
                                self._follow(self._question(member, question, here))
                    path.unlink(missing_ok=True)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _pass_on_orders(self, member: Member) -> None:
        """Pass on the launcher's orders to the ranks of a node, one after the other.

        Returns at once if the launcher gives none to this run.
        """
        try:
            reader = OrderReader(member.order.job.folder.path)
        except OSError:
            return
        heard = 0
        with contextlib.closing(reader):
            while member.running:
                if (number := reader.bell[0]) != heard:
                    with contextlib.suppress(OSError):  # the folder was deleted, or a disk is full
                        await self._ask(member, NodeRanks.write_orders, reader.read())
                        heard = number
                await asyncio.sleep(POLL_INTERVAL_S / 5)

    async def _question(self, member: Member, question: str, ranks: set[int]) -> None:
        """Ask a node for the stacks, the flight recorders or the saved models of ranks.

        Stacks come in files that are copied anyway. Recorders come as the reply, and are written
        into the run folder. Models and profiles that ranks saved as they train are copied.
        """
        folder = member.order.job.folder
        with contextlib.suppress(OSError):
            if question == "peeks":
                await self._copy_peeks(member)
                return
            if question == "profiles":
                for name in await self._ask(member, NodeRanks.take_profiles):
                    await self._copy_file(member, name)
                return
            dumps = await member.link.call(_QUESTIONS[question], ranks)
            for rank, (dump, begun) in (dumps or {}).items():
                write_atomically(folder.recorded(rank), dump, modified=begun)

    async def _copy_peeks(self, member: Member) -> None:
        """Copy models that a node saved, once, for those that still wait for them."""
        home = member.order.job.folder
        for token, names in (await self._ask(member, NodeRanks.take_peeks)).items():
            try:
                for name in names:
                    if (home.peeks / token).exists():
                        await self._copy_file(member, name)
            except OSError:  # here or there: who waits sees that the folder is gone
                shutil.rmtree(home.peeks / token, ignore_errors=True)
            await self._ask(member, NodeRanks.delete_peek, token)

    async def _copy_file(self, member: Member, name: str) -> None:
        """Copy a file of a node into the run folder. Raises `OSError`."""
        path = member.order.job.folder.path / name
        data = await self._ask(member, NodeRanks.fetch, name)
        path.parent.mkdir(exist_ok=True, mode=0o700, parents=True)
        await asyncio.to_thread(write_atomically, path, memoryview(data))

    # The end

    async def close(self) -> None:
        """End what is left of the run on the nodes, and give them back.

        Copying ends at once. A node has 4 s to end its ranks, and then its process is killed.
        """
        for task in list(self._tasks):
            task.cancel()
        members, self._members = self._members, []
        if members:
            closing = {asyncio.ensure_future(m.link.end()): m for m in members}
            await asyncio.wait(closing, timeout=4.0)
            for task, member in closing.items():
                if not task.done() or task.exception() is not None:
                    member.link.kill()
        self.release()

    async def rest(self) -> None:
        """Forget the run, which has ended, because another may follow."""
        self._is_free = True


async def _start_on(member: Member, port: int) -> dict[int, int]:
    """Start a node's ranks with the clock of this host; return the process of each.

    The clock is correct to half of a round trip. A node with a clock that is off would put events
    of its ranks into another attempt.
    """
    asked = clock.now()
    there = await member.link.call(NodeRanks.now)
    ahead = there - (asked + clock.now()) / 2
    return await member.link.call(NodeRanks.start, port, ahead)


def _members(order: NodeOrder, placed: Sequence[PlacedNode], each: int) -> list[Member]:
    """Return the nodes of a run, each with its part of the order: `each` ranks."""
    members, job = [], replace(order.job, world_size=len(placed) * each)
    for index, place in enumerate(placed):
        world = Placement(
            node=index,
            nodes=len(placed),
            first=index * each,
            size=job.world_size,
            master_addr=placed[0].facts["address"],
            master_port=0,
            interface=place.facts["interface"],
            begin=index * each,
            ranks=each,
        )
        part = replace(order, job=replace(job, world=world), name=place.node.name)
        copies = FileCopies(job.folder.path, part.growing())
        members.append(Member(place.node, place.link, part, copies, set(part.ranks)))
    return members
