"""Events and commands that all machines (server, worker, client, …) share: time, and connections.

A machine is a plain object with `apply(event, now) -> commands`. It never reads a clock, draws a random number or touches a
socket: its driver does, and passes the result in. The same machines run in the product and in the simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tasuki.core.protocol import Message
from tasuki.errors import TasukiError


class Now(NamedTuple):
    """The driver's clocks: `monotonic` for deadlines (counts on while the host sleeps), `wall` for times that people read."""

    monotonic: float
    wall: float


class Peer(msgspec.Struct, frozen=True):
    """The other end of a connection as the operating system knows it."""

    transport: str
    """tcp or unix"""
    uid: int | None = None
    """User of the process at the other end of a unix socket."""
    address: str = ""

    @property
    def local(self) -> bool:
        """True if the peer is on this host."""
        return self.transport == "unix" or self.address.startswith(("127.", "::1", "[::1]"))


class Opened(msgspec.Struct, frozen=True):
    """A connection was made; nothing was received yet."""

    conn: int
    peer: Peer


class Received(msgspec.Struct, frozen=True):
    """A message came."""

    conn: int
    message: Message


class Closed(msgspec.Struct, frozen=True):
    """The connection is gone."""

    conn: int
    reason: str = ""


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


class Send(msgspec.Struct, frozen=True):
    """Send this message."""

    conn: int
    message: Message


class Hangup(msgspec.Struct, frozen=True):
    """End the connection, after telling the peer why."""

    conn: int
    error: TasukiError | None = None
