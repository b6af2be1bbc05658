"""Ports, addresses and network interfaces of this host."""

from __future__ import annotations

import socket


def port_trouble(port: int) -> str | None:
    """Return why the ranks cannot use a loopback port to meet; None if they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # As the launcher itself does, or a port that was in use a moment ago looks busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this host has."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def own_address(host: str) -> str | None:
    """Return this host's address on the route to another; None where there is no route."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str | None) -> str:
    """Return the name of the network interface that has an address, "" if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return ""
