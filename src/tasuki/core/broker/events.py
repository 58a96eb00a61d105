"""Events that a broker gets and commands that it gives to its driver: closed unions of small structs.

The broker is the store of `core.election`: it takes its TakeOver, and answers with TookOver, EpochFenced or Lapsed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tasuki.core.access import Identity, PeerKind
from tasuki.core.cluster_messages import Hint, RelayedMessage, ServerInfo
from tasuki.core.decoding import decodable
from tasuki.core.election import EpochFenced, Lapsed, TakeOver, TookOver
from tasuki.core.job import Job
from tasuki.core.lifecycle import BLOB_GRACE_S, GRACE_MAX_S, LEASE_TTL_MAX_S, LEASE_TTL_S, RETENTION_DAYS
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import FRAME_MAX_BYTES, LOG_PIECE_MAX_BYTES, BlobGet, BlobPut, Chunk, DeliverMessages
from tasuki.core.routing import ROUTE_WAIT_S, SubjectRoute
from tasuki.core.store_messages import Answers, BlobPlace, ReadyPage, Turn
from tasuki.errors import TasukiError

# Our own workers tell a start or progress with the next heartbeat, or give the attempt back; earlier versions told nothing while
# they fetched inputs.
BEGIN_WITHIN_S = 300.0


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server that its broker needs."""

    server_id: str
    epoch: int = 0
    """Epoch under which the server leads from its start on, because nobody else can; 0: leaders are elected."""
    shared: bool = False
    """Other servers may work on the same store."""
    own_uid: int | None = None
    key: bytes = b""
    """Key of the server's own user, whose commands it marks: that user's workers may run any program for them."""
    host: str = ""
    node_id: str = ""
    """Node of a Django project that the server is a part of."""
    lease_ttl_s: float = LEASE_TTL_S
    lease_ttl_max_s: float = LEASE_TTL_MAX_S
    """Longest lease that a worker gets, whatever it asks for; likewise `grace_max_s` for the grace of kept jobs."""
    grace_max_s: float = GRACE_MAX_S
    apps: tuple[str, ...] = ()
    """Apps whose jobs the server takes: no worker may have the name of one, which would make it the only one to get its jobs."""
    retention_s: float = RETENTION_DAYS * 86400.0
    """Time for which finished jobs and their results are kept."""
    blob_grace_s: float = BLOB_GRACE_S
    """Time for which a blob that no job refers to is kept after it was last brought or asked for."""
    blob_budget_bytes: int | None = None
    """Size of all blobs beyond which unused ones are collected sooner, and new ones refused if that does not help."""
    collects_blobs: bool = True
    """False for a server that cannot reach the bytes of blobs."""
    fires: bool = True
    """False if the store has no definitions."""
    frame_max_bytes: int = FRAME_MAX_BYTES
    routes: tuple[SubjectRoute, ...] = ()
    """Routing policies by pattern, the first that matches."""
    route_wait_s: float = ROUTE_WAIT_S
    """Longest wait of a routed job for a worker that is full."""
    begin_within_s: float = BEGIN_WITHIN_S
    """Time after which an attempt is taken back of which its worker has told neither a start nor progress."""


@decodable
class LogQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the request `logs`, checked."""

    job_id: str
    stream: str = "stdout"
    offset: int = 0
    attempt: int = 0
    """Attempt that the offset belongs to; another current attempt is read from its start. 0: the current one."""
    wait_s: float = 0.0
    max_bytes: int = LOG_PIECE_MAX_BYTES


# ---------------------------------------------------------------------------------------------------- events


class TurnDone(msgspec.Struct, frozen=True):
    """The store committed a turn."""

    turn: Turn
    answers: Answers


class TurnFailed(msgspec.Struct, frozen=True):
    """The store refused a turn: nothing of it happened, or (Unavailable) the outcome is not known."""

    turn: Turn
    error: TasukiError


class Elected(msgspec.Struct, frozen=True):
    """This server leads under this epoch, or (0) does not lead any more."""

    epoch: int


class ClusterView(msgspec.Struct, frozen=True):
    """The live servers, and the workers that get no more work."""

    servers: tuple[ServerInfo, ...]
    detached: frozenset[str] = frozenset()
    ages_s: dict[str, float] = {}
    """Time since the last heartbeat of each server; not of all coordinations."""


class Hinted(msgspec.Struct, frozen=True):
    """A hint of another server about its last commit."""

    hint: Hint


class Relayed(msgspec.Struct, frozen=True):
    """Messages of another server's publishers."""

    messages: list[RelayedMessage]


class SomeEnded(msgspec.Struct, frozen=True):
    """The answer to AskEnded: these jobs are terminal, or gone."""

    job_ids: list[str]


class ReadyFound(msgspec.Struct, frozen=True):
    """The answer to AskReady; None: the store could not be asked."""

    page: ReadyPage | None


class RoutedFound(msgspec.Struct, frozen=True):
    """The answer to AskRouted: some of the jobs, of those that are still there; None: the store could not be asked."""

    jobs: list[Job] | None


class SomeRevoked(msgspec.Struct, frozen=True):
    """The answer to AskRevoked."""

    token_ids: list[str]


class WorkerDetached(msgspec.Struct, frozen=True):
    """A worker gets no more work at any server, and the leases that it has are to end now."""

    worker_id: str


class StartAssigned(msgspec.Struct, frozen=True):
    """The leader ordered this worker to start what the store has assigned to it."""

    worker_id: str


