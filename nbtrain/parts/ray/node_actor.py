"""The actor that nbtrain runs on each node: it describes the node, then holds its `NodeRanks`.

Ray gets this class by value, and at its top it needs nothing but Python: a node that lacks nbtrain
can report so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NodeActor:
    """Answers the driver on one node. Its methods are called from there, several at a time."""

    def __init__(self) -> None:
        self._ranks: Any = None

    def look(self, modules: list[str]) -> dict[str, Any]:
        """Return what this host is: versions, address, and which of `modules` it lacks.

        What `begin` needs is imported here, and not by a thread beside it: two threads that import
        numpy at once may fail, and Ray makes an array of numpy's of the payload.
        """
        import contextlib
        import importlib.metadata
        import importlib.util

        import ray

        address = ray.util.get_node_ip_address()
        try:
            from nbtrain.engines.remote.nodes import describe_host

            facts = describe_host(address, modules)
        except ImportError:  # no nbtrain, or another release of it
            is_missing = importlib.util.find_spec("nbtrain") is None
            versions = {} if is_missing else {"nbtrain": importlib.metadata.version("nbtrain")}
            missing = [m for m in modules if m == "nbtrain" and is_missing]
            facts = {"address": address, "interface": "-", "versions": versions, "missing": missing}
        with contextlib.suppress(ImportError):  # what needs it will raise
            importlib.import_module("numpy")
        return {**facts, "node": ray.get_runtime_context().get_node_id()}

    def begin(self, order: Any, payload: Any) -> Any:
        """Get ready to start ranks; return the port of the store, 0 on nodes that do not keep it.

        What is left of an earlier order is ended first.
        """
        from nbtrain.engines.remote.node_ranks import NodeRanks

        if self._ranks is not None:
            self.end()
        self._ranks = NodeRanks(order, payload)
        return self._ranks.port

    def end(self) -> None:
        """End the ranks, and what else is left of the order.

        Raises `AttributeError` if no order has started, or one is starting: this process must end.
        """
        ranks, self._ranks = self._ranks, None
        ranks.close()

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of `NodeRanks`, which comes by its name, as pickle sends functions."""
        return method(self._ranks, *args, **kwargs)
