"""Peers that send what is not the protocol: each hears why and is cut off, memory stays where it was, others are served."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tasuki.core.protocol import FRAME_MAX_BYTES, UNAUTHENTICATED_FRAME_MAX_BYTES, ErrorMessage, HelloClient, Welcome
from tasuki.wire.compression import GZIP, ZSTD
from tasuki.wire.messages import BATCH, Type, encode
from tests.doors.raw import RawPeer, bomb, frame
from tests.support.processes import ServerProcess, rss_bytes

pytestmark = pytest.mark.e2e
MIB = 1 << 20
Served = Callable[[], None]


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def nested(depth: int) -> bytes:
    """msgpack: `depth` arrays of one element inside each other."""
    return b"\x91" * depth + b"\xc0"


# ---------------------------------------------------------------------------------------------------- length bombs


def test_length_bomb_before_hello_is_refused_with_a_code_and_takes_no_memory(
    server: ServerProcess, others_are_served: Served
) -> None:
    # Given a peer that nobody knows
    before = rss_bytes(server.pid)
    with RawPeer(server.url) as peer:
        # When it announces 4 GiB
        peer.send_bytes(bomb(Type.HELLO_CLIENT))
        # Then it hears of the limit for strangers and is cut off, and nothing was allocated
        others_are_served()
        error = peer.farewell()
        assert error.code == "TOO_LARGE"
        assert str(UNAUTHENTICATED_FRAME_MAX_BYTES) in error.message
    assert rss_bytes(server.pid) - before < 8 * MIB


def test_a_peer_that_is_still_writing_reads_the_reason_why_it_is_hung_up_on(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        # Given a client whose frame is larger than the buffers of both sockets
        peer.as_client(server.token)
        # When it sends all of it
        peer.send_bytes(frame(Type.REQUEST, payload=bytes(2 * FRAME_MAX_BYTES)))
        # Then it can read what was wrong
        assert peer.farewell().code == "TOO_LARGE"


@pytest.mark.parametrize(
    ("first", "hint"),
    [(b"GET /health HTTP/1.1\r\n", "looks like HTTP"), (b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03", "looks like TLS")],
)
def test_a_peer_that_speaks_another_protocol_is_told_so(server: ServerProcess, first: bytes, hint: str) -> None:
    with RawPeer(server.url) as peer:
        assert hint in peer.send_bytes(first).farewell().message


def test_stranger_may_not_send_a_frame_that_is_only_allowed_after_hello(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        peer.send_bytes(frame(Type.HELLO_CLIENT, payload=bytes(UNAUTHENTICATED_FRAME_MAX_BYTES + 1)))
        assert peer.farewell().code == "TOO_LARGE"


def test_length_bomb_after_hello_is_refused_with_a_code_and_takes_no_memory(
    server: ServerProcess, others_are_served: Served
) -> None:
    before = rss_bytes(server.pid)
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send_bytes(bomb(announced_bytes=FRAME_MAX_BYTES + 1))
        others_are_served()
        error = peer.farewell()
        assert error.code == "TOO_LARGE"
        assert str(FRAME_MAX_BYTES) in error.message
    assert rss_bytes(server.pid) - before < 8 * MIB


@pytest.mark.parametrize("count", [50])
def test_many_announced_but_unsent_frames_take_no_memory(server: ServerProcess, others_are_served: Served, count: int) -> None:
    # Given authenticated peers that each announce the largest frame that is allowed, and send only its start
    before = rss_bytes(server.pid)
    peers = [RawPeer(server.url).as_client(server.token) for _ in range(count)]
    for peer in peers:
        peer.send_bytes(bomb(announced_bytes=FRAME_MAX_BYTES))
    # Then memory is used for what came, not for what was announced
    others_are_served()
    assert rss_bytes(server.pid) - before < 32 * MIB
    for peer in peers:
        peer.socket.close()


@pytest.mark.parametrize("flag", [ZSTD, GZIP])
def test_compressed_payload_that_grows_past_the_limit_is_refused(
    server: ServerProcess, others_are_served: Served, flag: int
) -> None:
    import gzip

    import zstandard

    zeros = bytes(150 * MIB)
    squeezed = zstandard.ZstdCompressor().compress(zeros) if flag == ZSTD else gzip.compress(zeros, 1)
    del zeros
    assert len(squeezed) < FRAME_MAX_BYTES
    before = rss_bytes(server.pid)
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        peer.send_bytes(frame(Type.REQUEST, packed({"msg_id": 5, "verb": "get"}), squeezed, flag))
        others_are_served()
        refused = peer.answer(5)
        assert isinstance(refused, ErrorMessage)
        assert refused.code == "TOO_LARGE"
    assert rss_bytes(server.pid) - before < 48 * MIB


# ---------------------------------------------------------------------------------------------------- not the protocol


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "TOO_LARGE"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), "TOO_LARGE"),
        (b"\x00\x00\x00\x00" + bytes(60), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, b"\xc1\xc1\xc1"), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed({"msg_id": "one", "client_id": 3})), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed([1, 2, 3])), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed({"msg_id": 1, "client_id": "x"}), flags=0x80), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed({"msg_id": 1, "client_id": "x"}), b"junk" * 400, flags=ZSTD), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed({"msg_id": 1, "client_id": "x"}), b"junk" * 400, flags=GZIP), "PROTOCOL"),
        (frame(Type.HELLO_CLIENT, packed({"msg_id": 1, "client_id": "x"}), b"j" * 9, flags=GZIP | ZSTD), "PROTOCOL"),
        (frame(Type.REQUEST, packed({"msg_id": 1, "verb": "counts"})), "PROTOCOL"),
        (frame(Type.CHUNK, packed({"corr_id": 1, "offset": 0}), b"x"), "PROTOCOL"),
        (
            frame(Type.WELCOME, packed({"corr_id": 1, "version": 1, "server_id": "s", "identity": "i", "kind": "a"})),
            "PROTOCOL",
        ),
        (frame(8), "UNKNOWN_FRAME"),
        (frame(250), "UNKNOWN_FRAME"),
        (encode(HelloClient(msg_id=1, client_id="x", version=9, oldest=7)), "VERSION"),
        (encode(HelloClient(msg_id=1, client_id="x", version=0, oldest=0)), "VERSION"),
    ],
    ids=[
        "http", "tls", "zeros", "not-msgpack", "wrong-types", "not-a-map", "unknown-flag", "bad-zstd", "bad-gzip",
        "two-codecs", "request-first", "chunk-first", "welcome-first", "type-8", "type-250", "too-new",
        "too-old",
    ],
)  # fmt: skip
def test_stranger_that_does_not_speak_the_protocol_hears_why(
    server: ServerProcess, others_are_served: Served, data: bytes, code: str
) -> None:
    with RawPeer(server.url) as peer:
        peer.send_bytes(data)
        error = peer.farewell()
    assert error.code == code
    assert error.message
    others_are_served()


def test_random_bytes_never_stop_the_server(server: ServerProcess, others_are_served: Served) -> None:
    import random

    generator = random.Random(20)
    for _ in range(60):
        with RawPeer(server.url) as peer:
            length = generator.randrange(8, 2000)
            peer.send_bytes((length - 4).to_bytes(4, "little") + generator.randbytes(length - 4))
            assert peer.farewell().code in {"PROTOCOL", "UNKNOWN_FRAME", "TOO_LARGE"}
    others_are_served()


# Without HEARTBEAT: an empty one is a whole one.
EMPTY = [kind for kind in Type if kind is not Type.HEARTBEAT]


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_frame_of_every_type_after_hello_is_refused(server: ServerProcess, kind: Type) -> None:
    # Given a client that was taken
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        # When it sends a frame without anything in it
        peer.send_bytes(frame(kind))
        # Then it is told what is wrong
        message = peer.receive()
        assert isinstance(message, ErrorMessage), message
        assert message.code in {"PROTOCOL", "INVALID"}


@pytest.mark.parametrize("where", ["params", "header", "batch"])
def test_deep_nesting_is_bad_input_not_a_crash(server: ServerProcess, others_are_served: Served, where: str) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        deep = nested(200_000)
        if where == "params":
            peer.send_bytes(frame(Type.REQUEST, packed({"msg_id": 2, "verb": "get"}), b"\x81\xa1x" + deep))
        elif where == "header":
            peer.send_bytes(frame(Type.REQUEST, nested(60_000)))
        else:
            peer.send_bytes(frame(Type.SUBMIT_JOB, packed({"msg_id": 2}), deep, BATCH))
        if where != "header":  # a request whose number can be read is refused by itself
            refused = peer.answer(2)
            assert isinstance(refused, ErrorMessage)
            assert refused.code == "INVALID"
        else:
            assert peer.farewell().code == "PROTOCOL"
    others_are_served()


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("requeue", "reason"),
        ("find", "limit"),
        ("find", "subject"),
        ("get", "job_ids"),
        ("explain", "job_id"),
        ("watch", "job_ids"),
    ],
)
def test_nesting_that_just_decodes_is_answered_with_an_error_too(
    server: ServerProcess, others_are_served: Served, verb: str, name: str
) -> None:
    # Given values nested so deep that they decode, but that not everything can walk through them
    for depth in (100, 400, 700, 900, 950, 980):
        with RawPeer(server.url) as peer:
            peer.as_client(server.token)
            params = b"\x82" + packed(name) + nested(depth) + packed("job_ids" if name == "reason" else "x") + packed(["nobody"])
            # When they are used as a parameter
            peer.send_bytes(frame(Type.REQUEST, packed({"msg_id": 77, "verb": verb}), params))
            # Then there is an answer that says so
            message = peer.receive()
            assert isinstance(message, ErrorMessage), message
            assert message.code in {"INVALID", "PROTOCOL", "NOT_FOUND"}
    others_are_served()


def test_frames_after_the_one_that_ended_the_connection_do_nothing(server: ServerProcess, good_client) -> None:
    # Given one write with a fatal frame and a submit after it
    from tasuki.core.job import JobSpec
    from tasuki.core.protocol import SubmitJobs

    submit = encode(SubmitJobs(9, [JobSpec(job_id="after-the-end", subject="noop")]))
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send_bytes(frame(Type.WELCOME, b"\xc1") + submit)
        assert peer.farewell().code == "PROTOCOL"
    # Then the submit was not taken
    with server.client() as admin:
        found = admin.list_jobs(text="after-the-end")
    assert len(found) == 0


def test_second_hello_is_refused(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        hello = encode(HelloClient(msg_id=1, client_id="twice", token=server.token))
        peer.send_bytes(hello + hello)
        first = peer.receive()
        if isinstance(first, Welcome):
            assert peer.farewell().code == "PROTOCOL"
        else:
            assert isinstance(first, ErrorMessage)
            assert first.code == "PROTOCOL"


def test_one_frame_byte_by_byte_is_understood(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        for byte in encode(HelloClient(msg_id=4, client_id="slow-speaker", token=server.token)):
            peer.send_bytes(bytes([byte]))
        welcome = peer.receive()
    assert isinstance(welcome, Welcome)
    assert welcome.corr_id == 4
