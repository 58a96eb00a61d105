"""Messages <-> frames <-> bytes, without I/O. docs/wire.md describes the protocol.

A frame is [length u32 LE][type u8][flags u8][header length u16 LE][header: msgpack][payload]; `length` counts the bytes that
follow it, and is checked before anything is allocated for the frame. The payload is one item, or with the BATCH flag a msgpack
array of items; the decoder takes both forms everywhere.

`_READERS` and `_WRITERS` are the table of frame types and messages. Decoded messages are well-formed and of the right types; if
they are allowed is decided by the machines of `core`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.core import protocol
from tasuki.core.job import JobSpec, Outcome, Progress
from tasuki.core.store_messages import CacheEntry, Grant
from tasuki.core.subject import DEFAULT_SUBJECT
from tasuki.errors import InvalidInput, ProtocolError, RefusedRequest, TooLarge, UnknownFrame
from tasuki.wire.compression import GZIP, ZSTD, compress, decompress

BATCH = 1  # the payload is a msgpack array of items instead of one item
KNOWN_FLAGS = BATCH | ZSTD | GZIP
_PREFIX = struct.Struct("<IBBH")
PREFIX_BYTES = _PREFIX.size
_AFTER_LENGTH_BYTES = PREFIX_BYTES - 4
HEADER_MAX_BYTES = 0xFFFF
_HTTP_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"PRI ")


class Frame(NamedTuple):
    """One frame, not decoded yet."""

    type: int
    flags: int
    header: bytes
    payload: bytes


def encode_frame(type: int, header: bytes, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return the bytes of one frame."""
    header_bytes = len(header)
    if header_bytes > HEADER_MAX_BYTES:
        raise TooLarge(
            f"a frame header has {header_bytes} bytes, the limit is {HEADER_MAX_BYTES}; put large things in the payload"
        )
    return _PREFIX.pack(_AFTER_LENGTH_BYTES + header_bytes + len(payload), type, flags, header_bytes) + header + payload


