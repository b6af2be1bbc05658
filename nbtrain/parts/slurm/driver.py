"""The process that starts agents on the nodes of a Slurm job, and reaches ranks through them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from ...engines.remote import dependencies
from ...engines.remote import driver as remote
from ...engines.remote.nodes import (
    Node,
    NodeLost,
    NodeRequest,
    PlacedNode,
    check_nodes,
    describe_error,
    describe_host,
)
from ...part_api import Channel, LaunchError, Listener, interpreter_command, plural
from . import agent, slurm_commands
from .agent_link import AgentLink
from .limits import AGENT_START_TIMEOUT_S


def main(order: Mapping[str, Any]) -> None:
    """Serve the launcher at the other end of a socket until it closes."""
    remote.serve(SlurmDriver, order)


class SlurmDriver(remote.Driver):
    """Starts an agent on each node by ``srun``, which connects to this process."""

    cluster = "Slurm"

    def __init__(self, connection: Connection[Any, Any]) -> None:
        super().__init__(connection)
        self._job, self._path = "", list[str]()
        self._nodes: list[Node] = []
        self._listener: Listener | None = None
        self._token = secrets.token_hex(16)
        self._awaited: dict[str, asyncio.Future[None]] = {}
        """The nodes whose agents are starting."""
        self._starting: asyncio.Task[None] | None = None
        self._links: dict[str, AgentLink] = {}
        """The agents that have connected, by the names of their nodes."""
        self._launcher = ""
        """This host's address, as the nodes reach it."""
        self._steps: list[asyncio.subprocess.Process] = []
        """Kept, because asyncio kills a process that is forgotten."""
        self._explaining: asyncio.Task[dict[str, str]] | None = None
        self._payload: IO[bytes] | None = None
        self._placed: list[PlacedNode] = []

    async def connect(self, job: str, node_list: str, path: list[str], most: int) -> list[Node]:
        """Begin to start agents in a job, with a `sys.path`; return the job's nodes that are up.

        They start on up to `most` nodes, while the launcher checks the plan.

        Raises `LaunchError` if Slurm's commands cannot be used here.
        """
        self._job, self._path = job, path
        names = await asyncio.to_thread(slurm_commands.expand_hosts, node_list)
        self._nodes = [Node(name, name, name) for name in names]
        self._listener = Listener("0.0.0.0")
        accept = partial(self._accept, self._listener, asyncio.get_running_loop())
        threading.Thread(target=accept, name="nbtrain-agents", daemon=True).start()
        nodes = await self.nodes()
        self._starting = asyncio.create_task(self._start_agents([n.name for n in nodes[:most]]))
        return nodes

    async def nodes(self) -> list[Node]:
        """Return the nodes that the job still has and Slurm does not report as down.

        Raises `LaunchError` if the job has ended.
        """
        held = await asyncio.to_thread(slurm_commands.find_nodes, self._job)
        names = [node.name for node in self._nodes]
        down = await asyncio.to_thread(slurm_commands.find_down, names)
        return [node for node in self._nodes if node.name in held and node.name not in down]

    def _accept(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        """Accept agents as long as the process lives: the body of a thread."""
        while True:
            try:
                channel = listener.accept(3600.0)
            except OSError:  # closed
                return
            if channel is not None:  # each in a thread: a stranger may connect, and send nothing
                greet = partial(self._greet, channel, loop)
                threading.Thread(target=greet, daemon=True).start()

    def _greet(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        """Challenge what has connected; add it if it is an agent (`agent.greet_driver`)."""
        nonce = secrets.token_hex(16)
        with contextlib.suppress(EOFError, OSError, KeyError, TypeError, ValueError):  # a stranger
            channel.send({"nonce": nonce})
            hello, _ = channel.receive()
            if agent.is_same(hello["proof"], agent.prove(self._token, "agent", nonce)):
                channel.send({"proof": agent.prove(self._token, "driver", str(hello["nonce"]))})
                channel.trust()
                loop.call_soon_threadsafe(self._add_agent, hello, channel)
                return
        channel.close()

    def _add_agent(self, hello: Mapping[str, Any], channel: Channel) -> None:
        """Add an agent that has connected, in place of an earlier one on its node."""
        name, self._launcher = hello["node"], hello["launcher"]
        if (earlier := self._links.get(name)) is not None:
            earlier.kill()
        self._links[name] = AgentLink(channel, partial(self._explain_end, name))
        if name in self._awaited and not self._awaited[name].done():
            self._awaited[name].set_result(None)

    async def place(self, request: NodeRequest) -> list[str]:
        """Start agents on the nodes without one; return the notes about them."""
        self._request = request
        return await self._place(request, again=False)

    async def _place(self, request: NodeRequest, *, again: bool) -> list[str]:
        """Have an agent on each node of the run; return the notes about the nodes.

        Raises `LaunchError` if too few nodes are left, or one cannot run the ranks.
        """
        starting, self._starting = self._starting, None
        if starting is not None:
            await starting
        (least, most), nodes = request.nodes, await self.nodes()
        if len(nodes) < least:
            lost = sorted({n.name for n in self._nodes} - {n.name for n in nodes})
            raise LaunchError(
                f"job {self._job} has {plural(len(nodes), 'node')} left ({', '.join(lost)} "
                f"lost), but the run needs {least}"
            )
        for name in [name for name, link in self._links.items() if link.has_ended]:
            del self._links[name]
        if again:
            chosen = await self._start_remaining_agents(nodes, least, most)
        else:
            chosen = nodes[:most]
            await self._start_agents([n.name for n in chosen if n.name not in self._links])
        links = [self._links[node.name] for node in chosen]
        await self._send_modules(chosen, request.sources)
        looks = await asyncio.gather(*(link.look(list(request.modules)) for link in links))
        self._placed = [
            PlacedNode(replace(node, address=facts["address"]), link, facts)
            for node, link, facts in zip(chosen, links, looks, strict=True)
        ]
        return check_nodes(self._placed, request, describe_host(self._launcher, []))

    async def _start_remaining_agents(
        self, nodes: Sequence[Node], least: int, most: int
    ) -> Sequence[Node]:
        """Have an agent on up to `most` nodes, and return these nodes.

        One after the other, because Slurm may not know yet that a node is dead, and a step with it
        does not start. Raises `LaunchError` if fewer than `least` are left.
        """
        chosen: list[Node] = []
        failure = LaunchError("no node is left")
        for node in sorted(nodes, key=lambda node: node.name not in self._links):
            try:
                if len(chosen) < most and node.name not in self._links:
                    await self._start_agents([node.name])
            except LaunchError as error:
                failure = error
            else:
                chosen.append(node)
        if len(chosen) < least:
            raise failure
        return sorted(chosen[:most], key=self._nodes.index)

    async def _start_agents(self, names: Sequence[str]) -> None:
        """Start agents on nodes, and wait until all have connected.

        Raises `LaunchError` with what ``srun`` printed if one does not.
        """
        if not names:
            return
        assert self._listener is not None
        order = {"path": self._path, "port": self._listener.address[1]}
        command = interpreter_command(agent.__name__, order)
        with tempfile.TemporaryFile() as output:
            step = await slurm_commands.start_step(
                self._job, names, command, {agent.TOKEN: self._token}, output
            )
            self._steps.append(step)
            arrivals: dict[str, asyncio.Future[None]] = {
                name: asyncio.get_running_loop().create_future() for name in names
            }
            self._awaited |= arrivals
            has_ended = asyncio.create_task(slurm_commands.wait_for_end(step, output))
            all_arrived: asyncio.Future[Any] = asyncio.gather(*arrivals.values())
            try:
                await asyncio.wait(
                    [all_arrived, has_ended],
                    timeout=AGENT_START_TIMEOUT_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                has_ended.cancel()
            if not all_arrived.done():
                missing = [name for name, arrival in arrivals.items() if not arrival.done()]
                all_arrived.cancel()
                failure = slurm_commands.describe_failure(missing, output)
                with contextlib.suppress(ProcessLookupError):
                    step.terminate()
                raise LaunchError(failure)

    async def _send_modules(self, nodes: Sequence[Node], sources: str) -> None:
        """Send the modules in the notebook's folder to nodes that do not see them there.

        Without `sources`, which is that folder, nodes delete the copies that they have. Raises
        `LaunchError` for a node that cannot write a copy, and `LinkError`.
        """
        files = await asyncio.to_thread(dependencies.fingerprint, Path(sources)) if sources else ()
        links = [self._links[node.name] for node in nodes]
        needs = await asyncio.gather(*(link.needs_modules(sources, files) for link in links))
        packed = await asyncio.to_thread(dependencies.pack, Path(sources)) if any(needs) else b""
        for node, link, is_needed in zip(nodes, links, needs, strict=True):
            try:
                if is_needed:
                    await link.unpack_modules(sources, files, packed)
            except OSError as error:
                raise LaunchError(describe_error(error, node.name)) from error

    async def _explain_end(self, name: str, is_terminated: bool) -> str:
        """Return why the agent on a node has ended. Agents that end together are asked for once.

        `is_terminated`: the agent was ended by SIGTERM.
        """
        if self._explaining is None or self._explaining.done():
            names = [node.name for node in self._nodes]
            ask = asyncio.to_thread(slurm_commands.explain_ends, self._job, names)
            self._explaining = asyncio.create_task(ask)
        if reason := (await asyncio.shield(self._explaining)).get(name):
            return reason
        if is_terminated:
            return f"Slurm ended nbtrain's process on {name} (preemption, or scancel of its step)"
        return f"nbtrain's process on {name} ended"

    async def store_payload(self, path: str) -> None:
        """Send the ranks' payload to each node; keep it for nodes of a later attempt."""
        self._close_payload()
        self._payload = open(path, "rb")  # noqa: SIM115 - closed at the end of the run
        await asyncio.gather(*map(self._send_payload, self._placed))

    async def _send_payload(self, placed: PlacedNode) -> None:
        assert isinstance(placed.link, AgentLink)
        assert self._payload is not None
        await placed.link.send_payload(self._payload.fileno())

    def _close_payload(self) -> None:
        if self._payload is not None:
            self._payload.close()
            self._payload = None

    async def choose_nodes(self, *, again: bool) -> Sequence[PlacedNode]:
        """Return the nodes of the run; for a later attempt, those that are left."""
        if again:
            assert self._request is not None
            await self._place(self._request, again=True)
            await asyncio.gather(*map(self._send_payload, self._placed))
        return self._placed

    async def rest(self) -> None:
        """Forget the run, which has ended, and its payload, because another may follow."""
        self._close_payload()
        with contextlib.suppress(NodeLost):
            await asyncio.gather(*(link.send_payload(None) for link in self._links.values()))
        await super().rest()

    def release(self) -> None:
        """Do nothing: agents stay for the next run, and the nodes are the job's."""

    def shutdown(self) -> None:
        """Have the agents end, and with them the steps."""
        for link in self._links.values():
            link.kill()
