"""Events and commands of the worker's machine: closed unions of small structs."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import asdict

from tasuki.core.job import OnDisconnect, Outcome
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.message_requests import MessageCommand, MessageEvent
from tasuki.core.protocol import PROTOCOL_OLDEST, PROTOCOL_VERSION, CachePut, Ending, HelloWorker, ReadLog
from tasuki.core.reconnect import Connect
from tasuki.core.store_messages import Grant, Takes
from tasuki.errors import TasukiError


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a worker that stay the same while its process lives."""

    worker_id: str
    incarnation: str
    token: str = ""
    patterns: tuple[str, ...] = ()
    capacity: int = 1
    ahead: int = 0
    """Number of attempts that may be requested beyond the capacity while attempts are short."""
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    ttl_s: float | None = None
    host: str = ""
    agent: str = ""
    codecs: tuple[str, ...] = ()
    takes: Takes = Takes.ANY
    execs: tuple[str, ...] | None = None
    caches: bool = False

    def hello(self, msg_id: int, patterns: tuple[str, ...], *, resumed: bool) -> HelloWorker:
        """Return the Hello message; `resumed`: the worker was connected before."""
        shared = {name: value for name, value in asdict(self).items() if name not in ("capacity", "ahead", "patterns")}
        own: dict[str, Any] = {"msg_id": msg_id, "patterns": patterns, "resumed": resumed, "slots": self.capacity}
        return HelloWorker(version=PROTOCOL_VERSION, oldest=PROTOCOL_OLDEST, **own, **shared)


class Started(msgspec.Struct, frozen=True):
    """The attempt's process is running. The server learns it at once, or, while attempts are short, if it does not end soon."""

    lease_id: str


class AttemptReturned(msgspec.Struct, frozen=True):
    """The attempt could not be started here, for a reason that is not the job's: another worker may try."""

    lease_id: str


class AttemptEnded(msgspec.Struct, frozen=True):
    """The attempt is over, and nothing of it runs any more."""

    lease_id: str
    outcome: Outcome


class Restored(msgspec.Struct, frozen=True):
    """An ending that an earlier process of this worker saved and could not report."""

    ending: Ending


class EndingSaved(msgspec.Struct, frozen=True):
    """The attempt is over and its ending is on disk; the next process offers it if this one cannot report it."""

    lease_id: str


class LeasesConfirmed(msgspec.Struct, frozen=True):
    """The leader, or a sub-leader, has renewed these leases for the worker, which asked at this time."""

    lease_ids: tuple[str, ...]
    asked_at: float


class LeasesDenied(msgspec.Struct, frozen=True):
    """The worker may not continue with these attempts."""

    lease_ids: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True):
    """Take no more work; exit when everything is recorded, or is on disk while no server can be reached."""


class ChangePatterns(msgspec.Struct, frozen=True):
    """Subscribe to these patterns from now on."""

    patterns: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """Start this attempt."""

    grant: Grant


class Stop(msgspec.Struct, frozen=True):
    """Stop this attempt; report Ended when nothing of it is left."""

    lease_id: str
    reason: str
    """CANCELED, LEASE_LOST"""


class Tail(msgspec.Struct, frozen=True):
    """A server asks for a piece of a log; answer it with a LogPiece."""

    question: ReadLog


class TakeFiles(msgspec.Struct, frozen=True):
    """A server asks for files of a cache to be kept; answer it with a CacheAck."""

    put: CachePut


class Save(msgspec.Struct, frozen=True):
    """Save this ending, which no server has taken yet, where it outlives this process, until Forget."""

    ending: Ending


class KeepRejected(msgspec.Struct, frozen=True):
    """Keep the result of this ending, which was refused for good, for people to look at. Forget follows."""

    ending: Ending
    reason: str


class Forget(msgspec.Struct, frozen=True):
    """Drop everything about this attempt. `fenced`: the reason for which its result was refused."""

    lease_id: str
    fenced: str = ""


class Exit(msgspec.Struct, frozen=True):
    """Exit: the worker is done (error None), or can never do its work."""

    error: TasukiError | None = None


Event = (
    Opened
    | Received
    | Closed
    | Ticked
    | Started
    | AttemptEnded
    | AttemptReturned
    | Restored
    | EndingSaved
    | LeasesConfirmed
    | LeasesDenied
    | Drain
    | ChangePatterns
    | MessageEvent
)
Command = Connect | Send | Hangup | Run | Stop | Tail | TakeFiles | Save | KeepRejected | Forget | Exit | MessageCommand