class FrameDecoder:
    """Turns bytes as they come into whole frames. After an error the connection cannot be used any more."""

    def __init__(self, max_bytes: int = protocol.UNAUTHENTICATED_FRAME_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """True while a frame has begun and not ended: its deadline counts."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Return all frames that are complete with these bytes."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < PREFIX_BYTES or len(self._buffer) < self._needed(self._buffer, 0):
                return []
            data = bytes(self._buffer)
            self._buffer = bytearray()
        frames: list[Frame] = []
        position, end = 0, len(data)
        while end - position >= PREFIX_BYTES:
            size = self._needed(data, position)
            if end - position < size:
                break
            _, type, flags, header_bytes = _PREFIX.unpack_from(data, position)
            body = position + PREFIX_BYTES + header_bytes
            frames.append(Frame(type, flags, data[position + PREFIX_BYTES : body], data[body : position + size]))
            position += size
        if position < end:
            self._buffer += data[position:] if position else data
        return frames

    def _needed(self, data: bytes | bytearray, position: int) -> int:
        length, type, flags, header_bytes = _PREFIX.unpack_from(data, position)
        if length > self.max_bytes:
            words = f"a frame of type {type} announces {length} bytes, the limit on this connection is {self.max_bytes}"
            raise TooLarge(words + _foreign_protocol(bytes(data[position : position + PREFIX_BYTES])))
        if length < _AFTER_LENGTH_BYTES + header_bytes:
            raise ProtocolError(f"a frame of type {type} announces {length} bytes but a header of {header_bytes}")
        if flags & ~KNOWN_FLAGS:
            raise ProtocolError(f"a frame of type {type} has unknown flags {flags:#04x}")
        return int(length) + 4


def _foreign_protocol(first: bytes) -> str:
    """Return a hint for a peer that has dialled the wrong port; empty if its first bytes are of no protocol known here."""
    if first.startswith(_HTTP_METHODS):
        return "; this looks like HTTP, for which this server has another port (--http)"
    return "; this looks like TLS, which this port does not speak" if first.startswith(b"\x16\x03") else ""


# ---------------------------------------------------------------------------------------------------- messages


class Type(enum.IntEnum):
    """Frame types; 8 is not used."""

    SUBMIT_JOB = 1
    ASSIGN_JOB = 2
    ACK_JOB = 3
    CREDIT = 4
    RESULT = 5
    CACHE_PUT = 6
    CACHE_ACK = 7
    HELLO_CLIENT = 9
    HELLO_WORKER = 10
    ERROR = 11
    HEARTBEAT = 12
    CHUNK = 13
    CANCEL = 14
    PUBLISH = 15
    SUBSCRIBE = 16
    WELCOME = 17
    REQUEST = 18
    REPLY = 19
    BLOB_PUT = 20
    BLOB_GET = 21
    READ_LOG = 22
    LOG_PIECE = 23
    DELIVER = 24


class _SubmitHeader(msgspec.Struct, omit_defaults=True):
    msg_id: protocol.MsgId
    watch: bool = True
    on_failed: str = "return"
    subject: str | None = None


class _AckHeader(msgspec.Struct, omit_defaults=True):
    stage: str
    corr_id: int = 0
    count: int = 0
    reason: str = ""


class _AssignHeader(msgspec.Struct):
    ttl_s: float


class _IdHeader(msgspec.Struct, omit_defaults=True):
    msg_id: int = 0
    corr_id: int = 0


class _BeatHeader(msgspec.Struct, omit_defaults=True):
    msg_id: protocol.WholeNumber = 0
    corr_id: int = 0
    progress: dict[str, Progress] = {}
    cpu: protocol.Fraction | None = None
    held: protocol.HeldFiles | None = None


class _CancelHeader(msgspec.Struct, omit_defaults=True):
    msg_id: protocol.WholeNumber = 0
    reason: str = ""


class _RequestHeader(msgspec.Struct):
    msg_id: protocol.MsgId
    verb: str


class _ChunkHeader(msgspec.Struct, omit_defaults=True):
    corr_id: int
    offset: int
    last: bool = False


class _PieceHeader(msgspec.Struct, omit_defaults=True):
    corr_id: int
    offset: int
    next: int
    end: int
    cut_bytes: int = 0
    ended: bool = False


class _PublishHeader(msgspec.Struct, omit_defaults=True):
    msg_id: protocol.MsgId
    confirm: bool = False


class _DeliverHeader(msgspec.Struct, omit_defaults=True):
    queue: str = ""
    dropped: int = 0


class _CachePutHeader(msgspec.Struct, omit_defaults=True):
    msg_id: protocol.MsgId
    cache_id: str
    target: str
    wait_s: protocol.Seconds = 0.0


class _CacheAckHeader(msgspec.Struct, omit_defaults=True):
    corr_id: int
    cache_id: str
    elsewhere: protocol.Patterns = ()


class _BeatAnswer(msgspec.Struct, omit_defaults=True):
    cancel: list[str] = []
    lost: list[str] = []
    servers: tuple[str, ...] = ()


class _PackedOutcome(Outcome, frozen=True):
    """An outcome whose meta is not decoded yet."""

    meta: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class _PackedEnding(protocol.Ending, frozen=True):
    outcome: _PackedOutcome


T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_EMPTY_MAP = _encode({})


def _decoder(type: type[T]) -> Callable[[bytes | memoryview], T]:
    return msgspec.msgpack.Decoder(type).decode


def _limited(type: type[T], max_items: int = protocol.BATCH_MAX) -> type[T]:
    """Return the type with a limit of items, which is compared with the announced number before one of them is decoded."""
    return Annotated[type, msgspec.Meta(max_length=max_items)]  # type: ignore[return-value]


def _items(item: type[T]) -> Callable[[Frame], list[T]]:
    many, one = _decoder(_limited(list[item])), _decoder(item)  # type: ignore[valid-type]

    def read(frame: Frame) -> list[T]:
        if frame.flags & BATCH:
            return many(frame.payload)
        return [one(frame.payload)] if frame.payload else []

    return read


_specs = _items(JobSpec)
_claims = _items(protocol.Claim)
_endings = _items(protocol.Ending)
_packed_endings = _items(_PackedEnding)
_grants = _items(Grant)
_results = _items(protocol.JobResult)
_acceptances = _items(protocol.Acceptance)
_cache_entries = _items(CacheEntry)
_worker_caches = _items(protocol.WorkerCache)
_texts = _items(str)
_fenced = _items(tuple[str, str])
_submit_header = _decoder(_SubmitHeader)
_ack_header = _decoder(_AckHeader)
_assign_header = _decoder(_AssignHeader)
_id_header = _decoder(_IdHeader)
_beat_header = _decoder(_BeatHeader)
_cancel_header = _decoder(_CancelHeader)
_request_header = _decoder(_RequestHeader)
_chunk_header = _decoder(_ChunkHeader)
_beat_answer = _decoder(_BeatAnswer)
_params = _decoder(_limited(dict[str, protocol.Parameter], protocol.PARAMS_MAX))
_meta = _decoder(dict[str, Any])
_anything = _decoder(Any)
_piece_header = _decoder(_PieceHeader)
_published = _items(protocol.PublishedMessage)
_publish_header = _decoder(_PublishHeader)
_deliver_header = _decoder(_DeliverHeader)
_cache_put_header = _decoder(_CachePutHeader)
_cache_ack_header = _decoder(_CacheAckHeader)


def decode(frame: Frame, max_bytes: int, *, from_server: bool = True) -> protocol.Message:
    """Return the message in a frame; ProtocolError if it is malformed or nested too deep, UnknownFrame if its type is unknown.

    A server passes `from_server=False`: frames that only a server sends may hold anything, and are refused undecoded; a request
    that cannot be read is a RefusedRequest if at least its msg_id can be.
    """
    reader = _READERS.get(frame.type)
    if reader is None:
        known = ", ".join(f"{kind.name}={kind.value}" for kind in Type if kind.value in _READERS)
        has = f"protocol version {protocol.PROTOCOL_VERSION} has {known}"
        raise UnknownFrame(f"frame type {frame.type} is not known here; {has}", _msg_id_of(frame))
    if not from_server:
        if frame.type in _FROM_SERVER:
            raise ProtocolError(f"a {Type(frame.type).name} frame is the server's to send")
        max_bytes = min(max_bytes, _TO_SERVER_MAX_BYTES.get(frame.type, max_bytes))
    try:
        if len(frame.payload) > max_bytes:
            raise TooLarge(
                f"a {Type(frame.type).name} frame has {len(frame.payload)} bytes, the limit is {max_bytes}; send several"
            )
        if frame.flags & ~BATCH:
            frame = frame._replace(payload=decompress(frame.payload, frame.flags, max_bytes))
        return reader(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The text may quote the peer (a wrong enum value), and goes back in a header that has a size limit.
        raise _refusal(
            frame, ProtocolError(f"a {Type(frame.type).name} frame cannot be read: {str(error)[:200]}"), from_server
        ) from None
    except InvalidInput as error:
        raise _refusal(frame, error, from_server) from None


def _refusal(frame: Frame, error: InvalidInput, from_server: bool) -> InvalidInput:
    """Return the error of a frame that cannot be read: of its one request if its sender waits for an answer to that, else of the
    connection."""
    msg_id = 0 if from_server or frame.type in (Type.HELLO_CLIENT, Type.HELLO_WORKER) else _msg_id_of(frame)
    if not 0 < msg_id <= protocol.NUMBER_MAX:
        return error
    return RefusedRequest(error.message, msg_id, InvalidInput.code if isinstance(error, ProtocolError) else error.code)


def _msg_id_of(frame: Frame) -> int:
    try:
        return _id_header(frame.header).msg_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # malformed: no answer can be addressed
        return 0


def _read_submit(frame: Frame) -> protocol.Message:
    header = _submit_header(frame.header)
    specs = _specs(frame)
    if header.subject is not None:
        subject = header.subject
        specs = [replace(spec, subject=subject) if spec.subject == DEFAULT_SUBJECT else spec for spec in specs]
    return protocol.SubmitJobs(header.msg_id, specs, header.watch, header.on_failed)


def _read_ack(frame: Frame) -> protocol.Message:
    header = _ack_header(frame.header)
    match header.stage:
        case "accepted":
            return protocol.Accepted(header.corr_id, header.count, _acceptances(frame))
        case "started":
            return protocol.JobsStarted(_claims(frame))
        case "finished":
            return protocol.JobsFinished(_read_endings(frame))
        case "released":
            return protocol.JobsReleased(_claims(frame), header.reason)
        case "recorded":
            return protocol.JobsRecorded(_texts(frame), [])
        case "fenced":
            return protocol.JobsRecorded([], _fenced(frame))
        case stage:
            raise ProtocolError(f"an ACK_JOB frame has the unknown stage {stage[:40]!r}")


def _read_endings(frame: Frame) -> list[protocol.Ending]:
    if b"meta" not in frame.payload:
        return _endings(frame)
    endings = _packed_endings(frame)
    size = sum(len(memoryview(ending.outcome.meta)) for ending in endings)
    if size > protocol.BATCH_BYTES:
        raise TooLarge(
            f"the endings of a frame have {size} bytes of meta, the limit is {protocol.BATCH_BYTES}; send several frames"
        )
    return [
        protocol.Ending(packed.job_id, packed.lease_id, packed.attempt, _unpacked(packed.outcome), packed.started_at)
        for packed in endings
    ]


def _unpacked(outcome: _PackedOutcome) -> Outcome:
    """Decode the meta, one at a time and if it is small: decoded, it may take 70 times its size."""
    meta: dict[str, Any] = {}
    if packed := memoryview(outcome.meta):
        try:
            if len(packed) > protocol.META_MAX_BYTES:
                raise TooLarge(f"an outcome's meta has {len(packed)} bytes, the limit is {protocol.META_MAX_BYTES}")
            meta = _meta(packed)
            protocol.check_meta(meta)
        except (InvalidInput, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return protocol.unstorable(error if isinstance(error, InvalidInput) else InvalidInput(f"an outcome's meta: {error}"))
    return Outcome(**{name: getattr(outcome, name) for name in _PLAIN_FIELDS}, meta=meta)


_PLAIN_FIELDS = tuple(name for name in Outcome.__struct_fields__ if name != "meta")


def _read_heartbeat(frame: Frame) -> protocol.Message:
    header = _beat_header(frame.header)
    if header.corr_id:
        answer = _beat_answer(frame.payload or _EMPTY_MAP)
        return protocol.HeartbeatAnswer(header.corr_id, answer.cancel, answer.lost, answer.servers)
    if not header.msg_id:
        raise ProtocolError("a HEARTBEAT frame has no msg_id; it must be 1 or more")
    return protocol.Heartbeat(header.msg_id, _claims(frame), header.progress, header.cpu, header.held)


def _read_cancel(frame: Frame) -> protocol.Message:
    header = _cancel_header(frame.header)
    if not header.msg_id:
        return protocol.CancelLeases(_texts(frame))
    return protocol.CancelJobs(header.msg_id, _texts(frame), header.reason)


def _read_request(frame: Frame) -> protocol.Message:
    header = _request_header(frame.header)
    try:
        return protocol.Request(header.msg_id, header.verb, _params(frame.payload) if frame.payload else {})
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{header.verb[:40]}: the parameters cannot be read: {error}") from None


def _read_chunk(frame: Frame) -> protocol.Message:
    header = _chunk_header(frame.header)
    return protocol.Chunk(header.corr_id, header.offset, frame.payload, header.last)


def _read_piece(frame: Frame) -> protocol.Message:
    header = _piece_header(frame.header)
    return protocol.LogPiece(
        header.corr_id, header.offset, frame.payload, header.next, header.end, header.cut_bytes, header.ended
    )


def _read_publish(frame: Frame) -> protocol.Message:
    header = _publish_header(frame.header)
    return protocol.PublishMessages(header.msg_id, _published(frame), header.confirm)


def _read_deliver(frame: Frame) -> protocol.Message:
    header = _deliver_header(frame.header)
    return protocol.DeliverMessages(_published(frame), header.queue, header.dropped)


def _read_cache_put(frame: Frame) -> protocol.Message:
    header = _cache_put_header(frame.header)
    return protocol.CachePut(header.msg_id, header.cache_id, header.target, _cache_entries(frame), header.wait_s)


def _read_cache_ack(frame: Frame) -> protocol.Message:
    header = _cache_ack_header(frame.header)
    return protocol.CacheAck(header.corr_id, header.cache_id, _worker_caches(frame), header.elsewhere)


_READERS: dict[int, Callable[[Frame], protocol.Message]] = {
    Type.SUBMIT_JOB: _read_submit,
    Type.ASSIGN_JOB: lambda frame: protocol.AssignJobs(_assign_header(frame.header).ttl_s, _grants(frame)),
    Type.ACK_JOB: _read_ack,
    Type.RESULT: lambda frame: protocol.Results(_results(frame)),
    Type.HEARTBEAT: _read_heartbeat,
    Type.CHUNK: _read_chunk,
    Type.CANCEL: _read_cancel,
    Type.REQUEST: _read_request,
    Type.REPLY: lambda frame: protocol.Reply(
        _id_header(frame.header).corr_id, _anything(frame.payload) if frame.payload else None
    ),
    Type.LOG_PIECE: _read_piece,
    Type.PUBLISH: _read_publish,
    Type.DELIVER: _read_deliver,
    Type.CACHE_PUT: _read_cache_put,
    Type.CACHE_ACK: _read_cache_ack,
}
_FROM_SERVER: set[int] = {Type.ASSIGN_JOB, Type.RESULT, Type.REPLY, Type.WELCOME, Type.DELIVER}
_TO_SERVER_MAX_BYTES: dict[int, int] = {
    Type.PUBLISH: protocol.PUBLISH_MAX_BYTES,
    Type.REQUEST: protocol.REQUEST_MAX_BYTES,
    Type.SUBMIT_JOB: protocol.SUBMIT_MAX_BYTES,
    Type.CACHE_PUT: protocol.SUBMIT_MAX_BYTES,
    Type.CACHE_ACK: protocol.REQUEST_MAX_BYTES,
    Type.CHUNK: protocol.CHUNK_MAX_BYTES,
}
_NO_BODY = b""
_Parts = tuple[Type, Any, bytes, int]


def _batch(items: Sequence[Any]) -> tuple[bytes, int]:
    return (_encode(items), BATCH) if items else (_NO_BODY, 0)


_WRITERS: dict[type, Callable[[Any], _Parts]] = {
    protocol.SubmitJobs: lambda m: (Type.SUBMIT_JOB, _SubmitHeader(m.msg_id, m.watch, m.on_failed), *_batch(m.specs)),
    protocol.Accepted: lambda m: (Type.ACK_JOB, _AckHeader("accepted", m.corr_id, m.count), *_batch(m.exceptions)),
    protocol.Results: lambda m: (Type.RESULT, {}, *_batch(m.items)),
    protocol.CancelJobs: lambda m: (Type.CANCEL, _CancelHeader(m.msg_id, m.reason), *_batch(m.job_ids)),
    protocol.Request: lambda m: (Type.REQUEST, _RequestHeader(m.msg_id, m.verb), _encode(m.params), 0),
    protocol.Reply: lambda m: (Type.REPLY, _IdHeader(corr_id=m.corr_id), _encode(m.body), 0),
    protocol.AssignJobs: lambda m: (Type.ASSIGN_JOB, _AssignHeader(m.ttl_s), *_batch(m.grants)),
    protocol.JobsStarted: lambda m: (Type.ACK_JOB, _AckHeader("started"), *_batch(m.claims)),
    protocol.JobsFinished: lambda m: (Type.ACK_JOB, _AckHeader("finished"), *_batch(m.endings)),
    protocol.JobsReleased: lambda m: (Type.ACK_JOB, _AckHeader("released", reason=m.reason), *_batch(m.claims)),
    protocol.CancelLeases: lambda m: (Type.CANCEL, _CancelHeader(), *_batch(m.lease_ids)),
    protocol.Heartbeat: lambda m: (Type.HEARTBEAT, _BeatHeader(m.msg_id, 0, m.progress, m.cpu, m.held), *_batch(m.claims)),
    protocol.HeartbeatAnswer: lambda m: (
        Type.HEARTBEAT,
        _IdHeader(corr_id=m.corr_id),
        _encode(_BeatAnswer(m.cancel, m.lost, m.servers)),
        0,
    ),
    protocol.Chunk: lambda m: (Type.CHUNK, _ChunkHeader(m.corr_id, m.offset, m.last), m.data, 0),
    protocol.CachePut: lambda m: (
        Type.CACHE_PUT,
        _CachePutHeader(m.msg_id, m.cache_id, m.target, m.wait_s),
        *_batch(m.entries),
    ),
    protocol.CacheAck: lambda m: (Type.CACHE_ACK, _CacheAckHeader(m.corr_id, m.cache_id, m.elsewhere), *_batch(m.workers)),
    protocol.LogPiece: lambda m: (
        Type.LOG_PIECE,
        _PieceHeader(m.corr_id, m.offset, m.next, m.end, m.cut_bytes, m.ended),
        m.data,
        0,
    ),
    protocol.PublishMessages: lambda m: (Type.PUBLISH, _PublishHeader(m.msg_id, m.confirm), *_batch(m.items)),
    protocol.DeliverMessages: lambda m: (Type.DELIVER, _DeliverHeader(m.queue, m.dropped), *_batch(m.items)),
}


def _add_header_message(number: Type, kind: type[Any]) -> None:
    """Enter a message that is the header of its frame, without a payload."""
    decode_header = _decoder(kind)
    _READERS[number] = lambda frame: decode_header(frame.header)
    _WRITERS[kind] = lambda message: (number, message, _NO_BODY, 0)


_add_header_message(Type.CREDIT, protocol.GiveCredit)
_add_header_message(Type.HELLO_CLIENT, protocol.HelloClient)
_add_header_message(Type.HELLO_WORKER, protocol.HelloWorker)
_add_header_message(Type.SUBSCRIBE, protocol.Subscribe)
_add_header_message(Type.WELCOME, protocol.Welcome)
_add_header_message(Type.ERROR, protocol.ErrorMessage)
_add_header_message(Type.BLOB_PUT, protocol.BlobPut)
_add_header_message(Type.BLOB_GET, protocol.BlobGet)
_add_header_message(Type.READ_LOG, protocol.ReadLog)


def encode(message: protocol.Message, codec: str | None = None, *, max_bytes: int | None = None) -> bytes:
    """Return the frame of a message; two frames for a JobsRecorded with both kinds.

    InvalidInput if it holds something that msgpack cannot carry: half a surrogate pair, an integer of more than 64 bits.
    TooLarge if it has more than `max_bytes`, counted before compression, as the peer counts.
    """
    try:
        if type(message) is protocol.JobsRecorded:
            return _encode_recorded(message)
        kind, header, payload, flags = _WRITERS[type(message)](message)
        if max_bytes is not None and len(payload) + HEADER_MAX_BYTES > max_bytes:
            raise TooLarge(
                f"a {type(message).__name__} of {len(payload)} bytes cannot be sent, the limit is {max_bytes}; "
                "send or ask for less at once"
            )
        if codec is not None and payload:
            payload, compressed = compress(payload, codec)
            flags |= compressed
        return encode_frame(kind, _encode(header), payload, flags)
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
        raise InvalidInput(f"a {type(message).__name__} cannot be sent: {error}") from None


def _encode_recorded(message: protocol.JobsRecorded) -> bytes:
    frames = b""
    if message.recorded:
        frames += encode_frame(Type.ACK_JOB, _encode(_AckHeader("recorded")), *_batch(message.recorded))
    if message.fenced:
        frames += encode_frame(Type.ACK_JOB, _encode(_AckHeader("fenced")), *_batch(message.fenced))
    return frames
