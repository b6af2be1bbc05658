"""Reserves a part of a Ray cluster for one run: finds nodes, and checks what they have.

Only the driver's process runs this: its calls of Ray are synchronous, except where it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engines.remote import dependencies
from ...engines.remote.nodes import NodeLost, NodeRequest, PlacedNode, check_nodes
from ...part_api import (
    CONNECT_TIMEOUT_S,
    POLL_INTERVAL_S,
    LaunchError,
    PlanError,
    format_bytes,
    plural,
)
from ...tracking.limits import RELEASE_TIMEOUT_S
from . import node_actor
from .actor_link import ActorLink
from .limits import FREE_CHECK_INTERVAL_S, NODE_TIMEOUT_S
from .ray_nodes import RayNode, has_ended, nodes

_GET_ONE = (
    "Start one on this host: `ray start --head` (and `ray start --address=HOST:6379` on the "
    "others), or try it with --address local."
)


_TOKEN = (
    ". If the cluster asks for a token, this kernel needs it, too: set RAY_AUTH_MODE=token, and "
    "RAY_AUTH_TOKEN or the file ~/.ray/auth_token, before the launch"
)


class _AddressRefused(ConnectionError):
    """The address of a cluster refuses connections."""


def join(address: str | None, sources: str | None) -> Any:
    """Connect this process to a cluster, with the Python files below `sources`; return Ray.

    The address ``local`` starts a cluster. Raises `LaunchError` without Ray and if the cluster
    cannot be joined, and `PlanError` for an invalid address.
    """
    # jsonschema (4.26), which Ray imports, parses the grammar of all IRIs by it: a second for
    # nothing, wherever JupyterLab is installed.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        import ray
    except ImportError as error:
        raise LaunchError("the ray engine needs Ray: pip install 'nbtrain[ray]'") from error
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 are short on a busy machine
    address, label = cluster_address(address, os.environ)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        _check_listens(address or "")
        folder = Path(sources or ".")
        modules = [str(path) for path in dependencies.local_modules(folder)] if sources else []
        if modules:  # Ray cannot set up an empty list
            left_out = dependencies.excludes(folder)  # a package's data
            options["runtime_env"] = {"py_modules": modules, "excludes": left_out}
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
        reason = str(error).strip().partition("\n")[0][:300]
        is_silent = isinstance(error, _AddressRefused)
        text = f"no Ray cluster answers at {label}" if is_silent else f"{label} cannot be joined"
        raise LaunchError(
            f"{text}, or this host is not one of its nodes ({reason}). "
            f"A launch starts on a node: ray start --address={address}{'' if is_silent else _TOKEN}"
        ) from error
    ray.cloudpickle.register_pickle_by_value(node_actor)
    return ray


def cluster_address(address: str | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the address of a cluster, None for this host's, and its label in an error.

    As in Ray, ``RAY_ADDRESS`` counts where the user gave no other. Raises `PlanError` for
    ``ray://`` and for ``RAY_ADDRESS=local``. Pure.
    """
    label = str(address)
    if address in (None, "auto"):
        address = environ.get("RAY_ADDRESS")
        label = f"{address} (RAY_ADDRESS)"
        if address == "local":
            raise PlanError(
                "RAY_ADDRESS=local would start Ray: use --address local for that, or unset it"
            )
    if address in (None, "", "auto"):
        return None, "auto"
    if str(address).startswith("ray://"):
        raise PlanError(
            f"{label}: ray:// is the address of Ray's client, which cannot carry the run's "
            "files, signals or large models. Start the notebook on a node of the cluster "
            "(--address auto), or make its host a node: ray start --address=HOST:6379"
        )
    return address, label


