"""What every door needs before it is open: may it listen here, how many connections can it hold, a bound socket.

Free of the server, so that a node agent, which has none, can use it.
"""

from __future__ import annotations

import resource
import socket

from tasuki.core.address import Address
from tasuki.errors import ConfigError

CONNECTIONS_MAX = 10_000
DESCRIPTORS_KEPT = 128  # of the process's limit: for the store, blobs on their way, and the refusal of one connection more


def check_listener(address: Address, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """A listener that others can reach needs TLS and tokens, or a person who says that it is meant so."""
    if address.loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(name for name, there in (("--tls-cert/--tls-key", tls), ("tokens", tokens)) if not there)
    raise ConfigError(
        f"{address} can be reached from other machines, but {missing} is missing; "
        "give it, listen on 127.0.0.1, or say --insecure if the network is trusted"
    )


def connections_max() -> int:
    """How many connections this process can hold; without descriptors left, the store could not open a file either."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(CONNECTIONS_MAX, descriptors - DESCRIPTORS_KEPT))


def bound(address: Address) -> socket.socket:
    """A socket at the address, not listening yet; ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it each answer waits 40 ms for an acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}; is another server running there?") from None
    return sock
