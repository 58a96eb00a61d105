"""Ports for servers that a test starts, and starts again, on the same port."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST_PORT = 10_000
_given: set[int] = set()


def free_port() -> int:
    """Return a free port of the loopback that stays free while its server is away.

    It lies below the range from which the kernel takes ports for outgoing connections and for listeners on port 0: a port
    of that range may belong to anybody when a killed server comes back.
    """
    kernels_first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LOWEST_PORT, kernels_first)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # taken; another one is drawn
                continue
        _given.add(port)
        return port