def _check_listens(address: str) -> None:
    """Raise `_AddressRefused` if ``HOST:PORT`` refuses connections: Ray would wait for a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise _AddressRefused(str(error)) from error


class Reservation:
    """What is reserved for a run, until `release`."""

    def __init__(self, ray: Any, report: Callable[[str], None]) -> None:
        self._ray, self._report, self._reported = ray, report, ""
        self._group: Any = None
        self._lasting: dict[str, Any] = {}
        """The actors that reserve nothing and stay for the next run, by the id of their node."""
        self._bundle: Mapping[str, float] = {}
        self._free: dict[str, Mapping[str, float]] = {}
        """What was free before the run, by the id of the node."""
        self._released = 0.0
        self.payload: Any = None
        """Ray's reference to the payload of the ranks."""
        self.placed: list[PlacedNode] = []

    async def reserve(self, request: NodeRequest, *, again: bool = False) -> int:
        """Reserve the largest number of nodes that the cluster has room for; return it.

        The cluster has `request.patience_s` seconds to free resources. If a run begins `again`, it
        has `NODE_TIMEOUT_S` for all nodes, and its whole patience for the least number of
        them. Raises `LaunchError` without room for the least number.
        """
        self._reported = ""
        (least, most), begun = request.nodes, time.monotonic()
        patience = max(request.patience_s, NODE_TIMEOUT_S if again else 0.0)
        for count, seconds in (
            (most, NODE_TIMEOUT_S if again else patience),
            (least, patience),
        ):
            if await self._try(request, count, begun + seconds):
                return count
            able = min(count, self._able(request))
            if able >= least and await self._try(request, able):
                return able
        shortage = describe_shortage(nodes(self._ray), request.bundle, least, request.per_node)
        raise LaunchError(shortage)

    def _able(self, request: NodeRequest) -> int:
        return len(nodes_with_room(nodes(self._ray), request.bundle))

    async def _try(self, request: NodeRequest, count: int, deadline: float = 0.0) -> bool:
        """Reserve a number of nodes if they are free by the deadline; return whether that was done.

        The request also stays while they are not free, because an autoscaler needs it. Raises
        `LaunchError` if Ray does not reserve nodes that are free.
        """
        from ray.util import remove_placement_group
        from ray.util.placement_group import placement_group

        able = self._able(request)
        if able >= count:
            deadline = max(deadline, time.monotonic() + NODE_TIMEOUT_S)
        elif time.monotonic() >= deadline:
            return False
        group = placement_group([request.bundle] * count, strategy="STRICT_SPREAD")
        try:
            while True:
                if able < count:
                    self._waits(describe_wait(able, count, request.bundle, request.per_node))
                if await asyncio.to_thread(group.wait, FREE_CHECK_INTERVAL_S):
                    self._group = group
                    return True
                if time.monotonic() >= deadline:
                    break
                able = self._able(request)
        finally:
            if self._group is not group:
                remove_placement_group(group)
        if able < count:
            return False
        raise LaunchError(
            f"Ray could not reserve {describe_amounts(request.bundle)} on each of {count} nodes in "
            "time, though they are free (ray status)"
        )

    def _waits(self, text: str) -> None:
        if text != self._reported:
            self._reported = text
            self._report(text)

    async def place(self, request: NodeRequest, *, again: bool = False) -> list[str]:
        """Reserve nodes unless there are some, and start an actor on each; return notes about them.

        Raises `LaunchError` without room, for a node that was lost or does not answer within 20 s,
        and for nodes that cannot run the ranks. What was reserved stays until `release`.
        """
        from ray.util import placement_group_table

        if self._group is None:
            await self.reserve(request, again=again)
        self._bundle = request.bundle
        ids: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        by_id = {node.id: node for node in nodes(self._ray)}
        here = node_actor.NodeActor().look([])
        if lost := [id for id in ids.values() if id not in by_id]:
            raise LaunchError(f"a node that was reserved was lost ({lost[0][:6]}): launch again")
        try:
            placing = (self._place_node(request, index, by_id[ids[index]]) for index in sorted(ids))
            self.placed = await asyncio.wait_for(asyncio.gather(*placing), NODE_TIMEOUT_S)
        except asyncio.TimeoutError:
            for id in self._lasting.keys() & {*ids.values()}:  # so that it is not called again
                self.end_actor(id, self._lasting[id])
            raise LaunchError(
                f"nodes did not answer within {NODE_TIMEOUT_S:g} s (ray status)"
            ) from None
        return check_nodes(self.placed, request, here)

    async def _place_node(self, request: NodeRequest, index: int, node: RayNode) -> PlacedNode:
        """Return a node of the group with an actor, a new one unless an earlier one is left.

        Raises `LinkError`.
        """
        modules, left = list(request.modules), self._lasting.get(node.id)
        if left is not None and not may_have_devices(request.bundle):
            with contextlib.suppress(NodeLost):
                link = self._link(node, left)
                return PlacedNode(node, link, await link.look(modules))
        link = self._link(node, self._start_actor(request.bundle, index, node.id))
        return PlacedNode(node, link, await link.look(modules))

    def _link(self, node: RayNode, actor: Any) -> ActorLink:
        kill = functools.partial(self.end_actor, node.id, actor)
        return ActorLink(self._ray, node, actor, lambda: self.payload, kill)

    def _start_actor(self, needed: Mapping[str, float], index: int, node: str) -> Any:
        """Start an actor on a node of the group; one that can stay reserves nothing itself.

        Ray gives devices to the process that reserves them.
        """
        from ray.util import scheduling_strategies as strategies

        remote = self._ray.remote(max_concurrency=16)(node_actor.NodeActor)
        if not may_have_devices(needed):
            strategy: Any = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            actor = remote.options(num_cpus=0, scheduling_strategy=strategy).remote()
            self._lasting[node] = actor
            return actor
        builtin = ("CPU", "GPU", "memory")
        return remote.options(
            num_cpus=needed.get("CPU", 0),
            num_gpus=needed.get("GPU", 0),
            memory=needed.get("memory"),
            resources={k: v for k, v in needed.items() if k not in builtin},
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(self._group, index),
        ).remote()

    def end_actor(self, node: str, actor: Any) -> None:
        """End an actor that may hold something of a run still, and what it started."""
        if self._lasting.get(node) is actor:
            del self._lasting[node]
        self._ray.kill(actor)

    def release(self) -> None:
        """Give back what was reserved; Ray ends the actors that reserved a part of it."""
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
            self._released = time.monotonic()

    async def nodes(self) -> list[RayNode]:
        """Return the nodes, once Ray reports as free what the last run gave back.

        Raises `ConnectionError` if the cluster or this host's part of it has ended.
        """
        context, used = self._ray.get_runtime_context(), {p.node.id for p in self.placed}
        _check_listens(context.gcs_address)
        found, seconds = nodes(self._ray), RELEASE_TIMEOUT_S - time.monotonic() + self._released
        here = context.get_node_id()
        own = next((node for node in found if node.id == here), None)
        if own is None or await has_ended(own):
            raise ConnectionError("no process of Ray is left on this host")
        while seconds > 0 and any(self._lacks(node) for node in found if node.id in used):
            await asyncio.sleep(POLL_INTERVAL_S)  # as often as nodes report
            found, seconds = nodes(self._ray), seconds - POLL_INTERVAL_S
        self._free = {node.id: node.free for node in found}
        return found

    def _lacks(self, node: RayNode) -> bool:
        """Whether a node has less than before the last run, of what that reserved."""
        before = self._free.get(node.id, {})
        return any(node.free.get(name, 0) < before.get(name, 0) for name in self._bundle)


