"""Reconnection: which address to dial next, and when. Pure.

Theory of operation. The addresses stand in a ring, in an order of this process's own, so that the peers of a server that died
spread over all the others. After a loss the next one is dialed at once, and the lost one comes last. A round over all addresses
is quick; after a round without success the next one waits, longer each time.

The addresses from the configuration always stay. A server's Welcome names others; these are trusted only where they cannot make
things worse: none for a unix socket, whose peers need no token; no plain one beside TLS; no loopback seen from another host; none
beside HTTP, whose peers may have been sent through a proxy for a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from tasuki.core.address import Address, parse_url
from tasuki.core.backoff import Backoff, jittered
from tasuki.errors import ConfigError

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
IN_ROUND_S = 0.05  # between two addresses of one round
STEADY_S = 1.0  # a connection that ended sooner was none: dialing again at once would be a hot loop
CONNECT_TIMEOUT_S = 3.0
CONNECT_QUICK_S = 1.0  # where there is another address to try, and it was not tried yet
HELLO_QUICK_S = 3.0  # a Hello without an answer, where there is another address
LEARNED_MAX = 32
MISSED_MAX = 3  # an address that so many Welcomes in a row did not name is dropped


def believed(text: str, given: Sequence[Address]) -> Address | None:
    """Return the address that a server named if a peer with these configured ones may trust it, else None; see above."""
    if any(address.scheme == "unix" or address.http for address in given):
        return None
    try:
        found = parse_url(text)
    except ConfigError:
        return None
    address = found[0]
    lowers = address.scheme != "tls" and any(known.scheme == "tls" for known in given)
    elsewhere = address.loopback and not all(known.loopback for known in given)
    return None if len(found) > 1 or not address.reachable or address.http or lowers or elsewhere else address


class Connect(msgspec.Struct, frozen=True):
    """Dial this address; report Opened or Closed."""

    address: Address
    timeout_s: float = CONNECT_TIMEOUT_S


class Redial:
    """`jitter()` gives a number from 0 to 1; the driver's random source."""

    def __init__(self, given: Sequence[Address], jitter: Callable[[], float]) -> None:
        self._given = tuple(dict.fromkeys(given))
        self._jitter = jitter
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, jitter)
        self.addresses = self._shuffled(self._given)
        """All known addresses, in a ring: the next one to dial is the first."""
        self._missed: dict[Address, int] = {}
        """Learned addresses, and how many Welcomes in a row did not name them."""
        self._failures = 0
        self._connected_at: float | None = None
        self.due_at: float | None = 0.0
        """Time of the next dial; None while a connection exists or is being made."""

    @property
    def several(self) -> bool:
        """True if there is more than one address."""
        return len(self.addresses) > 1

    def dialed(self) -> Connect:
        """Return the connection to make now; its address becomes the last of the ring."""
        self.due_at = None
        address = self.addresses.pop(0)
        self.addresses.append(address)
        first_round = self._failures <= len(self.addresses)
        return Connect(address, CONNECT_QUICK_S if self.several and first_round else CONNECT_TIMEOUT_S)

    def connected(self, now: float, servers: Iterable[str] = ()) -> None:
        """Note that the server accepted our Hello and named these servers."""
        self._connected_at = now
        self.learn(servers)

    def lost(self, now: float) -> None:
        """Note that the connection ended or could not be made."""
        if self._connected_at is not None and now - self._connected_at >= STEADY_S:
            self._failures = 0
        self._connected_at = None
        self.due_at = now + self._wait_s()
        self._failures += 1

    def _wait_s(self) -> float:
        rounds, place = divmod(self._failures, len(self.addresses))
        if self._failures == 0:
            return 0.0
        return jittered(IN_ROUND_S, self._jitter) if place else self._backoff.delay_s(rounds - 1)

    # ------------------------------------------------------------------------------------------------ learning

    def learn(self, servers: Iterable[str]) -> None:
        """Take over the list of live servers that a server named."""
        found = (believed(text, self._given) for text in servers)
        named = [address for address in found if address is not None and address not in self._given]
        fresh = dict.fromkeys(named[:LEARNED_MAX], 0)
        for address, missed in self._missed.items():
            if address not in fresh and missed + 1 < MISSED_MAX and len(fresh) < LEARNED_MAX:
                fresh[address] = missed + 1
        self._missed = fresh
        known = {*self._given, *fresh}
        # Newcomers stand anywhere but behind the one that is connected, which is last and stays so.
        added = self._shuffled([address for address in fresh if address not in self.addresses])
        self.addresses = [*added, *(address for address in self.addresses if address in known)]
        if added and len(self.addresses) > 1:
            self.addresses = [*self._shuffled(self.addresses[:-1]), self.addresses[-1]]

    def _shuffled(self, addresses: Sequence[Address]) -> list[Address]:
        found = list(addresses)
        for place in range(len(found) - 1, 0, -1):
            other = min(place, int(self._jitter() * (place + 1)))
            found[place], found[other] = found[other], found[place]
        return found
