"""Messages between client, server and worker, as data. `wire/` turns them into bytes and back.

Every request has a `msg_id`, chosen by its sender and unique on its connection; every answer carries it back as `corr_id`.
Directions:

    client → server   HelloClient SubmitJobs CancelJobs Request BlobPut BlobGet Chunk Heartbeat PublishMessages CachePut
    server → client   Welcome Accepted Results Reply Chunk HeartbeatAnswer ErrorMessage DeliverMessages CacheAck
    worker → server   HelloWorker GiveCredit Subscribe JobsStarted JobsFinished JobsReleased Heartbeat BlobPut BlobGet Chunk
                      LogPiece Request PublishMessages CacheAck
    server → worker   Welcome AssignJobs JobsRecorded CancelLeases HeartbeatAnswer Reply Chunk ErrorMessage ReadLog
                      DeliverMessages CachePut
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from tasuki.core.job import (
    HEADERS_MAX,
    RESULT_INLINE_MAX_BYTES,
    TIMEOUT_MAX_S,
    JobSpec,
    OnDisconnect,
    Outcome,
    Progress,
    State,
    is_sha256,
)
from tasuki.core.routing import HELD_MAX_BYTES
from tasuki.core.store_messages import CacheEntry, Grant, Takes
from tasuki.core.subject import check_subject
from tasuki.errors import InvalidInput, TasukiError, TooLarge, VersionMismatch, quoted

PROTOCOL_VERSION = 2
PROTOCOL_OLDEST = 1
UNAUTHENTICATED_FRAME_MAX_BYTES = 64 * 1024
FRAME_MAX_BYTES = 8 * 1024 * 1024
BATCH_MAX = 1024  # items of one frame; a receiver refuses more before it makes objects of them
REQUEST_MAX_BYTES = 256 * 1024  # parameters of a Request after decompression: a `watch` of 1,024 job_ids has 133 KiB
SUBMIT_MAX_BYTES = 4 * 1024 * 1024  # jobs of one frame after decompression: one alone may have 3.2 MiB of texts and file names
PARAMS_MAX = 16  # parameters of one Request; no verb has more than 10
BATCH_BYTES = 1024 * 1024  # about what one frame of ours carries, unless a single item is larger
META_MAX_BYTES = 16 * 1024  # of an outcome; small facts only
META_VALUES_MAX = 1024  # of an outcome, at all depths: an empty map is one byte on the wire and 64 in memory
ITEM_BYTES = 256  # what an item is counted for beside its large parts
CODECS = ("zstd", "gzip")  # in the order of preference; a codec that the peer does not offer is not used
CHUNK_BYTES = 256 * 1024
CHUNK_MAX_BYTES = 4 * CHUNK_BYTES  # of another implementation
LOG_PIECE_MAX_BYTES = 256 * 1024
LOG_WAIT_MAX_S = 25.0  # how long a question about a log may wait for something new: below every idle time-out on the way
PROGRESS_MAX = 64  # of one Heartbeat, whose header has 64 KiB; the rest goes with the next
HANDSHAKE_TIMEOUT_S = 10.0
MESSAGE_PAYLOAD_MAX_BYTES = 1024 * 1024  # of a published message
MESSAGE_HEADERS_MAX_CHARS = 16 * 1024
PUBLISH_MAX_BYTES = 2 * 1024 * 1024  # messages of one frame after decompression: one of the largest, or many small ones

# Names of the protocol over HTTP, where frames travel in the bodies of requests and answers.
FRAMES_PATH = "/v1/frames"
MESSAGES_PATH = "/v1/messages"
FRAMES_TYPE = "application/vnd.tasuki.frames"
FRAMES_MAX = 64  # of one request
WORKER_PATH = "/v1/worker"
SESSION_HEADER = "Tasuki-Session"
BLOBS_PATH = "/v1/blobs"

NUMBER_MAX = 2**63 - 1  # what an SQL integer holds
MsgId = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
WholeNumber = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # also keeps out NaN and infinity
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
HeldFiles = Annotated[bytes, msgspec.Meta(max_length=HELD_MAX_BYTES)]
Parameter = None | bool | int | float | str | Annotated[list[str], msgspec.Meta(max_length=BATCH_MAX)]
"""One parameter of a Request as it comes over the wire: nothing is nested deeper."""
Patterns = Annotated[tuple[str, ...], msgspec.Meta(max_length=BATCH_MAX)]

T = TypeVar("T")


def batches(items: Sequence[T], large_bytes: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Yield slices that fit a frame each, by number and by size; `large_bytes` returns the size of an item's large parts."""
    start = size = 0
    for place, item in enumerate(items):
        bytes_here = large_bytes(item) + ITEM_BYTES
        if place > start and (place - start >= BATCH_MAX or size + bytes_here > BATCH_BYTES):
            yield items[start:place]
            start, size = place, 0
        size += bytes_here
    if start < len(items):
        yield items[start:] if start else items


