"""What can happen to a broker, and what it can ask its driver to do: closed unions of small structs."""

from __future__ import annotations

import msgspec

from tasuki.core.access import Identity
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import BlobGet, BlobPut, Chunk
from tasuki.core.verbs import Answers, Turn
from tasuki.errors import TasukiError


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told at its start."""

    server_id: str
    epoch: int
    own_uid: int | None = None
    lease_ttl_s: float = LEASE_TTL_S
    retention_s: float = 30 * 86400.0
    frame_max_bytes: int = 8 * 1024 * 1024
    servers: tuple[str, ...] = ()


class TurnDone(msgspec.Struct, frozen=True):
    """The store committed a turn."""

    turn: Turn
    answers: Answers


class TurnFailed(msgspec.Struct, frozen=True):
    """The store refused a turn: nothing of it happened, or (Unavailable) it is not known."""

    turn: Turn
    error: TasukiError


class DiskSpace(msgspec.Struct, frozen=True):
    """The driver looked at the disk; `problem` is empty when there is room."""

    problem: str = ""


class Query(msgspec.Struct, frozen=True):
    """A read that may be slow: the driver answers it from its reader, with what `identity` may see."""

    conn: int
    msg_id: int
    verb: str
    params: dict[str, object]
    identity: Identity
    workers: list[dict[str, object]]


class ReceiveBlob(msgspec.Struct, frozen=True):
    """Take a blob from this peer: it may send one."""

    conn: int
    put: BlobPut


class BlobPiece(msgspec.Struct, frozen=True):
    """A Chunk of a transfer that ReceiveBlob began."""

    conn: int
    chunk: Chunk


class SendBlob(msgspec.Struct, frozen=True):
    """Send a blob if the job's row says that this peer may read it."""

    conn: int
    get: BlobGet
    identity: Identity
    worker_id: str = ""
    incarnation: str = ""


Event = Opened | Received | Closed | Ticked | TurnDone | TurnFailed | DiskSpace
Command = Send | Hangup | Query | ReceiveBlob | BlobPiece | SendBlob
