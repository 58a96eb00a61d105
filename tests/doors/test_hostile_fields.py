"""Every field of every message that a client or a worker may send, with hostile values: the server lives, small and quick."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, get_args

import msgspec
import pytest
import zstandard

from tasuki import Client
from tasuki.core.job import BlobRef, InputFile, JobSpec, Outcome, Progress
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    Accepted,
    AssignJobs,
    BlobGet,
    BlobPut,
    CacheAck,
    CachePut,
    CacheStatus,
    CancelJobs,
    CancelLeases,
    Chunk,
    Claim,
    DeliverMessages,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    LogPiece,
    Message,
    OnDisconnect,
    PublishedMessage,
    PublishMessages,
    ReadLog,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Subscribe,
    Takes,
    Welcome,
    WorkerCache,
)
from tasuki.core.store_messages import CacheEntry
from tasuki.wire.compression import ZSTD
from tasuki.wire.messages import BATCH, FrameDecoder, encode, encode_frame
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess

AT_ONCE = 32  # connections: the answers of the server come together
FROM_SERVER = (Welcome, Accepted, Results, Reply, ErrorMessage, AssignJobs, JobsRecorded, CancelLeases, HeartbeatAnswer, ReadLog)
FROM_SERVER += (DeliverMessages,)
LAST = 9_000_000  # msg_id of the last message on a connection
GROWTH_MAX_BYTES = 200 * 1024 * 1024
OTHERS_WAIT_MAX_S = 3.0

CLAIM = Claim("no-such-job", "no-such-lease", 1)
FILES = (InputFile("a", data=b"1"), InputFile("b", sha256="0" * 64, size_bytes=1), InputFile("c", cache_id="c"))
CACHED = InputFile("d", cache=("c", "e"))
SPEC = JobSpec(
    job_id="hostile",
    subject="a.b",
    exec="x",
    args=("y",),
    env={"A": "b"},
    payload=b"p",
    route_key="k",
    files=(*FILES, CACHED),
    cwd="/",
    timeout_s=1.0,
    max_retries=1,
    max_losses=1,
    backoff_s=1.0,
    priority=1,
    not_before=1.0,
    not_after=2.0,
    permanent_exit_codes=(1,),
    retry_exit_codes=(2,),
    headers={"h": "i"},
    array_id="a",
    delay_first_loss=True,
    mac=b"m",
)
OUTCOME = Outcome(
    exit_code=1,
    error_code="X",
    message="m",
    result=b"r",
    result_ref=BlobRef("0" * 64, 1),
    result_sha256="0" * 64,
    meta={"k": 1},
    permanent=True,
    retry_in_s=1.0,
)
TOKEN = {"token_id": "made", "kind": "client", "sha256": "0" * 64, "scope": ["a.>"], "label": "l", "expires_at": 1.0}
MESSAGES: dict[str, list[Message]] = {
    "client": [
        SubmitJobs(5, [SPEC], watch=False, on_failed="rerun"),
        CancelJobs(5, ["no-such-job"], "why"),
        Request(5, "get", {"job_ids": ["x"], "result": True}),
        Request(5, "find", {"limit": 5, "text": "x", "states": ["PENDING"], "cursor": "1"}),
        Request(5, "logs", {"job_id": "x", "offset": 1, "wait_s": 0.0}),
        Heartbeat(5),
        PublishMessages(5, [PublishedMessage("a.b", b"p", "a.reply", {"h": "i"})], confirm=True),
        Request(5, "subscribe", {"pattern": "a.>", "queue": "q"}),
        Request(5, "unsubscribe", {"pattern": "a.>", "queue": "q"}),
        BlobPut(5, "0" * 64, 5, resume=True, direct=True),
        BlobGet(5, "0" * 64, "x", 1),
        Chunk(5, 0, b"x", last=True),
        Request(5, "explain", {"job_id": "x"}),
        Request(5, "watch", {"job_ids": ["x"]}),
        Request(5, "requeue", {"job_ids": ["x"], "reason": "why"}),
        CachePut(5, "c", "a.>", [CacheEntry("a", "0" * 64, 1)], 0.01),
        Request(5, "cache.list", {"after": "a", "limit": 5}),
        Request(5, "cache.show", {"cache_id": "c", "after": "a", "limit": 5}),
        Request(5, "cache.remove", {"cache_id": "c", "target": "a.>"}),
    ],
    "admin": [
        Request(5, "token.create", TOKEN),
        Request(5, "token.revoke", {"token_id": "x"}),
        Request(5, "token.audit", {"limit": 5}),
        Request(5, "worker.revoke", {"worker_id": "x", "subject": "a.b"}),
        Request(5, "counts", {"limit": 5}),
        Request(5, "detach", {"worker_id": "x", "now": True, "reason": "why"}),
        Request(5, "attach", {"worker_id": "x", "reason": "why"}),
        Request(5, "pause", {"pattern": "never.used", "reason": "why"}),
        Request(5, "resume", {"pattern": "never.used", "reason": "why"}),
    ],
    "worker": [
        JobsFinished([Ending("no-such-job", "no-such-lease", 1, OUTCOME, 1.0)]),
        JobsStarted([CLAIM]),
        JobsReleased([CLAIM], "why"),
        Heartbeat(5, [CLAIM], {CLAIM.lease_id: Progress(0.5, "half")}, cpu=0.5, held=b"held"),
        GiveCredit(1),
        Subscribe(5, ("never.used",)),
        Request(5, "worker.rotate", {"token_id": "x", "sha256": "0" * 64}),
        BlobPut(5, "0" * 64, 5),
        BlobGet(5, "0" * 64, "x", 1),
        Chunk(5, 0, b"x", last=True),
        LogPiece(5, 0, b"x", 1, 1, cut_bytes=1, ended=True),
        PublishMessages(5, [PublishedMessage("a.b", b"p")], confirm=True),
        CacheAck(5, "c", [WorkerCache("w", CacheStatus.OK, "m", 1)], ("tcp://a:1",)),
    ],
}
COMMON: dict[str, Any] = {"msg_id": 5, "version": 2, "oldest": 2, "codecs": ("zstd",), "agent": "x"}
WORKER = {"incarnation": "i", "patterns": ("never.used",), "on_disconnect": OnDisconnect.KEEP, "reconnect_grace_s": 1.0}
WORKER |= {"ttl_s": 5.0, "resumed": True, "host": "h", "slots": 2, "takes": Takes.HANDLERS, "execs": ("x",), "caches": True}


def hello(role: str, token: str, name: str, **fields: Any) -> Message:
    if role != "worker":
        return HelloClient(client_id=name, token=token, **COMMON)
    return HelloWorker(worker_id=name, token=token, **{**COMMON, **WORKER, **fields})


pack = msgspec.msgpack.encode
SMALL = [
    *(
        pack(value)
        for value in (None, True, -1, 0, 2**63, 2**64 - 1, float("nan"), float("inf"), -1e300, "", "\0", "x" * 50_000, [], {})
    ),
    *(pack(value) for value in (b"bytes", [[]], {"": {}}, {1: 2}, [None] * 2000, msgspec.msgpack.Ext(5, b"x"))),
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xa3\xed\xa0\x80",  # half a surrogate pair
    b"\x91" * 5000 + b"\xc0",
    b"\xdf\xff\xff\xff\xff",  # announces 4 billion entries
]
BOMB = b"\xdd" + struct.pack(">I", 1_500_000) + b"\x80" * 1_500_000


def _variants(value: Any, hostile: list[bytes]) -> Iterator[Any]:
    """Yield the value with each field in it, at any depth, replaced by each hostile value."""
    yield from map(msgspec.Raw, hostile)
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        for other in _variants(part, hostile):
            changed: Any = dict(value) if isinstance(value, dict) else list(value)
            changed[key] = other
            yield changed


def hostile_frames(message: Message) -> Iterator[bytes]:
    [frame] = FrameDecoder(FRAME_MAX_BYTES).feed(encode(message))
    for header in _variants(msgspec.msgpack.decode(frame.header), SMALL):
        packed = pack(header)
        if len(packed) < 0xFFFF:
            yield encode_frame(frame.type, packed, frame.payload, frame.flags)
    if isinstance(message, Chunk | LogPiece) or not frame.payload:
        return
    for payload in _variants(msgspec.msgpack.decode(frame.payload), [*SMALL[::4], BOMB]):
        packed = zstandard.ZstdCompressor(level=1).compress(pack(payload))
        yield encode_frame(frame.type, frame.header, packed, frame.flags & BATCH | ZSTD)


class _Watch(threading.Thread):
    """An honest client and a look at the server's memory, all the time."""

    def __init__(self, server: ServerProcess, client: Client) -> None:
        super().__init__(daemon=True)
        self.server, self.client = server, client
        self.before = self.most = server.rss_bytes()
        self.longest_s = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            began = time.monotonic()
            self.client.submit(subject="math.square", payload=b"12").result(timeout=30.0)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.most = max(self.most, self.server.rss_bytes())


