"""Part of a Ray cluster, for one run: nodes that were found, reserved and looked at.

Only the driver's process comes here: what it does with Ray is synchronous but for the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import LaunchError, PlanError
from . import agent as agent_module
from . import modules
from .placing import Node, amounts, awaited, bundle, fitting, named, too_few

RETURN = 10.0
"""Seconds that nodes have to come back, or others to take their part, before another attempt."""

PLACING = 20.0
"""Seconds that Ray has to reserve what was free, and to start a process on each node."""

ANSWERING = 5.0
"""Seconds that a cluster has to accept a connection."""

_ROOM = 36
"""The longest folder of temporary files that Ray's sockets fit into: their paths have 107 bytes."""

_AGAIN = 1.0
"""Seconds between two looks at what is free."""

REFUSALS = 3
"""Times in a row that a host must say that nothing of Ray's is there, for it to be lost.

Ray says so itself once five of its health checks failed, 15 s after such an end.
"""

_GET_ONE = (
    "Start one on this host: `ray start --head` (and `ray start --address=HOST:6379` on the "
    "others), or try with --address local."
)


@dataclass(frozen=True)
class Wanted:
    """What a run needs: at least and at most so many nodes, with so many ranks each.

    `patience` are the seconds that the cluster has to make room. Each rank takes `resources` of
    its node, which must have `modules`, and the same release of the packages in `versions`; it
    should have those that are `perhaps` imported.
    """

    nodes: tuple[int, int]
    per_node: int
    resources: Mapping[str, float]
    patience: float = 0.0
    modules: Sequence[str] = ()
    perhaps: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        """What each node must hold."""
        return bundle(self.per_node, self.resources)


@dataclass(frozen=True)
class Placed:
    """A node with an agent of ours, and what that found there."""

    node: Node
    actor: Any
    facts: Mapping[str, Any]


def join(address: str | None, sources: str | None) -> Any:
    """Connect this process to a cluster, with the Python files below `sources`; return Ray.

    Raises `LaunchError`.
    """
    _import_quickly()
    try:
        import ray
    except ImportError as error:
        raise LaunchError("the ray engine needs Ray: pip install 'nbtrain[ray]'") from error
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address, named = where(address, os.environ)
    _check_there_is(address, named)
    options: dict[str, Any] = _for_a_new_one() if address == "local" else {}
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
        if address is None:
            raise LaunchError(f"no Ray cluster was found on this host. {_GET_ONE}") from error
        raise _not_there(address, named, error) from error
    ray.cloudpickle.register_pickle_by_value(agent_module)
    return ray


def _for_a_new_one() -> dict[str, Any]:
    """Return what Ray is started with: no dashboard, and a folder that sockets fit into."""
    usual = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    elsewhere = {"_temp_dir": "/tmp/ray"} if len(usual) > _ROOM else {}
    return {"include_dashboard": False, **elsewhere}


def _import_quickly() -> None:
    """Import Ray without parsing the grammar of all IRIs, a second and more for nothing.

    That is done beside JupyterLab by jsonschema, which Ray imports, where it can (4.26).
    """
    unwanted = "rfc3987_syntax"
    if unwanted in sys.modules:
        return
    sys.modules[unwanted] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ImportError):
            import ray  # noqa: F401
    finally:
        del sys.modules[unwanted]


