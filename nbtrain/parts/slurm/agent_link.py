"""The way to nbtrain's process on a node of a Slurm job."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from ...engines.remote.dependencies import Fingerprint
from ...engines.remote.node_ranks import NodeOrder
from ...engines.remote.nodes import Link, Method, NodeLost, RemoteError
from ...part_api import Channel
from .agent import TERMINATED, pickle_to_file, read_descriptor

P = ParamSpec("P")
T = TypeVar("T")


class AgentLink(Link):
    """Sends requests to an agent (`agent`), whose answers come in any order."""

    def __init__(self, channel: Channel, explain_end: Callable[[bool], Awaitable[str]]) -> None:
        self._channel, self._explain_end = channel, explain_end
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.has_ended = False
        self._is_terminated = False
        threading.Thread(target=self._receive, name="nbtrain-agent", daemon=True).start()

    async def send_payload(self, descriptor: int | None) -> None:
        """Send the payload of the ranks, from an open file, for orders that follow; None: forget.

        Raises `NodeLost`.
        """
        await self._send({"method": "store_payload"}, descriptor)

    async def look(self, modules: list[str]) -> dict[str, Any]:
        """Return what the host is; see `describe_host`."""
        facts: dict[str, Any] = await self._request("look", modules)
        return facts

    async def needs_modules(self, folder: str, files: Fingerprint) -> bool:
        """Return whether the node needs a copy of modules; see `ModuleCopy.is_needed`."""
        return bool(await self._request("needs_modules", folder, files))

    async def unpack_modules(self, folder: str, files: Fingerprint, packed: bytes) -> None:
        """Have the node make that copy."""
        await self._request("unpack_modules", folder, files, packed)

    async def begin(self, order: NodeOrder) -> int:
        """Get ready to start ranks; see `Link.begin`."""
        return int(await self._request("begin", order))

    async def call(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the node's `NodeRanks`, once."""
        result: T = await self._request("call", method, *args, **kwargs)
        return result

    async def end(self) -> None:
        """End what is left of the run on the node."""
        await self._request("end")

    def kill(self) -> None:
        """Close the connection: the agent ends with it, and so does all that it started."""
        self._channel.close()

    async def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `Agent`, and return its answer. Raises `LinkError` or `OSError`."""
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        try:
            with pickle_to_file((args, kwargs)) as file:
                await self._send({"method": method, "request": number}, file.fileno())
            is_raised, value = await answer
        except EOFError as error:
            raise NodeLost(await self._explain_end(self._is_terminated)) from error
        finally:
            del self._waiting[number]
        if not is_raised:
            return value
        if isinstance(value, OSError):
            raise value
        raise RemoteError(value) from value

    async def _send(self, message: dict[str, Any], descriptor: int | None) -> None:
        try:
            await asyncio.to_thread(self._channel.send, message, descriptor)
        except OSError as error:
            raise NodeLost(await self._explain_end(self._is_terminated)) from error

    def _receive(self) -> None:
        """Receive answers until the connection ends: the body of the thread."""
        with contextlib.suppress(EOFError, RuntimeError):  # the loop has ended, too
            while True:
                message, descriptor = self._channel.receive()
                if message.get(TERMINATED):
                    self._is_terminated = True
                    continue
                data = b"" if descriptor is None else read_descriptor(descriptor)
                self._loop.call_soon_threadsafe(self._take, message, data)
        self._channel.close()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _take(self, message: dict[str, Any], data: bytes) -> None:
        """Hand an answer to the request that waits for it."""
        answer = self._waiting.get(message["answer"])
        if answer is not None and not answer.done():
            try:
                value = data if message["is_file"] else pickle.loads(data)
            except Exception as error:  # of a class that this process cannot make
                answer.set_exception(RemoteError(error))
            else:
                answer.set_result((message["is_raised"], value))

    def _end(self) -> None:
        """Fail what was not answered."""
        self.has_ended = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EOFError())
