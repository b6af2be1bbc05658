"""Ports for tests that must know one before it is listened on."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Linux gives ports from 32,768 on to connections: one of those is soon some other socket's."""


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on, and no connection is given.

    The choice is this process's own: tests that run beside each other take others.
    """
    chosen = random.SystemRandom()
    while True:
        port = chosen.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
