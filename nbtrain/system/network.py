"""Ports, addresses and network interfaces of this host."""

from __future__ import annotations

import socket


def port_trouble(port: int) -> str | None:
    """Return why a loopback port cannot be used for the ranks' store; None if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # As the launcher does; otherwise a port that was just closed seems to be in use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this host."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def own_address(host: str) -> str | None:
    """Return this host's address on the route to another host; None without a route."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, and only selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str | None) -> str:
    """Return the name of the network interface with an address, or ""."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return ""