def _attack(server: ServerProcess, role: str, token: str) -> int:
    """Send all hostile frames of the role, each on a connection of its own, and return their number."""
    greetings = (hello(role, token, f"hostile-{number}") for number in itertools.count())
    hostile = [(False, data) for data in hostile_frames(hello(role, token, "hostile", transfers=True))]
    hostile += [(True, data) for message in MESSAGES[role] for data in hostile_frames(message)]
    for start in range(0, len(hostile), AT_ONCE):
        _send(server, hostile[start : start + AT_ONCE], greetings)
    return len(hostile)


def _send(server: ServerProcess, hostile: list[tuple[bool, bytes]], greetings: Iterator[Message]) -> None:
    """Send frames at the same time, those with True after a Hello, and wait until each is answered or hung up on."""
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(server.url)) for _ in hostile]
        greeted = [peer.send(next(greetings)) for peer, (after_hello, _) in zip(peers, hostile, strict=True) if after_hello]
        for peer in greeted:
            assert isinstance(peer.receive(), Welcome)
        for peer, (_, data) in zip(peers, hostile, strict=True):
            with suppress(ConnectionError):
                peer.send_bytes(data + encode(Heartbeat(LAST)))
        for peer in peers:
            with suppress(AssertionError, ConnectionError):  # the server hung up, as it may
                peer.answer(LAST)


