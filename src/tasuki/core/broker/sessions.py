"""What the server remembers of a connection: who it is, what it watches, what it was given. Gone with the connection."""

from __future__ import annotations

import msgspec

from tasuki.core.access import Identity
from tasuki.core.broker.credit import Account
from tasuki.core.job import OnDisconnect
from tasuki.core.machine import Peer
from tasuki.core.protocol import Claim
from tasuki.core.store_messages import Takes

REDELIVER_AFTER_S = 2.0  # first wait for a sign of an assignment; doubles each time
REDELIVER_MAX = 4


class Delivery(msgspec.Struct):
    """An attempt that was sent to a worker and is not reported yet."""

    claim: Claim
    sent_at: float
    acked: bool = False
    tries: int = 0


class Session(msgspec.Struct):
    """One connection after `Opened`. `identity` is None until its Hello was accepted."""

    conn: int
    peer: Peer
    opened_at: float
    heard_at: float
    identity: Identity | None = None
    hello_seen: bool = False
    servers_told: tuple[str, ...] = ()
    """Where else it was told to turn to."""
    spending: bool = False
    """It is exchanging the token that it came with, and must hear what it gets for it."""


class ClientSession(Session):
    """A connection that submits and asks."""

    client_id: str = ""
    watching: set[str] = msgspec.field(default_factory=set)
    log_reads: int = 0
    """Its questions about logs that are at workers."""


class TransferSession(Session, kw_only=True):
    """A connection beside a worker's own, for blobs alone: a slow one keeps no heartbeat waiting."""

    worker_id: str
    incarnation: str


class WorkerSession(Session, kw_only=True):
    """A connection that runs jobs."""

    worker_id: str
    incarnation: str
    patterns: tuple[str, ...] = ()
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    ttl_s: float
    host: str = ""
    slots: int = 1
    takes: Takes = Takes.ANY
    version: int = 1
    """Of the protocol that both sides speak."""
    log_reads: int = 0
    account: Account = msgspec.field(default_factory=Account)
    deliveries: dict[str, Delivery] = msgspec.field(default_factory=dict)
    """By lease_id."""
    settled: set[str] = msgspec.field(default_factory=set)
    """lease_ids that it reported or gave back while the store was being asked what it holds: the answer is older than these."""
    resuming: bool = False
    """It was connected before: nothing is leased for it until its first Heartbeat says what it holds."""
    reading: bool = False
    """The store is being asked what it holds: nothing is leased for it until it is known what was lost on the way to it."""
    backlog: bool = False
    """It may take all it can: there is more than what this turn submits."""
