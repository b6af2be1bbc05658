"""The way to nbtrain's actor on a node of a Ray cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from ...engines.remote.node_ranks import NodeOrder
from ...engines.remote.nodes import Link, LinkUnavailable, Method, NodeLost, RemoteError
from .ray_nodes import RayNode, has_ended

P = ParamSpec("P")
T = TypeVar("T")


class ActorLink(Link):
    """Calls an actor (`node_actor`), and raises Ray's errors as those of a `Link`."""

    def __init__(
        self,
        ray: Any,
        node: RayNode,
        actor: Any,
        payload: Callable[[], Any],
        kill: Callable[[], None],
    ) -> None:
        self._ray, self._node, self._actor = ray, node, actor
        self._payload, self._kill = payload, kill

    async def look(self, modules: list[str]) -> dict[str, Any]:
        """Return what the host is; see `NodeActor.look`. Raises `LinkError`."""
        facts: dict[str, Any] = await self._result(self._actor.look.remote(modules))
        return facts

    async def begin(self, order: NodeOrder) -> int:
        """Get ready to start ranks; see `Link.begin`."""
        return int(await self._result(self._actor.begin.remote(order, self._payload())))

    async def call(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the node's `NodeRanks`, once."""
        result: T = await self._result(self._actor.call.remote(method, *args, **kwargs))
        return result

    async def end(self) -> None:
        """End what is left of the run on the node."""
        await self._result(self._actor.end.remote())

    def kill(self) -> None:
        """End the actor, and with it all that it started."""
        self._kill()

    async def _result(self, answer: Awaitable[Any]) -> Any:
        """Return the answer of the actor. Raises `LinkError`, or an `OSError` of the actor's."""
        errors = self._ray.exceptions
        try:
            return await answer
        except errors.RayTaskError as error:
            if isinstance(error, OSError):
                raise
            raise RemoteError(error.cause or error) from error
        except errors.ActorUnavailableError as error:
            if await has_ended(self._node):
                raise NodeLost(self._describe_loss()) from error
            raise LinkUnavailable(str(error)) from error
        except errors.NodeDiedError as error:
            raise NodeLost(self._describe_loss()) from error
        except errors.RayError as error:
            if self._is_alive():
                label = f"{self._node.name} ({self._node.address})"
                raise NodeLost(f"nbtrain's process on {label} ended") from error
            raise NodeLost(self._describe_loss()) from error

    def _describe_loss(self) -> str:
        return f"its node {self._node.name} ({self._node.address}) was lost"

    def _is_alive(self) -> bool:
        try:
            return any(n["NodeID"] == self._node.id and n["Alive"] for n in self._ray.nodes())
        except Exception:  # Ray has ended here, too
            return False