class BlobArrived(msgspec.Struct, frozen=True):
    """The bytes that a peer sent are durable at their place; the store is told, then the peer."""

    conn: int
    put: BlobPut
    place: BlobPlace


class BlobsUnderWay(msgspec.Struct, frozen=True):
    """Uploads that take long: their blobs are placed again, so that collection leaves them alone."""

    puts: list[BlobPut]


class BlobsDeleted(msgspec.Struct, frozen=True):
    """The bytes of these condemned blobs are gone."""

    epoch: int
    places: list[BlobPlace]


class DiskSpace(msgspec.Struct, frozen=True):
    """Result of the driver's check of the disk; `problem` is empty when there is room."""

    problem: str = ""


class JobSeen(msgspec.Struct, frozen=True):
    """The row of the job whose log a client asks for; the client may see it."""

    conn: int
    msg_id: int
    question: LogQuestion
    job: Job


# ---------------------------------------------------------------------------------------------------- commands


class Query(msgspec.Struct, frozen=True):
    """A read that may be slow: the driver answers it from its reader, with the rows that `identity` may see."""

    conn: int
    msg_id: int
    verb: str
    params: dict[str, object]
    identity: Identity
    workers: list[dict[str, object]]
    question: LogQuestion | None = None
    """Question of a request `logs`: the driver gives the job to the broker as JobSeen instead of answering."""
    trouble: str = ""
    """Reason why this server grants nothing at the moment, for `explain`."""
    routes: tuple[SubjectRoute, ...] = ()
    route_wait_s: float = ROUTE_WAIT_S
    route_reason: tuple[str, str] = ("", "")
    """The worker that was chosen for the job of `explain`, and why, if that was decided here."""


class ReceiveBlob(msgspec.Struct, frozen=True):
    """Take a blob from this peer and keep it at this place; BlobArrived when it is durable."""

    conn: int
    put: BlobPut
    place: BlobPlace
    uploader: str
    """Owner of the upload: only the same owner may continue one that was cut off."""
    kind: PeerKind = PeerKind.CLIENT


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


class LogFenced(msgspec.Struct, frozen=True):
    """Log that a report of this peer was refused for good."""

    conn: int
    job_id: str
    reason: str


class DeleteBlobs(msgspec.Struct, frozen=True):
    """Delete the bytes of these blobs, to which nothing can refer any more; then BlobsDeleted."""

    epoch: int
    places: tuple[BlobPlace, ...]


class Detach(msgspec.Struct, frozen=True):
    """Note in the coordination that a worker gets no more work, or work again; then answer the request."""

    conn: int
    msg_id: int
    worker_id: str
    detached: bool
    actor: str
    reason: str = ""
    now: bool = False
    """End the worker's leases as well; WorkerDetached."""


class Degrade(msgspec.Struct, frozen=True):
    """Note in the coordination that the leader is to step down; then answer the request."""

    conn: int
    msg_id: int
    server_id: str


class Deliver(msgspec.Struct, frozen=True):
    """Send messages to each of these subscribers that reads fast enough; the driver drops and counts those of others."""

    conns: tuple[int, ...]
    message: DeliverMessages


class Relay(msgspec.Struct, frozen=True):
    """Send messages to the other servers, for their subscribers."""

    messages: list[RelayedMessage]


class Publish(msgspec.Struct, frozen=True):
    """Send a hint to the other servers."""

    hint: Hint


class StartRuns(msgspec.Struct, frozen=True):
    """Order a worker of another node to start these runs, in the name of the leader of this epoch."""

    epoch: int
    worker_id: str
    node_id: str
    address: str
    """HOST:PORT of the node's gRPC door."""
    runs: tuple[tuple[str, int], ...]
    """(job_id, attempt)"""


class NoteAssigned(msgspec.Struct, frozen=True):
    """Note in the coordination, for others to read, which worker each run is about to be assigned to."""

    worker_of: dict[str, str]
    """By job_id."""


class AskEnded(msgspec.Struct, frozen=True):
    """Look up which of these watched jobs have ended; SomeEnded."""

    job_ids: list[str]


class AskRevoked(msgspec.Struct, frozen=True):
    """Look up which of these tokens were revoked; SomeRevoked."""

    token_ids: list[str]


class AskReady(msgspec.Struct, frozen=True):
    """Read some queues with ready jobs, from this place on; ReadyFound."""

    place: Any
    limit: int


class AskRouted(msgspec.Struct, frozen=True):
    """Read the oldest ready jobs of these subjects, `limit` of each queue; RoutedFound."""

    subjects: tuple[str, ...]
    limit: int


HintEvent = Hinted | Relayed | SomeEnded | SomeRevoked | ReadyFound | RoutedFound
ClusterEvent = Elected | TakeOver | ClusterView | HintEvent | WorkerDetached | StartAssigned
BlobEvent = BlobArrived | BlobsUnderWay | BlobsDeleted
DriverEvent = DiskSpace | ClusterEvent | BlobEvent
"""Events that concern neither a connection nor a turn."""

Event = Opened | Received | Closed | Ticked | TurnDone | TurnFailed | JobSeen | DriverEvent

StoreQuestion = AskEnded | AskRevoked | AskReady | AskRouted
"""Reads beside the turns, of what this server did not hear of."""
ClusterCommand = TookOver | EpochFenced | Lapsed | Publish | Relay | StartRuns | NoteAssigned | Detach | Degrade | StoreQuestion
BlobCommand = ReceiveBlob | BlobPiece | SendBlob | DeleteBlobs
Command = Send | Deliver | Hangup | Query | LogFenced | ClusterCommand | BlobCommand
