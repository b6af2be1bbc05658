"""The process that speaks with Ray for a run: no thread, socket or handler of Ray's is in a kernel.

It does what the `Link` of the launcher says, copies what the nodes' ranks write into the run
folder, and ends when the launcher does, whatever of it is left on the cluster ending with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from ...folder import RunFolder
from ...worker import Place
from . import agent as agent_module
from . import modules
from .copying import Copy, Pace
from .node import Gone, Order
from .placing import Node, bundle, fitting, named, too_few

PLACING = 20.0
"""Seconds that Ray has to reserve what was free, and to start a process on each node."""

POLL = 0.05
"""Seconds between two looks for questions in the run folder, and two signs of news."""

SILENT = 5.0
"""Seconds without an answer after which a node is said to be silent."""

_GET_ONE = (
    "Start one on this host: `ray start --head` (and `ray start --address=HOST:6379` on the "
    "others), or try with --address local."
)


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
    facts: Mapping[str, Any]
    order: Order
    copy: Copy
    pace: Pace
    left: set[int]
    heard: float = 0.0
    is_silent: bool = False


class Driver:
    """Carries out one request of the launcher after the other, and reports between them."""

    def __init__(self, link: Connection[Any, Any]) -> None:
        self._link = link
        self._ray: Any = None
        self._wanted: Mapping[str, Any] = {}
        self._group: Any = None
        self._placed: list[tuple[Node, Any, Mapping[str, Any]]] = []
        self._parcel: Any = None
        self._members: list[_Member] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_at = 0.0
        self._is_telling = False

    async def serve(self) -> None:
        """Answer requests until the launcher closes its end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                kind, payload = await loop.run_in_executor(None, self._link.recv)
                if kind == "parcel":
                    descriptor = reduction.recv_handle(self._link)
                    payload = {"descriptor": descriptor}
            except (EOFError, OSError):
                return
            try:
                answer = getattr(self, f"_on_{kind}")(**payload)
                if isinstance(answer, Awaitable):
                    answer = await answer
                self._tell("answer", answer)
            except Exception as error:  # Ray's own troubles are many: the launcher tells them
                self._tell("refusal", _told(error))

    def _tell(self, kind: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: `serve` will see it
            self._link.send((kind, value))

    # Requests

    def _on_connect(self, address: str | None, sources: str | None) -> list[Node]:
        """Join a cluster, with the Python files below `sources`; return what its nodes have."""
        try:
            import ray
        except ImportError as error:
            raise LaunchError("the ray engine needs Ray: pip install 'nbtrain[ray]'") from error
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            with tempfile.TemporaryDirectory(prefix="nbtrain-sources-") as copied:
                if sources is not None and modules.copy_sources(Path(sources), Path(copied)):
                    options["runtime_env"] = {"working_dir": copied}
                ray.init(
                    address=address or "auto",
                    namespace="nbtrain",
                    log_to_driver=False,
                    logging_level="error",
                    **options,
                )
        except ConnectionError as error:
            if address in (None, "auto"):
                raise LaunchError(f"no Ray cluster was found on this host. {_GET_ONE}") from error
            raise LaunchError(
                f"no Ray cluster answers at {address}, or this host is no node of it "
                f"({_first_line(error)}). A launch starts on a node: ray start --address={address}"
            ) from error
        ray.cloudpickle.register_pickle_by_value(agent_module)
        self._ray = ray
        return self._nodes()

    def _nodes(self) -> list[Node]:
        """Return the nodes that are alive, and what of them is free."""
        from ray._private.state import available_resources_per_node

        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = named((n["NodeID"], n["NodeManagerHostname"]) for n in alive)
        free = available_resources_per_node()
        return [
            Node(
                n["NodeID"],
                names[n["NodeID"]],
                n["NodeManagerAddress"],
                n["Resources"],
                free.get(n["NodeID"], {}),
            )
            for n in alive
        ]

    async def _on_place(self, **wanted: Any) -> list[str]:
        """Reserve what the ranks need and start an agent on each node; return what to mind."""
        self._wanted = wanted
        return await self._place()

    async def _place(self) -> list[str]:
        wanted = self._wanted
        least, most = wanted["nodes"]
        needed = bundle(wanted["per_node"], wanted["resources"])
        every = self._nodes()
        able = fitting(every, needed)
        if len(able) < least:
            raise LaunchError(too_few(every, needed, least, wanted["per_node"]))
        count = min(most, len(able))
        group, handles = await self._reserve(needed, count)
        self._group = group
        try:
            began = time.time()
            looks = asyncio.gather(*(h.look.remote(wanted["modules"]) for h in handles))
            facts = await asyncio.wait_for(looks, PLACING)
        except asyncio.TimeoutError:
            raise LaunchError(f"nodes did not answer within {PLACING:g} s (ray status)") from None
        by_address = self._where(handles)
        self._placed = [
            (by_address[i], handle, told)
            for i, (handle, told) in enumerate(zip(handles, facts, strict=True))
        ]
        return _checked(self._placed, wanted, began)

    async def _reserve(self, needed: Mapping[str, float], count: int) -> tuple[Any, list[Any]]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([dict(needed)] * count, strategy="STRICT_SPREAD")
        try:
            await asyncio.wait_for(_answer(group.ready()), PLACING)
        except asyncio.TimeoutError:
            self._ray.util.remove_placement_group(group)
            raise LaunchError(
                f"Ray could not reserve {count} × {needed} within {PLACING:g} s (ray status)"
            ) from None
        remote = self._ray.remote(agent_module.Agent)
        handles = [
            remote.options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                resources={k: v for k, v in needed.items() if k not in ("CPU", "GPU", "memory")},
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index in range(count)
        ]
        return group, handles

    def _where(self, handles: Iterable[Any]) -> list[Node]:
        """Return the node of each bundle of the reservation."""
        from ray.util import placement_group_table

        places = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {node.id: node for node in self._nodes()}
        return [nodes[places[index]] for index, _ in enumerate(handles)]

    def _on_parcel(self, descriptor: int) -> None:
        """Put what the ranks unpack into the object store, from which each node takes it once."""
        import numpy

        with open(descriptor, "rb") as file:
            self._parcel = self._ray.put(numpy.memmap(file, "u1", "r"))

    async def _on_start(self, order: Order) -> dict[str, Any]:
        """Start the ranks of an order, cut into one a node; return where each is."""
        if order.attempt > 1:
            await self._end_members()
            await self._place()
        per_node, count = order.place.ranks, len(self._placed)
        master = self._placed[0][2]["address"]
        self._members = []
        for index, (node, actor, facts) in enumerate(self._placed):
            place = Place(index, count, index * per_node, per_node, master, facts["interface"])
            own = replace(order, world_size=count * per_node, place=place, name=node.name)
            copy = Copy(Path(order.home), own.growing())
            self._members.append(
                _Member(node, actor, facts, own, copy, Pace(), set(own.ranks), time.monotonic())
            )
        ports = await self._of_all(lambda m: m.actor.begin.remote(m.order, self._parcel))
        pids = await self._of_all(lambda m: m.actor.do.remote("start", ports[0]))
        for member in self._members:
            self._follow(self._watch(member))
            self._follow(self._copy(member))
        self._follow(self._listen(Path(order.home)))
        return {
            "pids": {rank: pid for found in pids for rank, pid in found.items()},
            "nodes": {rank: m.node.name for m in self._members for rank in m.order.ranks},
        }

    async def _of_all(self, call: Callable[[_Member], Any]) -> list[Any]:
        return list(await asyncio.gather(*(call(member) for member in self._members)))

    def _on_wish(self, action: str, ranks: frozenset[int]) -> None:
        for member in self._members:
            if member.left & ranks:
                member.actor.do.remote("wish", action, ranks)

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
            answer = asyncio.ensure_future(_answer(member.actor.do.remote(name, *args)))
            try:
                while not (await asyncio.wait([answer], timeout=1.0))[0]:
                    self._mind(member)
                found = answer.result()
            except errors.ActorUnavailableError:
                self._mind(member)
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
        except self._ray.exceptions.RayError as error:
            self._lose(member, error)

    async def _bring_home(self, member: _Member, gone: Gone) -> None:
        home = Path(member.order.home)
        for name in gone.files:
            data = await self._ask(member, "fetch", name)
            path = home / name
            path.parent.mkdir(exist_ok=True, mode=0o700)
            partial = path.with_name(path.name + ".partial")
            with partial.open("wb") as file:
                file.write(memoryview(data))
            partial.rename(path)
        while member.copy.add(await self._ask(member, "read", member.copy.have, 0.0)):
            pass

    def _lose(self, member: _Member, error: Exception) -> None:
        """Report the ranks of a node that nothing will be heard of any more."""
        node = member.node
        alive = any(n["NodeID"] == node.id and n["Alive"] for n in self._ray.nodes())
        why = (
            f"nbtrain's process on {node.name} ({node.address}) ended"
            if alive
            else f"its node {node.name} ({node.address}) was lost"
        )
        for rank in sorted(member.left):
            self._tell("gone", Gone(rank, None, time.time(), why, ()))
        member.left.clear()

    async def _copy(self, member: _Member) -> None:
        """Copy what the ranks of a node write, as it comes."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_watch` tells
            while member.left:
                parts = await self._ask(member, "read", dict(member.copy.have), 1.0)
                if parts and member.copy.add(parts):
                    self._news()
                if parts:
                    await asyncio.sleep(member.pace.wait(time.monotonic()))

    def _news(self) -> None:
        """Wake the launcher, not too often."""
        now = time.monotonic()
        if now - self._told_at >= POLL:
            self._told_at = now
            self._tell("news")
        elif not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_later(POLL, self._late_news)

    def _late_news(self) -> None:
        self._is_telling = False
        self._told_at = time.monotonic()
        self._tell("news")

    async def _listen(self, home: Path) -> None:
        """Pass on what is asked in the run folder: by anyone, in whatever process."""
        questions = RunFolder(home).questions
        questions.mkdir(exist_ok=True, mode=0o700)
        while any(member.left for member in self._members):
            for path in questions.iterdir():
                if path.suffix == ".json":
                    with contextlib.suppress(OSError, ValueError):
                        ranks = frozenset(json.loads(path.read_text()))
                        for member in self._members:
                            if member.left & ranks:
                                member.actor.do.remote("ask", member.left & ranks)
                    path.unlink(missing_ok=True)
            await asyncio.sleep(POLL)

    # The end

    async def _end_members(self) -> None:
        """End all agents, and give back what was reserved."""
        for task in list(self._tasks):
            task.cancel()
        members, self._members = self._members, []
        closing = [_answer(m.actor.do.remote("close")) for m in members]
        if closing:
            await asyncio.wait([asyncio.ensure_future(c) for c in closing], timeout=4.0)
        placed, self._placed = self._placed, []
        for _, actor, _ in placed:
            with contextlib.suppress(Exception):  # it is gone already
                self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    def shutdown(self) -> None:
        """Leave the cluster; Ray ends what is left of this driver's on it."""
        if self._ray is not None:
            self._ray.shutdown()


async def _answer(reference: Any) -> Any:
    return await reference


def _told(error: BaseException) -> str:
    """Word what went wrong, here or in an agent."""
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, LaunchError):
        return str(cause)
    where = "in nbtrain's process on a node: " if cause is not error else ""
    lines = str(cause).strip().splitlines() or [""]
    return f"{where}{type(cause).__name__}: {(lines[-1] if where else lines[0])[:300]}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _checked(
    placed: Iterable[tuple[Node, Any, Mapping[str, Any]]], wanted: Mapping[str, Any], began: float
) -> list[str]:
    """Return what to mind about nodes. Raises `LaunchError` for those that cannot do."""
    troubles, notes = [], []
    took = time.time() - began
    for node, _, facts in placed:
        for name, here in wanted["versions"].items():
            there = facts["versions"].get(name)
            if there is None:
                troubles.append(f"{node.name} has no {name}; here it is {here}")
            elif _release(there) != _release(here):
                troubles.append(f"{node.name} has {name} {there}; here it is {here}")
            elif there != here:
                notes.append(f"{node.name} has {name} {there}; here it is {here}.")
        if facts["missing"]:
            troubles.append(f"{node.name} lacks {', '.join(facts['missing'])}")
        ahead = facts["time"] - began
        if not -1.0 <= ahead <= took + 1.0:
            notes.append(f"The clock of {node.name} is {ahead:+.1f} s off: so are its times.")
        if not facts["interface"]:
            notes.append(
                f"{node.name}: no network interface has its address {facts['address']}; if its "
                "ranks cannot meet the others, name it: --env GLOO_SOCKET_IFNAME=…"
            )
    if troubles:
        raise LaunchError(
            "the nodes are not alike enough:\n  " + "\n  ".join(troubles) + "\nInstall the same "
            "on all of them; nothing was started."
        )
    return notes


def _release(version: str) -> tuple[str, ...]:
    """Return the part of a version that must agree: ``2.13``."""
    return tuple(version.partition("+")[0].split(".")[:2])
