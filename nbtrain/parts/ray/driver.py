"""The process that uses Ray for a run, so that the kernel has no thread or socket of Ray."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ...engines.remote import driver as remote
from ...engines.remote.nodes import NodeRequest, PlacedNode
from ...part_api import LaunchError
from . import reservation
from .ray_nodes import RayNode
from .reservation import Reservation

_AUTH_MODE = "RAY_AUTH_MODE"


def main(order: Mapping[str, Any]) -> None:
    """Serve the launcher at the other end of a socket until it closes."""
    remote.serve(RayDriver, order)


class RayDriver(remote.Driver):
    """Finds nodes by Ray, and reaches each by an actor (`node_actor`)."""

    cluster = "Ray"

    def __init__(self, connection: Connection[Any, Any]) -> None:
        super().__init__(connection)
        self._ray: Any = None
        self._reservation: Reservation | None = None

    async def connect(
        self, address: str | None, sources: str | None, auth_mode: str = ""
    ) -> list[RayNode]:
        """Join a cluster, with the Python files below `sources`; return what its nodes have.

        `auth_mode` is the cluster's way to check tokens, if the environment does not set it.
        """
        if auth_mode:
            os.environ.setdefault(_AUTH_MODE, auth_mode)
        self._ray = reservation.join(address, sources)
        self._reservation = Reservation(self._ray, functools.partial(self._report, "waiting"))
        return await self._reservation.nodes()

    async def nodes(self) -> list[RayNode]:
        """Return what the nodes of the cluster have that was joined for an earlier run."""
        return await self._require_reservation().nodes()

    async def address(self) -> tuple[str, str]:
        """Return where others join the cluster, and its `auth_mode`: Ray 2.59 sets one itself."""
        return self._ray.get_runtime_context().gcs_address, os.environ.get(_AUTH_MODE, "")

    async def reserve(self, request: NodeRequest) -> int:
        """Reserve nodes, as soon as they have room; return their number."""
        return await self._require_reservation().reserve(request)

    async def place(self, request: NodeRequest) -> list[str]:
        """Reserve nodes, and start an actor on each; return the notes about them."""
        self._request = request
        return await self._require_reservation().place(request)

    async def store_payload(self, path: str) -> None:
        """Put the ranks' payload into the object store, where each node fetches it once."""
        import numpy

        self._require_reservation().payload = self._ray.put(numpy.memmap(path, "u1", "r"))

    async def choose_nodes(self, *, again: bool) -> Sequence[PlacedNode]:
        """Return the nodes of the run; reserve nodes `again` for a later attempt."""
        reserved = self._require_reservation()
        if again:
            assert self._request is not None
            await reserved.place(self._request, again=True)
        return reserved.placed

    async def rest(self) -> None:
        """Forget the run, which has ended, and its payload, because another may follow."""
        if self._reservation is not None:
            self._reservation.payload = None
        await super().rest()

    def release(self) -> None:
        """Give back what was reserved."""
        if self._reservation is not None:
            self._reservation.release()

    def shutdown(self) -> None:
        """Leave the cluster, with nothing of this driver left on it."""
        self.release()
        if self._ray is not None:
            self._ray.shutdown()

    def _require_reservation(self) -> Reservation:
        if self._reservation is None:
            raise LaunchError("the process that talks to Ray is not connected to a cluster")
        return self._reservation