def outcome_bytes(outcome: Outcome) -> int:
    """Return the size of the large parts of an outcome, for `batches`."""
    return len(outcome.result or b"") + len(outcome.message) + (META_MAX_BYTES if outcome.meta else 0)


class Claim(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One lease as a worker names it: [job_id, lease_id, attempt]."""

    job_id: str
    lease_id: str
    attempt: int


# ---------------------------------------------------------------------------------------------------- first frames


class HelloClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first frame of a client. `token` may be empty on a unix socket of the same user."""

    msg_id: MsgId
    client_id: str
    token: str = ""
    version: int = 1  # what is not said on the wire is 1 for good, whatever this side speaks
    oldest: int = 1
    codecs: tuple[str, ...] = ()
    agent: str = ""


class HelloWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first frame of a worker. `resumed`: it was connected before; its first Heartbeat names the leases it still holds.

    `transfers`: a connection beside the worker's own, for blobs alone.
    """

    msg_id: MsgId
    worker_id: str
    incarnation: str
    token: str = ""
    version: int = 1  # what is not said on the wire is 1 for good, whatever this side speaks
    oldest: int = 1
    codecs: tuple[str, ...] = ()
    agent: str = ""
    patterns: Patterns = ()
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: Seconds = 0.0
    ttl_s: Seconds | None = None
    resumed: bool = False
    host: str = ""
    slots: WholeNumber = 1
    takes: Takes = Takes.ANY
    execs: Patterns | None = None
    """Programs of its list, and OWN_PROGRAMS if it runs any for its own user; None: it does not say."""
    transfers: bool = False
    caches: bool = False
    """The worker keeps files of caches, and answers CachePut."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server's answer to an accepted Hello. `identity` is the peer's, as the server sees it; `servers` are all live ones."""

    corr_id: int
    version: int
    server_id: str
    identity: str
    kind: str
    servers: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    lease_ttl_s: float = 0.0
    lease_margin_s: float = 0.0
    frame_max_bytes: int = FRAME_MAX_BYTES
    idle_timeout_s: float = 0.0


def check_version(welcome: Welcome) -> None:
    """Raise VersionMismatch if a server chose a version that this side does not speak."""
    if not PROTOCOL_OLDEST <= welcome.version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"server {welcome.server_id} answered with protocol version {welcome.version}, "
            f"this side speaks {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}; upgrade the older side"
        )


# ---------------------------------------------------------------------------------------------------- clients


class SubmitJobs(msgspec.Struct, frozen=True):
    """Request to store jobs. With `watch`, a Results item follows for each when it is terminal."""

    msg_id: int
    specs: list[JobSpec]
    watch: bool = True
    on_failed: str = "return"