def where(address: str | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return which cluster is meant, None for this host's, and what to call it in an error.

    As Ray does: ``RAY_ADDRESS`` counts where no other was asked for. Raises `PlanError`. Pure.
    """
    named = str(address)
    if address in (None, "auto"):
        address = environ.get("RAY_ADDRESS")
        named = f"{address} (RAY_ADDRESS)"
        if address == "local":
            raise PlanError(
                "RAY_ADDRESS=local would start Ray: ask for that with --address local, or unset it"
            )
    if address in (None, "", "auto"):
        return None, "auto"
    if str(address).startswith("ray://"):
        raise PlanError(
            f"{named}: ray:// is the address of Ray's client, through which no run folder, signal "
            "or large model goes. Start the notebook on a node of the cluster (--address auto), "
            "or make its host one: ray start --address=HOST:6379"
        )
    return address, named


def _check_there_is(address: str | None, named: str) -> None:
    """Raise `LaunchError` if nobody listens at ``HOST:PORT``: Ray would wait for a minute."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWERING).close()
        except OSError as error:
            raise _not_there(str(address), named, error) from error


def _not_there(address: str, named: str, error: Exception) -> LaunchError:
    why = str(error).strip().partition("\n")[0][:300]
    return LaunchError(
        f"no Ray cluster answers at {named}, or this host is no node of it ({why}). A launch "
        f"starts on a node: ray start --address={address}"
    )


def nodes(ray: Any) -> list[Node]:
    """Return the nodes that are alive, and what of them is free."""
    from ray._private.state import available_resources_per_node

    every = ray.nodes()
    names = named((n["NodeID"], n["NodeManagerHostname"]) for n in every)  # also of those that died
    free = available_resources_per_node()
    return [
        Node(id, names[id], n["NodeManagerAddress"], n["Resources"], free.get(id, {}))
        for n in every
        if n["Alive"] and (id := n["NodeID"])
    ]


class Reservation:
    """What is reserved for a run, until `release`."""

    def __init__(self, ray: Any, say: Callable[[str], None]) -> None:
        self._ray, self._say, self._said = ray, say, ""
        self._group: Any = None
        self._count = 0
        self.placed: list[Placed] = []

    async def reserve(self, wanted: Wanted, *, again: bool = False) -> int:
        """Reserve as many nodes as are wanted at most, if they can be had; return how many.

        The cluster has `wanted.patience` seconds for that. Where a run begins `again`, it has
        `RETURN` seconds, and the whole of its patience only where even the least cannot be had.
        Raises `LaunchError`.
        """
        self._said = ""
        (least, most), begun = wanted.nodes, time.monotonic()
        patience = max(wanted.patience, RETURN if again else 0.0)
        for count, seconds in ((most, RETURN if again else patience), (least, patience)):
            if await self._has(wanted, count, begun + seconds):
                return count
            able = min(count, self._able(wanted))
            if able >= least and await self._has(wanted, able):
                return able
        raise LaunchError(too_few(nodes(self._ray), wanted.bundle, least, wanted.per_node))

    def _able(self, wanted: Wanted) -> int:
        return len(fitting(nodes(self._ray), wanted.bundle))

    async def _has(self, wanted: Wanted, count: int, deadline: float = 0.0) -> bool:
        """Reserve so many nodes, if they can be had by then. Raises `LaunchError`.

        They are asked for while there is no room for them, too: an autoscaler goes by that.
        """
        from ray.util import placement_group_table, remove_placement_group
        from ray.util.placement_group import placement_group

        able = self._able(wanted)
        if able >= count:
            deadline = max(deadline, time.monotonic() + PLACING)
        elif time.monotonic() >= deadline:
            return False
        group = placement_group([wanted.bundle] * count, strategy="STRICT_SPREAD")
        ready = asyncio.ensure_future(answer(group.ready()))
        try:
            while (left := deadline - time.monotonic()) > 0:
                if able < count:
                    self._tell(awaited(able, count, wanted.bundle, wanted.per_node))
                if (await asyncio.wait([ready], timeout=min(_AGAIN, left)))[0]:
                    ready.result()
                    self._group, self._count = group, count
                    return True
                state = placement_group_table(group).get("state")
                if (is_ours := state == "CREATED") and able < count:  # a process is to say so yet
                    deadline = max(deadline, time.monotonic() + PLACING)
                able = count if is_ours else self._able(wanted)  # ours are free no more
        finally:
            if self._group is not group:
                ready.cancel()
                remove_placement_group(group)
        if able < count:
            return False
        raise LaunchError(
            f"Ray could not reserve {amounts(wanted.bundle)} on each of {count} nodes in time, "
            "though they are free (ray status)"
        )

    def _tell(self, words: str) -> None:
        if words != self._said:
            self._said = words
            self._say(words)

    async def place(self, wanted: Wanted, *, again: bool = False) -> list[str]:
        """Reserve nodes if none are, and start an agent on each; return what to mind about them.

        Raises `LaunchError`.
        """
        if self._group is None:
            await self.reserve(wanted, again=again)
        handles = self._agents(wanted.bundle)
        began = time.time()
        try:
            asked = [*wanted.modules, *wanted.perhaps]
            looks = asyncio.gather(*(h.look.remote(asked, not i) for i, h in enumerate(handles)))
            facts = await asyncio.wait_for(looks, PLACING)
        except asyncio.TimeoutError:
            raise LaunchError(f"nodes did not answer within {PLACING:g} s (ray status)") from None
        where = self._where()
        self.placed = [Placed(where[i], h, facts[i]) for i, h in enumerate(handles)]
        return checked(self.placed, wanted, began, time.time())

    def _agents(self, needed: Mapping[str, float]) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote, plain = self._ray.remote(agent_module.Agent), ("CPU", "GPU", "memory")
        return [
            remote.options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                memory=needed.get("memory"),
                resources={k: v for k, v in needed.items() if k not in plain},
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(self._count)
        ]

    def _where(self) -> dict[int, Node]:
        """Return the node of each part of what was reserved."""
        from ray.util import placement_group_table

        by_id = {node.id: node for node in nodes(self._ray)}
        places = placement_group_table(self._group)["bundles_to_node_id"]
        return {index: by_id[id] for index, id in places.items()}

    def release(self) -> None:
        """End the agents, and give back what was reserved."""
        from ray.util import remove_placement_group

        placed, self.placed = self.placed, []
        for one in placed:
            with contextlib.suppress(Exception):  # it is gone already
                self._ray.kill(one.actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


async def answer(reference: Any) -> Any:
    """Wait for a reference of Ray's: what `asyncio` takes is a coroutine."""
    return await reference


async def is_over(address: str, port: int) -> bool:
    """Whether a host is there, but nobody listens where Ray's process for it did: that ended."""
    for _ in range(REFUSALS if port else 0):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 1.0)
        except ConnectionRefusedError:
            await asyncio.sleep(0.2)
        except (OSError, asyncio.TimeoutError):
            return False
        else:
            writer.close()
            return False
    return bool(port)  # else nobody knows where to look


def checked(placed: Sequence[Placed], wanted: Wanted, began: float, ended: float) -> list[str]:
    """Return what to mind about nodes that were asked between two moments.

    Raises `LaunchError` for those that cannot do. Pure.
    """
    troubles: list[str] = []
    notes: list[str] = []
    for one in placed:
        name, facts = one.node.name, one.facts
        for package, here in wanted.versions.items():
            there = facts["versions"].get(package)
            if there is None:
                troubles.append(f"{name} has no {package}; here it is {here}")
            elif _release(there) != _release(here):
                troubles.append(f"{name} has {package} {there}; here it is {here}")
            elif there != here:
                notes.append(f"{name} has {package} {there}; here it is {here}.")
        if lacks := [m for m in facts["missing"] if m in wanted.modules]:
            troubles.append(f"{name} lacks {', '.join(lacks)}")
        if lacks := [m for m in facts["missing"] if m in wanted.perhaps]:
            notes.append(f"{name} lacks {', '.join(lacks)}, which the function may import.")
        if not began - 1.0 <= facts["time"] <= ended + 1.0:
            off = facts["time"] - began
            notes.append(f"The clock of {name} is {off:+.1f} s off: so are the times it tells.")
        if not facts["interface"]:
            notes.append(
                f"{name}: no network interface has its address {facts['address']}; if its ranks "
                "cannot meet the others, name it: --env GLOO_SOCKET_IFNAME=…"
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
