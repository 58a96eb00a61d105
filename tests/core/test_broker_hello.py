"""The handshake, and who may come in: Hello, tokens, versions, roles; and what ends a connection."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.broker.authentication import IDLE_TIMEOUT_S, PATTERNS_MAX
from tasuki.core.broker.state import MIXED_PATTERNS_MAX
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.machine import Peer
from tasuki.core.protocol import (
    HANDSHAKE_TIMEOUT_S,
    PROTOCOL_VERSION,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HelloClient,
    HelloWorker,
    SubmitJobs,
    Subscribe,
    Welcome,
)
from tasuki.core.store_messages import EXECS_MAX
from tasuki.errors import Forbidden, InvalidInput, ProtocolError, Unauthorized, VersionMismatch
from tests.core.broker_stage import TCP, UNIX, BrokerStage


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def hello_client(**fields: Any) -> HelloClient:
    return HelloClient(**{"msg_id": 7, "client_id": "c1", **fields})


def hello_worker(**fields: Any) -> HelloWorker:
    return HelloWorker(**{"msg_id": 7, "worker_id": "w1", "incarnation": "one", "patterns": ("a.*",), **fields})


def test_a_known_token_is_welcomed_under_its_own_name_after_the_store_was_asked(stage: BrokerStage) -> None:
    conn = stage.open()
    stage.tell(conn, hello_client(token=stage.token("alice", "client")))
    assert conn not in stage.sent
    stage.turns()
    welcome = stage.last(conn, Welcome)
    assert (welcome.corr_id, welcome.identity, welcome.kind) == (7, "token:alice", "client")
    assert (welcome.lease_ttl_s, welcome.lease_margin_s, welcome.idle_timeout_s) == (LEASE_TTL_S, LEASE_MARGIN_S, IDLE_TIMEOUT_S)


def test_the_servers_own_user_needs_no_token_on_the_unix_socket(stage: BrokerStage) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_client())
    assert stage.last(conn, Welcome).identity == f"uid:{UNIX.uid}"


@pytest.mark.parametrize("peer", [TCP, Peer("unix", 1001, "unix socket"), Peer("unix", None, "unix socket")])
def test_nobody_else_comes_in_without_a_token(stage: BrokerStage, peer: Peer) -> None:
    conn = stage.open(peer)
    stage.ask(conn, hello_client())
    assert isinstance(stage.hung_up[conn], Unauthorized)
    assert conn not in stage.sent


def test_an_unknown_token_is_refused_even_on_the_unix_socket(stage: BrokerStage) -> None:
    conn = stage.open(UNIX)
    stage.ask(conn, hello_client(token="guess"))
    assert isinstance(stage.hung_up[conn], Unauthorized)


@pytest.mark.parametrize("fields", [{"revoked_at": 1.0}, {"expires_at": 1.0}, {"kind": "other"}])
def test_a_token_that_is_over_or_for_something_else_is_refused(stage: BrokerStage, fields: dict[str, Any]) -> None:
    conn = stage.open()
    kind = fields.pop("kind", "client")
    stage.ask(conn, hello_client(token=stage.token("t", kind, **fields)))
    assert isinstance(stage.hung_up[conn], Unauthorized)


@pytest.mark.parametrize(("oldest", "version", "fits"), [(1, 1, True), (1, 9, True), (2, 9, True), (3, 9, False), (0, 0, False)])
def test_the_two_sides_need_a_common_version(stage: BrokerStage, oldest: int, version: int, fits: bool) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_client(oldest=oldest, version=version))
    if fits:
        assert stage.last(conn, Welcome).version == min(version, PROTOCOL_VERSION)
    else:
        assert isinstance(stage.hung_up[conn], VersionMismatch)


def test_the_lowest_version_of_a_peer_is_not_above_its_highest(stage: BrokerStage) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_client(oldest=2, version=1))
    assert isinstance(stage.hung_up[conn], ProtocolError)


@pytest.mark.parametrize("first", [SubmitJobs(1, []), GiveCredit(1), Heartbeat(1)])
def test_the_first_frame_must_be_a_hello(stage: BrokerStage, first: Any) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, first)
    assert isinstance(stage.hung_up[conn], ProtocolError)


def test_a_second_hello_before_the_first_was_answered_ends_the_connection(stage: BrokerStage) -> None:
    conn = stage.open()
    stage.tell(conn, hello_client(token=stage.token("alice", "client")))
    stage.tell(conn, hello_client(token="guess"))
    assert isinstance(stage.hung_up[conn], ProtocolError)
    stage.turns()
    assert conn not in stage.sent


def test_a_second_hello_after_the_welcome_ends_the_connection(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.tell(conn, hello_client())
    assert isinstance(stage.hung_up[conn], ProtocolError)


def test_the_first_common_codec_in_our_order_is_chosen(stage: BrokerStage) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_client(codecs=("lz4", "gzip", "zstd")))
    assert stage.last(conn, Welcome).codecs == ("zstd",)


# ---------------------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize(("kind", "fits"), [("worker", False), ("client", True), ("admin", True)])
def test_which_tokens_a_client_may_use(stage: BrokerStage, kind: str, fits: bool) -> None:
    conn = stage.open()
    stage.ask(conn, hello_client(token=stage.token("t", kind)))
    assert (conn not in stage.hung_up) is fits


@pytest.mark.parametrize(("kind", "fits"), [("worker", True), ("client", False), ("admin", False)])
def test_which_tokens_a_worker_may_use(stage: BrokerStage, kind: str, fits: bool) -> None:
    conn = stage.open()
    stage.ask(conn, hello_worker(token=stage.token("t", kind)))
    assert (conn not in stage.hung_up) is fits
    if not fits:
        assert isinstance(stage.hung_up[conn], Forbidden)


@pytest.mark.parametrize(("patterns", "fits"), [(("a.1",), True), (("a.*",), True), (("a.>",), False), ((">",), False)])
def test_a_worker_token_with_a_scope_subscribes_only_inside_it(stage: BrokerStage, patterns: tuple[str, ...], fits: bool) -> None:
    conn = stage.open()
    stage.ask(conn, hello_worker(token=stage.token("t", "worker", "a.*"), patterns=patterns))
    assert (conn not in stage.hung_up) is fits


def test_a_worker_cannot_leave_its_scope_by_subscribing_later(stage: BrokerStage) -> None:
    conn = stage.worker(peer=TCP, token=stage.token("t", "worker", "a.*"), patterns=("a.1",))
    stage.ask(conn, Subscribe(99, ("b.1",)))
    [error] = [message for message in stage.sent[conn] if getattr(message, "corr_id", 0) == 99]
    assert error.code == "FORBIDDEN"  # type: ignore[union-attr]
    assert stage.broker.workers["w1"].patterns == ("a.1",)


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": "has.dot"},
        {"worker_id": ""},
        {"incarnation": "no spaces"},
        {"patterns": ("a..b",)},
        {"patterns": tuple(f"a.{number}" for number in range(PATTERNS_MAX + 1))},
        {"execs": tuple(f"program-{number}" for number in range(EXECS_MAX + 1))},
        {"execs": ("../program",)},
        {"ttl_s": 0.1},
        {"ttl_s": float("nan")},
    ],
)
def test_a_worker_that_can_never_work_is_told_so_and_hung_up_on(stage: BrokerStage, fields: dict[str, Any]) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_worker(**fields))
    assert isinstance(stage.hung_up[conn], InvalidInput)
    assert stage.broker.workers == {}


def test_a_client_id_that_cannot_be_is_refused(stage: BrokerStage) -> None:
    conn = stage.open(UNIX)
    stage.tell(conn, hello_client(client_id="with spaces"))
    assert isinstance(stage.hung_up[conn], InvalidInput)


# ---------------------------------------------------------------------------------------------------- ends


def test_a_peer_that_does_not_say_hello_is_dropped(stage: BrokerStage) -> None:
    conn = stage.open()
    stage.pass_time(HANDSHAKE_TIMEOUT_S - 0.5)
    assert conn not in stage.hung_up
    stage.pass_time(1.0)
    assert isinstance(stage.hung_up[conn], ProtocolError)


def test_a_silent_client_is_dropped_and_one_that_beats_is_not(stage: BrokerStage) -> None:
    silent, beating = stage.node(), stage.node()
    for _ in range(int(IDLE_TIMEOUT_S / 20) + 1):
        stage.tell(beating, Heartbeat(1))
        stage.pass_time(20.0)
    assert silent in stage.hung_up
    assert beating not in stage.hung_up


def test_a_silent_worker_is_dropped_after_its_own_ttl(stage: BrokerStage) -> None:
    conn = stage.worker(ttl_s=5.0)
    stage.pass_time(5.0 + LEASE_MARGIN_S - 0.5)
    assert conn not in stage.hung_up
    stage.pass_time(1.0)
    assert conn in stage.hung_up
    assert stage.broker.workers == {}


def test_a_new_connection_of_the_same_worker_takes_the_place_of_the_old(stage: BrokerStage) -> None:
    old, new = stage.worker("w1"), stage.worker("w1")
    assert isinstance(stage.hung_up[old], ProtocolError)
    assert stage.broker.workers["w1"].conn == new
    stage.close(old)
    assert stage.broker.workers["w1"].conn == new


def test_a_new_start_of_the_same_worker_ends_the_old_one_for_good(stage: BrokerStage) -> None:
    old, new = stage.worker("w1"), stage.worker("w1", incarnation="w1-2")
    assert stage.hung_up[old].code == "INVALID"  # type: ignore[union-attr]
    assert stage.broker.workers["w1"].conn == new


def test_what_a_peer_sent_before_it_noticed_the_hang_up_is_not_heard(stage: BrokerStage) -> None:
    conn = stage.open()
    stage.tell(conn, hello_client())
    stage.tell(conn, hello_client(token=stage.token("alice", "client")))
    stage.turns()
    assert conn not in stage.sent


def test_one_token_has_a_share_of_the_workers_and_the_others_have_theirs(
    stage: BrokerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.broker._worker_shares, "limit", 3)
    secret, other = stage.token("many", "worker"), stage.token("other", "worker")
    workers = [stage.worker(f"m{number}", peer=TCP, token=secret) for number in range(3)]
    refused = stage.open(TCP)
    stage.ask(refused, HelloWorker(msg_id=1, worker_id="m3", incarnation="i", token=secret))
    error = stage.hung_up[refused]
    assert error is not None
    assert (error.code, "token:many has 3 workers" in error.message) == ("OVERLOADED", True)
    stage.worker("o1", peer=TCP, token=other)
    stage.worker("m0", peer=TCP, token=secret, incarnation="m0-2")  # in the place of the first
    stage.close(workers[1])
    stage.worker("m4", peer=TCP, token=secret)


def test_patterns_that_could_all_match_one_subject_are_few_for_one_token(stage: BrokerStage) -> None:
    secret = stage.token("wide", "worker")
    mixed = [".".join("*" if number >> place & 1 else "a" for place in range(10)) for number in range(1, 1024)]
    first = stage.worker("w1", peer=TCP, token=secret, patterns=tuple(mixed[:200]))
    stage.worker("w2", peer=TCP, token=secret, patterns=tuple(mixed[:200]))  # the same ones: they count once
    refused = stage.open(TCP)
    hello = HelloWorker(msg_id=1, worker_id="w3", incarnation="i", token=secret, patterns=tuple(mixed[200:400]))
    stage.ask(refused, hello)
    error = stage.hung_up[refused]
    assert error is not None
    assert error.code == "OVERLOADED"
    stage.broker.subscriptions.trie.match(".".join("a" * 10))
    assert stage.broker.subscriptions.trie.nodes_visited < 200 * 10
    stage.ask(first, Subscribe(7, tuple(mixed[200:400])))
    answer = stage.last(first, ErrorMessage)
    assert (answer.corr_id, answer.code) == (7, "OVERLOADED")
    stage.close(first)
    stage.worker("w3", peer=TCP, token=secret, patterns=tuple(mixed[200:256]))
    stage.worker("w4", peer=TCP, token=secret, patterns=tuple(f"to.w{number}" for number in range(200)))


def test_workers_of_one_token_have_a_bounded_number_of_lists_of_programs(stage: BrokerStage) -> None:
    secret = stage.token("one", "worker")
    for number in range(MIXED_PATTERNS_MAX):
        worker = stage.worker(f"w{number}", peer=TCP, token=secret, patterns=("a.>",), execs=(f"program-{number}",))
    stage.worker("same", peer=TCP, token=secret, patterns=("b.>",), execs=("program-0",))

    hello = HelloWorker(msg_id=1, worker_id="more", incarnation="i", token=secret, patterns=("a.>",), execs=("more",))
    refused = stage.open(TCP)
    stage.ask(refused, hello)
    assert getattr(stage.hung_up[refused], "code", None) == "OVERLOADED"

    stage.close(worker)
    accepted = stage.open(TCP)
    stage.ask(accepted, hello)
    assert accepted not in stage.hung_up
