"""A small frame never becomes much memory: items, parameters and meta are bounded before objects are made of them."""

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
import zstandard

from tasuki.core.protocol import (
    BATCH_MAX,
    FRAME_MAX_BYTES,
    META_MAX_BYTES,
    PARAMS_MAX,
    Claim,
    Heartbeat,
    HelloWorker,
    JobsFinished,
    Message,
    Request,
)
from tasuki.errors import ProtocolError, RefusedRequest, TasukiError, TooLarge
from tasuki.wire.compression import ZSTD
from tasuki.wire.messages import BATCH, Frame, Type, decode, encode

PEAK_MAX_BYTES = 10 * 1024 * 1024
pack = msgspec.msgpack.encode
EMPTY_MAPS = b"\xdd" + struct.pack(">I", 5_000_000) + b"\x80" * 5_000_000


def to_server(type: int, header: Any, payload: bytes, flags: int = 0) -> Message:
    """Decode a frame as a server does; its payload comes compressed."""
    packed = zstandard.ZstdCompressor().compress(payload)
    return decode(Frame(type, flags | ZSTD, pack(header), packed), FRAME_MAX_BYTES, from_server=False)


def peak_of(type: int, header: Any, payload: bytes, flags: int = 0) -> int:
    """Return how much memory it takes to decode the frame, beside its payload; a refusal costs memory too."""
    tracemalloc.start()
    try:
        to_server(type, header, payload, flags)
    except TasukiError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak - 2 * len(payload)  # the payload, and what decompression needs to make it


ENDING = {"job_id": "j", "lease_id": "l", "attempt": 1}
HOSTILE = {
    "parameters of a request": (Type.REQUEST, {"msg_id": 1, "verb": "get"}, b"\x81\xa1x" + EMPTY_MAPS, 0),
    "claims of a heartbeat": (Type.HEARTBEAT, {"msg_id": 1}, b"\xdd" + struct.pack(">I", 5_000_000) + b"\x90" * 5_000_000, BATCH),
    "meta of an ending": (
        Type.ACK_JOB,
        {"stage": "finished"},
        b"\x91\x84" + pack(ENDING)[1:] + b"\xa7outcome\x81\xa4meta\x81\xa1x" + EMPTY_MAPS,
        BATCH,
    ),
    "meta of many endings": (
        Type.ACK_JOB,
        {"stage": "finished"},
        pack([{**ENDING, "outcome": {"meta": {"x": [{}] * 7000}}}] * 900),
        BATCH,
    ),
    "meta of as many endings as may be": (
        Type.ACK_JOB,
        {"stage": "finished"},
        pack([{**ENDING, "outcome": {"meta": {"x": [{}] * 10_000}}}] * 100),
        BATCH,
    ),
    "job_ids of a cancel": (Type.CANCEL, {"msg_id": 1}, pack(["x"] * 2_000_000), BATCH),
    "body of a reply": (Type.REPLY, {"corr_id": 1}, EMPTY_MAPS, 0),
    "jobs of a submit": (Type.SUBMIT_JOB, {"msg_id": 1}, pack([{"job_id": ""}] * 700_000), BATCH),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_few_bytes_do_not_become_hundreds_of_megabytes(name: str) -> None:
    assert peak_of(*HOSTILE[name]) < PEAK_MAX_BYTES


def test_a_frame_has_at_most_1024_items() -> None:
    many = [Claim(f"j{number}", "l", 1) for number in range(BATCH_MAX)]
    assert to_server(Type.HEARTBEAT, {"msg_id": 1}, pack(many), BATCH) == Heartbeat(1, many)
    with pytest.raises(RefusedRequest, match=str(BATCH_MAX)):
        to_server(Type.HEARTBEAT, {"msg_id": 1}, pack([*many, many[0]]), BATCH)


@pytest.mark.parametrize("params", [{"x": {}}, {"x": [[]]}, {"x": [1]}, {"x": b"1"}, {str(n): n for n in range(PARAMS_MAX + 1)}])
def test_parameters_of_a_request_are_flat_and_few(params: dict[str, Any]) -> None:
    with pytest.raises(RefusedRequest) as refused:  # it has an answer, and the connection goes on
        to_server(Type.REQUEST, {"msg_id": 7, "verb": "get"}, pack(params))
    assert refused.value.msg_id == 7


def test_a_request_with_the_most_jobs_that_a_watch_may_have_fits() -> None:
    job_ids = ["j" * 128] * BATCH_MAX
    message = to_server(Type.REQUEST, {"msg_id": 1, "verb": "watch"}, pack({"job_ids": job_ids}))
    assert message == Request(1, "watch", {"job_ids": job_ids})
    with pytest.raises(RefusedRequest) as refused:
        to_server(Type.REQUEST, {"msg_id": 1, "verb": "watch"}, pack({"x": "y" * 300_000}))
    assert refused.value.code == TooLarge.code


@pytest.mark.parametrize("type", [Type.REPLY, Type.WELCOME, Type.RESULT, Type.ASSIGN_JOB])
def test_a_server_does_not_decode_what_only_servers_send(type: Type) -> None:
    with pytest.raises(ProtocolError, match="the server's to send"):
        to_server(type, {}, b"\x90")


@pytest.mark.parametrize(
    "meta",
    [
        {"x": msgspec.msgpack.Ext(5, b"hi")},
        {"x": {None: 1}},
        {"x": {1: 1}},
        {"x": ["y" * META_MAX_BYTES]},
        {"x": [{}] * 2000},
        {"x": msgspec.Raw(b"\x91" * 200 + b"\xc0")},
        {1: 2},
        [],
    ],
    ids=["extension", "nil key", "number key", "long", "many", "deep", "number key outside", "no map"],
)
def test_a_meta_that_no_reader_could_show_fails_its_own_attempt(meta: Any) -> None:
    good = {**ENDING, "job_id": "good", "outcome": {"meta": {"duration_s": 1.5, "tags": ["a", {"b": None}]}}}
    frame = pack([{**ENDING, "outcome": {"meta": meta, "exit_code": 0}}, good])
    message = to_server(Type.ACK_JOB, {"stage": "finished"}, frame, BATCH)
    assert isinstance(message, JobsFinished)
    bad, fine = message.endings
    assert (bad.outcome.error_code, bad.outcome.permanent, bad.outcome.meta) == ("BAD_OUTCOME", True, {})
    assert fine.outcome.meta == good["outcome"]["meta"]  # type: ignore[index]


@pytest.mark.parametrize("msg_id", [0, -1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("type", [Type.REQUEST, Type.SUBMIT_JOB, Type.SUBSCRIBE, Type.BLOB_PUT])
def test_a_msg_id_is_a_number_from_1_to_63_bits(type: Type, msg_id: int) -> None:
    header = {"msg_id": msg_id, "verb": "get", "patterns": [], "sha256": "", "size_bytes": 1}
    with pytest.raises(ProtocolError):
        to_server(type, header, b"")


@pytest.mark.parametrize("field", ["reconnect_grace_s", "ttl_s"])
@pytest.mark.parametrize("value", [-5.0, float("nan"), float("inf"), 1e300])
def test_seconds_of_a_hello_are_a_sane_number(field: str, value: float) -> None:
    hello = HelloWorker(msg_id=1, worker_id="w", incarnation="i", **{field: value})  # type: ignore[arg-type]
    frame = encode(hello)
    with pytest.raises(ProtocolError):
        decode(Frame(Type.HELLO_WORKER, 0, frame[8:], b""), FRAME_MAX_BYTES, from_server=False)