def _said_in(value: Any, found: dict[type, set[str]]) -> None:
    """Add the fields that a message says, which are not their defaults, to those of its type, at any depth."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        found.setdefault(type(value), set()).update(one.name for one in fields if getattr(value, one.name) != _default(one))
        value = [getattr(value, one.name) for one in fields]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _said_in(part, found)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def test_every_field_of_every_message_is_tried() -> None:
    found: dict[type, set[str]] = {}
    for role, messages in MESSAGES.items():
        _said_in([hello(role, "token", "name", transfers=True), *messages], found)

    to_server = {kind for kind in get_args(Message) if not issubclass(kind, FROM_SERVER)}
    assert to_server <= found.keys()
    left_out = {kind.__name__: {*kind.__struct_fields__} - names for kind, names in found.items()}
    assert {name: names for name, names in left_out.items() if names} == {}


@pytest.mark.parametrize("role", MESSAGES)
def test_no_value_of_any_field_hurts_the_server_or_others(server: ServerProcess, good_client: Client, role: str) -> None:
    token = server.create_token(role)
    watch = _Watch(server, good_client)
    watch.start()
    try:
        sent = _attack(server, role, token)
    finally:
        watch.over.set()
        watch.join(30.0)
    assert server.running, server.output()
    assert sent > 300
    assert watch.longest_s < OTHERS_WAIT_MAX_S
    assert watch.most - watch.before < GROWTH_MAX_BYTES, f"{watch.before} -> {watch.most}"
    assert "Traceback" not in server.output()