def may_have_devices(needed: Mapping[str, float]) -> bool:
    """Whether Ray may choose devices for a process that reserves this: GPUs, TPUs, …"""
    return not needed.keys() <= {"CPU", "memory"}


def bundle(ranks: int, each: Mapping[str, float]) -> dict[str, float]:
    """Return what a node must hold for `ranks` that need `each`; a rank needs a CPU by default.

    To four digits, as Ray counts: three times 0.1 fit into 0.3.
    """
    wanted = {"CPU": 1.0, **each}
    return {name: round(ranks * amount, 4) for name, amount in wanted.items() if amount}


def nodes_with_room(nodes: Sequence[RayNode], needed: Mapping[str, float]) -> list[RayNode]:
    """Return the nodes with the `needed` resources free."""
    return [node for node in nodes if _has_room(node, needed)]


def _has_room(node: RayNode, needed: Mapping[str, float]) -> bool:
    return all(node.free.get(name, 0.0) >= amount for name, amount in needed.items())


def describe_shortage(
    nodes: Sequence[RayNode], needed: Mapping[str, float], wanted: int, ranks: int
) -> str:
    """Return that fewer than `wanted` nodes have room for `ranks` ranks each, and what each has."""
    able = len(nodes_with_room(nodes, needed))
    head = (
        f"{able} of {len(nodes)} nodes have {describe_amounts(needed)} free (for "
        f"{plural(ranks, 'rank')} each), but the run needs {plural(wanted, 'such node')}."
    )
    lines = [f"  {node.name} ({node.address}): {_describe_node(node, needed)}" for node in nodes]
    advice = (
        "Ask for fewer ranks or nodes, or for fewer resources per rank (--resources), or wait "
        "until others have finished (ray status shows them)."
    )
    return "\n".join([head, *lines, advice])


def describe_wait(able: int, count: int, needed: Mapping[str, float], ranks: int) -> str:
    """Return that `able` of the `count` nodes that are wanted have room."""
    each = "for a rank each" if ranks == 1 else f"for {ranks} ranks each"
    return f"waiting for {count} nodes with {describe_amounts(needed)} free ({each}): {able} so far"


def _describe_node(node: RayNode, needed: Mapping[str, float]) -> str:
    """Return how much of each resource a node has free."""

    def free(name: str) -> str:
        free, total = node.free.get(name, 0.0), node.total.get(name, 0.0)
        return f"{_format_amount(free)} of {_format_amount(total)} {name} free"

    return ", ".join(map(free, needed)) + (" (has room)" if _has_room(node, needed) else "")


def describe_amounts(needed: Mapping[str, float]) -> str:
    """Write amounts: ``2 CPU and 1 GPU``."""
    return " and ".join(f"{_format_amount(amount)} {name}" for name, amount in needed.items())


def _format_amount(value: float) -> str:
    return format_bytes(value) if value > 1e6 else f"{value:g}"
