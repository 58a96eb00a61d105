"""Messages survive the wire, and what is not a message is refused with an error of ours, whatever it is."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import JobSpec
from tasuki.core.protocol import (
    CODECS,
    FRAME_MAX_BYTES,
    SUBMIT_MAX_BYTES,
    ErrorMessage,
    JobsRecorded,
    Request,
    SubmitJobs,
)
from tasuki.errors import InvalidInput, ProtocolError, RefusedRequest, TasukiError, UnknownFrame
from tasuki.wire.compression import GZIP
from tasuki.wire.messages import BATCH, HEADER_MAX_BYTES, KNOWN_FLAGS, Frame, FrameDecoder, Type, decode, encode
from tests.wire.strategies import message, messages
from tests.wire.vectors import MESSAGE_TYPES, VECTORS, decode_all

LIMIT = 64 * 1024
TYPES = [vector["frame_type"] for vector in VECTORS["messages"]]
pack = msgspec.msgpack.encode


def read(type: int, header: Any, payload: bytes = b"", flags: int = 0) -> Any:
    """The message in a frame whose header is given as bytes or as what they stand for."""
    return decode(Frame(type, flags, header if isinstance(header, bytes) else pack(header), payload), LIMIT)


# --- there and back


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@given(data=st.data(), codec=st.sampled_from([None, *CODECS]))
def test_every_message_comes_back_as_it_was(kind: type[msgspec.Struct], data: st.DataObject, codec: str | None) -> None:
    sent = data.draw(message(kind))

    assert decode_all(encode(sent, codec)) == [sent]


@given(st.lists(messages, max_size=5), st.data())
def test_a_stream_of_messages_survives_random_cuts(sent: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder(LIMIT)

    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert [decode(frame, LIMIT) for piece in pieces for frame in decoder.feed(piece)] == sent


@pytest.mark.parametrize("codec", CODECS)
def test_a_large_message_is_compressed_and_comes_back(codec: str) -> None:
    sent = SubmitJobs(1, [JobSpec(job_id=f"job-{number}", subject="math.square") for number in range(1000)])

    assert len(encode(sent, codec)) < len(encode(sent)) / 2
    assert decode_all(encode(sent, codec)) == [sent]


def test_recorded_and_fenced_together_are_two_frames() -> None:
    assert decode_all(encode(JobsRecorded(["a", "b"], [("c", "too late")]))) == [
        JobsRecorded(["a", "b"], []),
        JobsRecorded([], [("c", "too late")]),
    ]


def test_nothing_recorded_is_no_frame() -> None:
    assert encode(JobsRecorded([], [])) == b""


# --- what cannot be sent


@pytest.mark.parametrize("params", [{"text": "\udc80"}, {"number": 2**64}, {"thing": object()}])
def test_what_msgpack_cannot_carry_is_the_callers_error(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="a Request cannot be sent"):
        encode(Request(1, "get", params))


# --- what a newer peer may send


def test_an_unknown_type_is_named_with_its_number() -> None:
    for type in sorted(set(range(256)) - set(TYPES)):
        with pytest.raises(UnknownFrame, match=rf"frame type {type} is not known here; .* SUBMIT_JOB=1, "):
            read(type, {})


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_an_unknown_header_field_is_ignored(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))
    header = msgspec.msgpack.decode(frame.header)
    newer = frame._replace(header=pack({"from_the_future": [1, {"deep": None}]} | header))

    assert decode(newer, LIMIT) == decode(frame, LIMIT)


# --- what is not a message


@pytest.mark.parametrize(
    ("type", "header"),
    [
        (Type.HELLO_CLIENT, {"msg_id": 1}),
        (Type.HELLO_CLIENT, {"client_id": "c"}),
        (Type.HELLO_WORKER, {"msg_id": 1, "worker_id": "w"}),
        (Type.WELCOME, {"corr_id": 1, "version": 1}),
        (Type.SUBMIT_JOB, {}),
        (Type.ACK_JOB, {}),
        (Type.ASSIGN_JOB, {}),
        (Type.CREDIT, {}),
        (Type.SUBSCRIBE, {"msg_id": 1}),
        (Type.REQUEST, {"msg_id": 1}),
        (Type.ERROR, {"corr_id": 1, "code": "X"}),
        (Type.CHUNK, {"corr_id": 1}),
        (Type.BLOB_PUT, {"msg_id": 1, "sha256": "ab"}),
        (Type.BLOB_GET, {"msg_id": 1, "sha256": "ab"}),
    ],
    ids=str,
)
def test_a_missing_field_is_named(type: Type, header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=f"a {type.name} frame cannot be read: .*missing required field"):
        read(type, header)


@pytest.mark.parametrize(
    ("type", "header", "field"),
    [
        (Type.HELLO_CLIENT, {"msg_id": "1", "client_id": "c"}, "msg_id"),
        (Type.HELLO_CLIENT, {"msg_id": 1, "client_id": b"c"}, "client_id"),
        (Type.HELLO_CLIENT, {"msg_id": 1, "client_id": "c", "codecs": "zstd"}, "codecs"),
        (Type.HELLO_CLIENT, {"msg_id": 1.5, "client_id": "c"}, "msg_id"),
        (Type.CREDIT, {"credit": None}, "credit"),
        (Type.ASSIGN_JOB, {"ttl_s": "15"}, "ttl_s"),
        (Type.HEARTBEAT, {"msg_id": [1]}, "msg_id"),
        (Type.SUBMIT_JOB, {"msg_id": 1, "watch": 1}, "watch"),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_named(type: Type, header: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
        read(type, header)


@pytest.mark.parametrize(
    "item",
    [{}, {"job_id": 7}, {"job_id": "a", "payload": "text"}, {"job_id": "a", "args": [1]}, {"job_id": "a", "env": {"A": 1}}],
    ids=str,
)
def test_an_item_that_is_no_job_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="a SUBMIT_JOB frame cannot be read"):
        read(Type.SUBMIT_JOB, {"msg_id": 1}, pack([item]), BATCH)


@pytest.mark.parametrize("depth", [5_000, 60_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_deep_nesting_is_refused(depth: int, opening: bytes) -> None:
    nested = opening * (depth // len(opening)) + b"\xc0"

    with pytest.raises(ProtocolError, match="recursion"):
        read(Type.REPLY, {"corr_id": 1}, nested)
    with pytest.raises(InvalidInput, match=r"recursion|the parameters cannot be read"):
        read(Type.REQUEST, {"msg_id": 1, "verb": "get"}, b"\x81\xa1a" + nested)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (Frame(Type.SUBMIT_JOB, BATCH, pack({"msg_id": 7}), pack([{"job_id": 5}])), "INVALID"),
        (Frame(Type.SUBMIT_JOB, BATCH, pack({"msg_id": 7}), b"\xc1"), "INVALID"),
        (Frame(Type.SUBMIT_JOB, BATCH, pack({"msg_id": 7, "watch": "yes"}), pack([])), "INVALID"),
        (Frame(Type.SUBMIT_JOB, BATCH, pack({"msg_id": 7}), bytes(SUBMIT_MAX_BYTES + 1)), "TOO_LARGE"),
        (Frame(Type.SUBMIT_JOB, BATCH | GZIP, pack({"msg_id": 7}), b"no gzip"), "INVALID"),
        (Frame(Type.CANCEL, BATCH, pack({"msg_id": 7}), pack([5])), "INVALID"),
        (Frame(Type.REQUEST, 0, pack({"msg_id": 7, "verb": "get"}), pack({"job_ids": [5]})), "INVALID"),
        (Frame(Type.REQUEST, 0, pack({"msg_id": 7}), b""), "INVALID"),
        (Frame(Type.BLOB_GET, 0, pack({"msg_id": 7, "sha256": 5}), b""), "INVALID"),
    ],
    ids=lambda value: value if isinstance(value, str) else Type(value.type).name,
)
def test_a_request_that_cannot_be_read_is_refused_by_its_number(frame: Frame, code: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        decode(frame, FRAME_MAX_BYTES, from_server=False)
    assert (refused.value.msg_id, refused.value.code) == (7, code)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Type.SUBMIT_JOB, BATCH, b"\xc1", pack([{"job_id": "a"}])),
        Frame(Type.SUBMIT_JOB, BATCH, pack({"msg_id": "seven"}), pack([{"job_id": "a"}])),
        Frame(Type.HELLO_CLIENT, 0, pack({"msg_id": 7}), b""),
        Frame(Type.ACK_JOB, BATCH, pack({"stage": "finished"}), pack([5])),
    ],
    ids=["no map", "no number", "Hello", "no request"],
)
def test_what_nobody_can_be_answered_is_an_error_of_the_connection(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        decode(frame, LIMIT, from_server=False)


def test_deep_nesting_in_a_field_nobody_reads_is_refused() -> None:
    nested = b"\x82\xa6msg_id\x01\xa1x" + b"\x91" * 60_000 + b"\xc0"

    with pytest.raises(ProtocolError, match="recursion"):
        read(Type.HEARTBEAT, nested)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError, match="utf-8"):
        read(Type.HELLO_CLIENT, b"\x82\xa6msg_id\x01\xa9client_id\xa2\xff\xfe")


# The header of RESULT carries nothing, so nobody reads it.
@pytest.mark.parametrize(
    "vector", [vector for vector in VECTORS["messages"] if vector["type"] != "Results"], ids=lambda vector: vector["name"]
)
def test_a_cut_off_header_is_refused(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    with pytest.raises(ProtocolError):
        decode(frame._replace(header=frame.header[:-1]), LIMIT)


@pytest.mark.parametrize(
    "vector", [vector for vector in VECTORS["messages"] if vector["flags"] & BATCH], ids=lambda vector: vector["name"]
)
def test_a_cut_off_batch_is_refused(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    with pytest.raises(ProtocolError, match="truncated"):
        decode(frame._replace(payload=frame.payload[:-1]), LIMIT)


def test_an_error_about_a_long_value_still_fits_an_error_frame() -> None:
    hello = {"msg_id": 1, "worker_id": "w", "incarnation": "i", "on_disconnect": "x" * (HEADER_MAX_BYTES - 100)}

    with pytest.raises(ProtocolError) as refused:
        read(Type.HELLO_WORKER, hello)

    answer = ErrorMessage(0, refused.value.code, refused.value.message)
    assert decode_all(encode(answer)) == [answer]


# --- fuzz

keys = st.sampled_from(["msg_id", "corr_id", "stage", "credit", "ttl_s", "verb", "client_id", "patterns", "code", "offset"])
leaves = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=8) | st.floats() | st.booleans()
things = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(max_size=5), inner, max_size=4)
)
packed = st.binary(max_size=60) | things.map(pack)
known_types = st.sampled_from(sorted({*TYPES}))


def decode_or_our_error(frame: Frame) -> None:
    try:
        found = decode(frame, LIMIT)
    except TasukiError:
        return
    assert isinstance(found, MESSAGE_TYPES)


@given(known_types | st.integers(0, 255), st.integers(0, KNOWN_FLAGS), packed | st.dictionaries(keys, leaves).map(pack), packed)
def test_a_random_frame_is_a_message_or_an_error_of_ours(type: int, flags: int, header: bytes, payload: bytes) -> None:
    decode_or_our_error(Frame(type, flags, header, payload))


@given(
    st.sampled_from([vector["hex"] for section in ("messages", "accepted") for vector in VECTORS[section]]),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_changed_frame_is_a_message_or_an_error_of_ours(hex: str, changes: list[tuple[int, int]]) -> None:
    data = bytearray.fromhex(hex)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        frames = FrameDecoder(LIMIT).feed(bytes(data))
    except TasukiError:
        return
    for frame in frames:
        decode_or_our_error(frame)