class Acceptance(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One job of a submit that was not simply new: it existed (`state`), or was refused (`code`, `message`)."""

    index: int
    job_id: str
    state: str = ""
    code: str = ""
    message: str = ""
    details: dict[str, Any] = {}


class Accepted(msgspec.Struct, frozen=True):
    """Confirmation after the commit: all `count` jobs of the submit are stored, except as `exceptions` says."""

    corr_id: int
    count: int
    exceptions: list[Acceptance] = []


class JobResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The end of a job."""

    job_id: str
    state: State
    attempt: int
    outcome: Outcome
    finished_at: float | None = None
    generation: int = 0

    def __repr__(self) -> str:
        """Return the facts without the result, which may be long."""
        why = f", {self.outcome.error_code}: {self.outcome.message}" if self.outcome.error_code else ""
        return f"<JobResult {self.job_id!r}: {self.state} in attempt {self.attempt}{why}>"

    @property
    def succeeded(self) -> bool:
        return self.state is State.SUCCEEDED


class Results(msgspec.Struct, frozen=True):
    """Jobs that a client watches and that are terminal now."""

    items: list[JobResult]


class CancelJobs(msgspec.Struct, frozen=True):
    """Request to end jobs. Answered by a Reply."""

    msg_id: int
    job_ids: list[str]
    reason: str = ""


class Request(msgspec.Struct, frozen=True):
    """A question or an operator's order by name; `params` as the verb's description in docs/wire.md says."""

    msg_id: int
    verb: str
    params: dict[str, Any] = {}
    """Each is a `Parameter`, if it came over the wire."""


class Reply(msgspec.Struct, frozen=True):
    """The answer to a Request, CancelJobs, Subscribe or BlobPut."""

    corr_id: int
    body: Any = None


class ErrorMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Refusal of a request; with corr_id 0 an error of the connection, which ends."""

    corr_id: int
    code: str
    message: str
    details: dict[str, Any] = {}


def error_message(corr_id: int, error: TasukiError) -> ErrorMessage:
    """Return the message that carries this error."""
    return ErrorMessage(corr_id, error.code, error.message, error.details())


# ---------------------------------------------------------------------------------------------------- workers


class GiveCredit(msgspec.Struct, frozen=True):
    """Number of further jobs that a worker will take; negative: fewer than it said before."""

    credit: int


class Subscribe(msgspec.Struct, frozen=True):
    """Patterns of the subjects that a worker takes from now on; none: no more jobs."""

    msg_id: MsgId
    patterns: Patterns


class AssignJobs(msgspec.Struct, frozen=True):
    """Attempts for this worker, each under its own lease of `ttl_s`."""

    ttl_s: float
    grants: list[Grant]


class JobsStarted(msgspec.Struct, frozen=True):
    """Report of attempts that are running."""

    claims: list[Claim]


class Ending(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The end of one attempt; an outcome without error_code succeeded."""

    job_id: str
    lease_id: str
    attempt: int
    outcome: Outcome
    started_at: float | None = None


class JobsFinished(msgspec.Struct, frozen=True):
    """Report of attempts that ended. The worker keeps them until the server says recorded or fenced."""

    endings: list[Ending]


class JobsReleased(msgspec.Struct, frozen=True):
    """Return of attempts that were never started."""

    claims: list[Claim]
    reason: str = ""


class JobsRecorded(msgspec.Struct, frozen=True):
    """The server's final answer to endings: durable, or refused for good with the reason."""

    recorded: list[str] = []
    fenced: list[tuple[str, str]] = []


class CancelLeases(msgspec.Struct, frozen=True):
    """Order to stop attempts and report them."""

    lease_ids: list[str]


class Heartbeat(msgspec.Struct, frozen=True):
    """Sign of life; a worker's also asks for the renewal of these leases, and reports progress of some of them."""

    msg_id: int
    claims: list[Claim] = []
    progress: dict[str, Progress] = {}
    """By lease_id; only what changed."""
    cpu: Fraction | None = None
    """Load of the worker's CPUs."""
    held: HeldFiles | None = None
    """Prefixes of the hashes of cached files that the worker holds (`core.routing`), if they changed."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    """Answer to a Heartbeat: every lease that is not named continues. `servers`: all live ones, if they changed."""

    corr_id: int
    cancel: list[str] = []
    lost: list[str] = []
    servers: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- large things


class BlobPut(msgspec.Struct, frozen=True, omit_defaults=True):
    """Announcement of a blob. The Reply is {"have": true}, or {"go": true}: then Chunks follow, then a second Reply.

    With `resume` the Reply is {"go": true, "offset": N}: the first Chunk begins there, where an earlier upload was cut off.
    With `direct` it is {"stored", "generation"} and nothing follows: the bytes come to their place another way, or are there.
    """

    msg_id: MsgId
    sha256: str
    size_bytes: WholeNumber
    resume: bool = False
    direct: bool = False


class BlobGet(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request for a blob of a job, or of a file of a cache, from an offset, as Chunks."""

    msg_id: MsgId
    sha256: str
    job_id: str
    """The job, or `cache_source` of the file."""
    offset: WholeNumber = 0


CACHE_SOURCE = "cache:"  # no job_id has a colon


def cache_source(cache_id: str, name: str) -> str:
    """Return the text by which a BlobGet names a file of a cache, instead of a job."""
    return f"{CACHE_SOURCE}{cache_id}/{name}"


def parse_cache_source(text: str) -> tuple[str, str] | None:
    """Return (cache_id, name) of a `cache_source`; None for a job_id."""
    if not text.startswith(CACHE_SOURCE):
        return None
    cache_id, _, name = text.removeprefix(CACHE_SOURCE).partition("/")
    return cache_id, name


class Chunk(msgspec.Struct, frozen=True):
    """A piece of the transfer that msg_id `corr_id` began; the last one may be empty."""

    corr_id: int
    offset: int
    data: bytes
    last: bool = False


# ---------------------------------------------------------------------------------------------------- logs


PROGRESS_STREAM = "progress"
"""Name of the stream with the reports of progress, a line of JSON each: {"fraction": 0.5, "text": "half"}."""
LOG_STREAMS = ("stdout", "stderr", PROGRESS_STREAM)


class ReadLog(msgspec.Struct, frozen=True, omit_defaults=True):
    """Question for the output of an attempt on one stream, from an offset; waits up to `wait_s` for something new."""

    msg_id: MsgId
    lease_id: str
    stream: str
    offset: WholeNumber = 0
    max_bytes: int = LOG_PIECE_MAX_BYTES
    wait_s: float = 0.0


class LogPiece(msgspec.Struct, frozen=True):
    """Part of a log. Data that begins after the requested offset: the bytes before it are not kept (`cut_bytes`)."""

    corr_id: int
    offset: int
    data: bytes
    next: int
    """The offset to ask for next."""
    end: int
    """Number of bytes written so far."""
    cut_bytes: int = 0
    ended: bool = False
    """Nothing more comes from this attempt, or nothing is known of it here."""


# ---------------------------------------------------------------------------------------------------- publish/subscribe


NO_RECEIVERS = {"Tasuki-Status": "no-receivers"}
"""Headers of the answer to a message with a `reply_to` that nobody is subscribed to."""


class PublishedMessage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message of publish/subscribe: [subject, payload, reply_to, headers]. It is not stored anywhere."""

    subject: str
    payload: bytes = b""
    reply_to: str = ""
    """Subject to which an answer may be published; empty: none is expected."""
    headers: dict[str, str] = {}


class PublishMessages(msgspec.Struct, frozen=True):
    """Messages for all that are subscribed to their subjects now. Answered by an Error if some were refused, or with `confirm`
    by a Reply when all are on their way."""

    msg_id: MsgId
    items: list[PublishedMessage]
    confirm: bool = False


class DeliverMessages(msgspec.Struct, frozen=True):
    """Messages for a subscriber; with `queue`, for one of its subscriptions in that queue group."""

    items: list[PublishedMessage]
    queue: str = ""
    dropped: int = 0
    """Number of messages before these that were dropped, because this subscriber did not read fast enough."""


def published_bytes(message: PublishedMessage) -> int:
    """Return the size of the large parts of a message, for `batches`."""
    return len(message.payload) + sum(len(name) + len(value) for name, value in message.headers.items())


def check_published(message: PublishedMessage) -> None:
    """Refuse a message that is too large, or whose subjects cannot be published to."""
    check_subject(message.subject)
    if message.reply_to:
        check_subject(message.reply_to)
    if len(message.payload) > MESSAGE_PAYLOAD_MAX_BYTES:
        raise TooLarge(
            f"a message to {quoted(message.subject)} has {len(message.payload)} bytes, the limit is {MESSAGE_PAYLOAD_MAX_BYTES}; "
            "send a large thing as a job's input file"
        )
    if message.headers:
        size = sum(len(name) + len(value) for name, value in message.headers.items())
        if len(message.headers) > HEADERS_MAX or size > MESSAGE_HEADERS_MAX_CHARS:
            raise TooLarge(
                f"a message to {quoted(message.subject)} has {len(message.headers)} headers of {size} characters, the limits are "
                f"{HEADERS_MAX} and {MESSAGE_HEADERS_MAX_CHARS}"
            )


# ---------------------------------------------------------------------------------------------------- caches


class CacheStatus(enum.StrEnum):
    """States of a worker's copy of the files of a CachePut. OK, SKIPPED and FAILED are final."""

    OK = "OK"
    """The worker has all files now, and had not before."""
    SKIPPED = "SKIPPED"
    """The worker had all files."""
    FAILED = "FAILED"
    FETCHING = "FETCHING"
    AWAY = "AWAY"
    """The server's word: the worker left, or has not answered yet."""


class CachePut(msgspec.Struct, frozen=True):
    """Request to add files to a cache and have the workers fetch them; from the server: to fetch them.

    The answer waits up to `wait_s` for the workers; asked again, it tells how they stand then. Without entries, a server's
    message says that the cache is no more, and is not answered.
    """

    msg_id: MsgId
    cache_id: str
    target: str
    entries: list[CacheEntry]
    wait_s: Seconds = 0.0


class WorkerCache(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """State of one worker's copy of the files of a CachePut."""

    worker_id: str
    status: CacheStatus
    message: str = ""
    done_bytes: int = 0


class CacheAck(msgspec.Struct, frozen=True):
    """Answer to a CachePut: of one worker to the server, of all workers here that the target meets to the client."""

    corr_id: int
    cache_id: str
    workers: list[WorkerCache]
    elsewhere: tuple[str, ...] = ()
    """Addresses of other servers that have such workers: ask there too."""


FirstMessage = HelloClient | HelloWorker | Welcome
ClientMessage = SubmitJobs | Accepted | Results | CancelJobs | Request | Reply | ErrorMessage
WorkerMessage = GiveCredit | Subscribe | AssignJobs | JobsStarted | JobsFinished | JobsReleased | JobsRecorded | CancelLeases
Put = BlobPut | CachePut
Transfer = Put | BlobGet | Chunk | ReadLog | LogPiece | CacheAck | PublishMessages | DeliverMessages
Message = FirstMessage | ClientMessage | WorkerMessage | Heartbeat | HeartbeatAnswer | Transfer


# ---------------------------------------------------------------------------------------------------- limits of reports
# Reports share a transaction with other peers' jobs, and are tried again if it fails. A report that no store can hold (a number
# past 64 bits, endless nesting) must be refused before, or it would fail every turn after it.

META_DEPTH_MAX = 32
MESSAGE_MAX_CHARS = 64 * 1024
ERROR_CODE_MAX_CHARS = 64


def check_attempts(claims: Sequence[Claim | Ending]) -> None:
    """Refuse attempt numbers that no store can hold."""
    for claim in claims:
        if not 0 <= claim.attempt <= NUMBER_MAX:
            raise InvalidInput(f"attempt {claim.attempt} of job {claim.job_id[:128]!r} is not a number that can be stored")


def storable(ending: Ending) -> Outcome:
    """Return the outcome, or a failure with the reason if it cannot be stored.

    One bad report costs its own job an attempt, and nothing else.
    """
    outcome = ending.outcome
    try:
        check_outcome(outcome)
    except InvalidInput as error:
        return unstorable(error)
    return outcome


def unstorable(error: TasukiError) -> Outcome:
    """Return the failure that replaces a report that cannot be stored."""
    return Outcome(error_code="BAD_OUTCOME", message=f"the worker's report cannot be stored: {error.message}", permanent=True)


def not_uploaded(outcome: Outcome) -> Outcome:
    """Return the failure that replaces a report whose result is a blob that is not stored."""
    ref = outcome.result_ref
    blob = f"blob {ref.sha256} of {ref.size_bytes} bytes" if ref is not None else "a blob"
    return Outcome(error_code="BAD_OUTCOME", message=f"the worker's result, {blob}, is not here: it was not uploaded")


def check_outcome(outcome: Outcome) -> None:
    """Raise InvalidInput or TooLarge with the reason if the outcome cannot be stored."""
    if outcome.exit_code is not None and not -NUMBER_MAX <= outcome.exit_code <= NUMBER_MAX:
        raise InvalidInput(f"exit_code {outcome.exit_code} is not a number that can be stored")
    if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
        raise TooLarge(
            f"a result of {len(outcome.result)} bytes is too large, the limit is {RESULT_INLINE_MAX_BYTES}; send a blob"
        )
    if outcome.result_ref is not None and not 0 <= outcome.result_ref.size_bytes <= NUMBER_MAX:
        raise InvalidInput(f"a result cannot have {outcome.result_ref.size_bytes} bytes; the size must be 0 to {NUMBER_MAX}")
    if len(outcome.message) > MESSAGE_MAX_CHARS:
        raise TooLarge(f"a message of {len(outcome.message)} characters is too long, the limit is {MESSAGE_MAX_CHARS}")
    if outcome.error_code is not None and len(outcome.error_code) > ERROR_CODE_MAX_CHARS:
        raise TooLarge(f"an error_code of {len(outcome.error_code)} characters is too long, the limit is {ERROR_CODE_MAX_CHARS}")
    if outcome.result_sha256 is not None and outcome.result is None:  # that of an inline result is computed where it comes in
        if not is_sha256(outcome.result_sha256):
            raise InvalidInput(f"result_sha256 must be 64 lower-case hex digits, got {quoted(outcome.result_sha256)}")
        if outcome.result_ref is not None and outcome.result_sha256 != outcome.result_ref.sha256:
            raise InvalidInput(
                f"result_sha256 is {outcome.result_sha256}, but the result is blob {quoted(outcome.result_ref.sha256)}"
            )
    if outcome.retry_in_s is not None and not 0 <= outcome.retry_in_s <= TIMEOUT_MAX_S:
        raise InvalidInput(f"retry_in_s must be 0 to {TIMEOUT_MAX_S:.0f} seconds, got {outcome.retry_in_s}")
    if outcome.meta:
        check_meta(outcome.meta)


def check_meta(meta: object) -> None:
    """Refuse a meta that cannot be stored and shown as JSON: values of other types, keys that are no text, too much of it."""
    level: list[object] = [meta]
    count = 0
    for _ in range(META_DEPTH_MAX):
        inside: list[object] = []
        for value in level:
            if isinstance(value, dict):
                if not all(isinstance(name, str) for name in value):
                    raise InvalidInput("an outcome's meta has a key that is no text")
                inside += value.values()
            elif isinstance(value, list):
                inside += value
            elif value is not None and not isinstance(value, bool | int | float | str | bytes):
                raise InvalidInput(f"an outcome's meta has a value of type {type(value).__name__}, which JSON does not have")
        count += len(inside)
        if count > META_VALUES_MAX:
            raise TooLarge(f"an outcome's meta has more than {META_VALUES_MAX} values; put large things into the result")
        if not inside:
            break
        level = inside
    else:
        raise InvalidInput(f"an outcome's meta may nest {META_DEPTH_MAX} levels, not more")
    try:
        size = len(msgspec.msgpack.encode(meta))
    except OverflowError:
        raise InvalidInput("an outcome's meta has a whole number of more than 64 bits; send it as text") from None
    if size > META_MAX_BYTES:
        raise TooLarge(f"an outcome's meta has {size} bytes, the limit is {META_MAX_BYTES}; put large things into the result")
