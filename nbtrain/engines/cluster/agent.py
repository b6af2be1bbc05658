"""The actor that nbtrain runs on each node: it tells about the node, then is its `Node`.

Ray gets this class by value, and at its top it needs nothing but Python: a node that lacks nbtrain
can say so.
"""

from __future__ import annotations

from typing import Any


class Agent:
    """One node's end of the line. Its methods are called from another host, several at a time."""

    def __init__(self) -> None:
        self._node: Any = None

    def look(self, modules: list[str], keeps_store: bool = False) -> dict[str, Any]:
        """Return what this node is: versions, address, and which of `modules` it lacks.

        What `begin` will need is imported from then on, torch included where the store will be.
        """
        import importlib.metadata
        import importlib.util
        import platform
        import threading
        import time

        import ray

        def version(package: str) -> str | None:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return None

        def lacks(module: str) -> bool:
            try:
                return importlib.util.find_spec(module) is None
            except (ImportError, ValueError):
                return True

        address = ray.util.get_node_ip_address()
        facts = {
            "time": time.time(),
            "address": address,
            "interface": self._interface(address),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("nbtrain", "torch")},
            "missing": [name for name in modules if lacks(name)],
        }
        threading.Thread(target=self._import, args=(keeps_store,), daemon=True).start()
        return facts

    def _import(self, torch: bool) -> None:
        import contextlib
        import importlib

        with contextlib.suppress(Exception):  # who needs it later says so
            importlib.import_module("numpy")  # the parcel comes as an array of its
            importlib.import_module("nbtrain.engines.cluster.node")
            if torch:
                importlib.import_module("torch.distributed")

    def _interface(self, address: str) -> str:
        """Return the network interface that has an address; "" where nobody can tell."""
        try:
            import psutil
        except ImportError:
            return ""
        for name, its in psutil.net_if_addrs().items():
            if any(one.address == address for one in its):
                return str(name)
        return ""

    def begin(self, order: Any, parcel: Any) -> int:
        """Get ready to start ranks; return the port of the store, on the node that keeps it."""
        from nbtrain.engines.cluster.node import Node

        if self._node is not None:
            self._node.close()
        self._node = Node(order, parcel)
        port: int = self._node.port
        return port

    def do(self, name: str, *args: Any) -> Any:
        """Call a method of the `Node`."""
        return getattr(self._node, name)(*args)
