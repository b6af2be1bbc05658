"""The process that speaks with Ray for a run: no thread, socket or handler of Ray's is in a kernel.

It does what the `Link` of the launcher says, copies what the nodes' ranks write into the run
folder, and ends when the launcher does, whatever of it is left on the cluster ending with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from ...folder import RunFolder
from ...nodes import World
from . import reservation, saves
from .copying import Copy, Pace, keep
from .node import Gone, Order
from .placing import Node
from .reservation import Reservation, Wanted, answer, is_over
from .serving import serve, told

STARTING = 600.0
"""Seconds in which what the ranks unpack has to reach every node."""

POLL = 0.05
"""Seconds between two looks for questions in the run folder."""

NEWS = 20.0
"""Signs of news a second, at most: at each the launcher looks at every file of the run."""

FULL = 1.0
"""Seconds before what a full disk did not take is asked for again."""

SILENT = 5.0
"""Seconds without an answer after which a node is said to be silent."""


def main(order: Mapping[str, Any]) -> None:
    """Serve the launcher at the other end of a socket until it closes."""
    link: Connection[Any, Any] = Connection(order["socket"])
    driver = Driver(link)
    try:
        asyncio.run(driver.serve())
    finally:
        driver.shutdown()


@dataclass
class _Member:
    """A node that takes part in a run."""

    node: Node
    actor: Any
    order: Order
    copy: Copy
    left: set[int]
    pace: Pace = field(default_factory=Pace)
    heard: float = field(default_factory=time.monotonic)
    is_silent: bool = False


class Driver:
    """Carries out one request of the launcher after the other, and reports between them."""

    def __init__(self, link: Connection[Any, Any]) -> None:
        self._link = link
        self._ray: Any = None
        self._reserved: Any = None
        self._wanted: Any = None
        self._parcel: Any = None
        self._members: list[_Member] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pace = Pace(NEWS)
        self._ports: dict[str, int] = {}
        self._gathering: saves.Gathering | None = None
        self._is_telling = False

    async def serve(self) -> None:
        """Answer requests until the launcher closes its end."""
        await serve(self._link, lambda kind: getattr(self, f"_on_{kind}"), self._tell)

    def _tell(self, kind: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: `serve` will see it
            self._link.send((kind, value))

    # Requests

    def _on_connect(self, address: str | None, sources: str | None) -> list[Node]:
        """Join a cluster, with the Python files below `sources`; return what its nodes have."""
        self._ray = reservation.join(address, sources)
        self._reserved = Reservation(self._ray, functools.partial(self._tell, "waiting"))
        return reservation.nodes(self._ray)

    async def _on_reserve(self, wanted: Wanted) -> int:
        """Reserve what the ranks need, as soon as it can be had; return the number of nodes."""
        found: int = await self._reserved.reserve(wanted)
        return found

    async def _on_place(self, wanted: Wanted) -> list[str]:
        """Reserve what the ranks need, start an agent on each node; return what to mind."""
        self._wanted = wanted
        # While the nodes get ready: the parcel is put into the store as an array of its.
        asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "numpy")
        notes: list[str] = await self._reserved.place(wanted)
        return notes

    def _on_parcel(self, descriptor: int) -> None:
        """Put what the ranks unpack into the object store, from which each node takes it once."""
        import numpy

        with open(descriptor, "rb") as file:
            self._parcel = self._ray.put(numpy.memmap(file, "u1", "r"))

    async def _on_start(self, order: Order) -> dict[str, Any]:
        """Start the ranks of an order, cut into one a node; return where each is."""
        if order.attempt > 1:
            await self._end_members()
            await self._reserved.place(self._wanted, again=True)
        placed = self._reserved.placed
        master = placed[0].facts["address"]
        self._members = []
        self._ports = {n["NodeID"]: n["NodeManagerPort"] for n in self._ray.nodes()}
        for index, one in enumerate(placed):
            begin = index * order.each
            world = World(
                node=index,
                nodes=len(placed),
                first=begin,
                size=len(placed) * order.each,
                master_addr=master,
                master_port=0,
                interface=one.facts["interface"],
                begin=begin,
                ranks=order.each,
            )
            own = replace(order, world=world, name=one.node.name)
            copy = Copy(Path(order.home), own.growing())
            self._members.append(_Member(one.node, one.actor, own, copy, set(own.ranks)))
        begun = self._of_all(lambda m: m.actor.begin.remote(m.order, self._parcel))
        try:
            ports = await asyncio.wait_for(begun, STARTING)
        except asyncio.TimeoutError:
            raise LaunchError(
                f"what the ranks need did not reach every node within {STARTING:g} s"
            ) from None
        await self._prepare_checkpoints(RunFolder(Path(order.home)))
        pids = await self._of_all(lambda m: m.actor.do.remote("start", ports[0]))
        for member in self._members:
            self._follow(self._watch(member))
            self._follow(self._copy(member))
        self._follow(self._listen(Path(order.home)))
        return {
            "pids": {rank: pid for found in pids for rank, pid in found.items()},
            "nodes": {rank: m.node.name for m in self._members for rank in m.order.ranks},
        }

    async def _prepare_checkpoints(self, home: RunFolder) -> None:
        """Have them saved at home if all nodes see it, else brought there."""
        if all(await self._of_all(lambda m: m.actor.do.remote("sees_home"))):
            await self._of_all(lambda m: m.actor.do.remote("save_at_home"))
            return
        asks = [functools.partial(self._ask, member, "saves") for member in self._members]
        await saves.send_out(home.checkpoints, self._ray.put, asks)
        note = functools.partial(self._tell, "note")
        self._gathering = saves.Gathering(home.checkpoints, asks, note)
        self._gathering.start()

    async def _of_all(self, call: Callable[[_Member], Any]) -> list[Any]:
        async def one(member: _Member) -> Any:
            try:
                return await call(member)
            except Exception as error:  # whatever it is: whose it is counts
                raise LaunchError(told(error, member.node.name)) from error

        return list(await asyncio.gather(*map(one, self._members)))

    def _on_wish(self, action: str, ranks: frozenset[int]) -> None:
        for member in self._members:
            if member.left & ranks:
                self._follow(self._wish(member, action, ranks))

    async def _wish(self, member: _Member, action: str, ranks: frozenset[int]) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_watch` tells
            await self._ask(member, "wish", action, ranks)

    async def _on_settle(self) -> None:
        """Bring home what the ranks saved last."""
        if self._gathering is None:
            return
        finishing = asyncio.ensure_future(self._gathering.finish())
        try:
            while not (await asyncio.wait([finishing], timeout=1.0))[0]:
                self._tell("waiting", f"the ranks are done; {self._gathering.coming}")
        finally:
            finishing.cancel()

    async def _on_close(self) -> None:
        await self._end_members()

    # What goes on meanwhile

    def _follow(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, member: _Member, name: str, *args: Any) -> Any:
        """Call a node, through breaks of the link; raises Ray's error once it is gone for good."""
        errors = self._ray.exceptions
        while True:
            waiting = asyncio.ensure_future(answer(member.actor.do.remote(name, *args)))
            try:
                while not (await asyncio.wait([waiting], timeout=1.0))[0]:
                    self._mind(member)
                found = waiting.result()
            except errors.ActorUnavailableError:
                self._mind(member)
                if await is_over(member.node.address, self._ports.get(member.node.id, 0)):
                    raise errors.NodeDiedError("nothing of Ray's is there any more") from None
                await asyncio.sleep(0.5)
                continue
            member.heard = time.monotonic()
            if member.is_silent:
                member.is_silent = False
                self._tell("note", f"{member.node.name} answers again")
            return found

    def _mind(self, member: _Member) -> None:
        """Say, once, that a node has been silent for a while."""
        if not member.is_silent and time.monotonic() - member.heard > SILENT + 1:
            member.is_silent = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - SILENT))
            self._tell(
                "note", f"{member.node.name} does not answer since {since}: its ranks may go on"
            )

    async def _watch(self, member: _Member) -> None:
        """Report the ranks of a node as they end, with all that they left."""
        seen = 0
        try:
            while member.left:
                for gone in await self._ask(member, "gone", seen, SILENT - 1):
                    seen += 1
                    await self._bring_home(member, gone)
                    member.left.discard(gone.rank)
                    self._tell("gone", gone)
        except Exception as error:  # whatever it is: who waits for these ranks must be told
            self._lose(member, error)

    async def _bring_home(self, member: _Member, gone: Gone) -> None:
        """Fetch what a rank left, and the rest of what it wrote."""
        home = Path(member.order.home)
        for name in gone.files:
            try:
                data = await self._ask(member, "fetch", name)
                await asyncio.to_thread(keep, home / name, data)
            except OSError as error:  # here or there: the rank has ended all the same
                self._tell("note", f"{name} of {member.node.name} was lost: {told(error)}")
        lacking = member.copy.lacks(gone.sizes)
        while lacking:
            member.copy.add(await self._ask(member, "read", lacking, 0.0))
            before, lacking = lacking, member.copy.lacks(gone.sizes)
            if lacking == before:  # a full disk, too
                break

    def _lose(self, member: _Member, error: Exception) -> None:
        """Report the ranks of a node that nothing will be heard of any more."""
        node, errors = member.node, self._ray.exceptions
        where = f"{node.name} ({node.address})"
        if isinstance(error, errors.RayTaskError) or not isinstance(error, errors.RayError):
            why = f"its end could not be told: {told(error, where)}"
        elif not isinstance(error, errors.NodeDiedError) and self._is_there(node):
            why = f"nbtrain's process on {where} ended"
        else:
            why = f"its node {where} was lost"
        for rank in sorted(member.left):
            self._tell("gone", Gone(rank, None, time.time(), why))
        member.left.clear()

    def _is_there(self, node: Node) -> bool:
        try:
            return any(n["NodeID"] == node.id and n["Alive"] for n in self._ray.nodes())
        except Exception:  # nothing of Ray's answers any more
            return False

    async def _copy(self, member: _Member) -> None:
        """Copy what the ranks of a node write, as it comes."""
        errors = self._ray.exceptions
        while member.left:
            try:
                parts = await self._ask(member, "read", dict(member.copy.have), 1.0)
            except errors.RayTaskError as error:  # of a disk there, say: it may get better
                self._tell(
                    "note", f"{member.node.name} cannot read what its ranks write: {told(error)}"
                )
                await asyncio.sleep(FULL)
                continue
            except errors.RayError:  # `_watch` tells
                return
            if parts and member.copy.add(parts):
                self._news()
            elif parts:  # a full disk: asking again at once would be all that goes on
                await asyncio.sleep(FULL)
            if parts:
                await asyncio.sleep(member.pace.wait(time.monotonic()))

    def _news(self) -> None:
        """Wake the launcher, not too often."""
        if not self._is_telling:
            self._is_telling = True
            wait = self._pace.wait(time.monotonic())
            asyncio.get_running_loop().call_later(wait, self._tell_news)

    def _tell_news(self) -> None:
        self._is_telling = False
        self._tell("news")

    async def _listen(self, home: Path) -> None:
        """Pass on what is asked in the run folder: by anyone, in whatever process."""
        questions = RunFolder(home).questions
        questions.mkdir(exist_ok=True, mode=0o700)
        while any(member.left for member in self._members):
            for path in questions.iterdir():
                if path.suffix == ".json":
                    with contextlib.suppress(OSError, ValueError):
                        what, *ranks = json.loads(path.read_text())
                        for member in self._members:
                            if its := member.left.intersection(ranks):
                                self._follow(self._question(member, what, its))
                    path.unlink(missing_ok=True)
            await asyncio.sleep(POLL)

    async def _question(self, member: _Member, what: str, ranks: set[int]) -> None:
        """Have ranks asked: their stacks come with what grows, what recorders say as an answer."""
        folder = RunFolder(Path(member.order.home))
        with contextlib.suppress(self._ray.exceptions.RayError, OSError):
            found = await answer(member.actor.do.remote(what, ranks))
            for rank, (said, begun) in (found or {}).items():
                path = folder.recorded(rank)
                partial = path.with_name(path.name + ".partial")
                partial.write_bytes(said)
                os.utime(partial, (begun, begun))
                partial.rename(path)

    # The end

    async def _end_members(self) -> None:
        """End all agents, and give back what was reserved."""
        for task in list(self._tasks):
            task.cancel()
        if self._gathering is not None:
            await self._gathering.abandon()
            self._gathering = None
        members, self._members = self._members, []
        closing = [answer(m.actor.do.remote("close")) for m in members]
        if closing:
            await asyncio.wait([asyncio.ensure_future(c) for c in closing], timeout=4.0)
        if self._reserved is not None:
            self._reserved.release()

    def shutdown(self) -> None:
        """Leave the cluster, nothing of this driver's being left on it."""
        if self._reserved is not None:
            self._reserved.release()
        if self._ray is not None:
            self._ray.shutdown()
