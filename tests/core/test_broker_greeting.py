"""Who may come in: Hello, tokens, versions, roles; and what ends a connection."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.broker.authentication import IDLE_TIMEOUT_S, PATTERNS_MAX
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.machine import Peer
from tasuki.core.protocol import (
    HANDSHAKE_TIMEOUT_S,
    PROTOCOL_VERSION,
    GiveCredit,
    Heartbeat,
    HelloClient,
    HelloWorker,
    SubmitJobs,
    Subscribe,
    Welcome,
)
from tasuki.errors import Forbidden, InvalidInput, ProtocolError, Unauthorized, VersionMismatch
from tests.core.desk import TCP, UNIX, Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


def hello_client(**fields: Any) -> HelloClient:
    return HelloClient(**{"msg_id": 7, "client_id": "c1", **fields})


def hello_worker(**fields: Any) -> HelloWorker:
    return HelloWorker(**{"msg_id": 7, "worker_id": "w1", "incarnation": "one", "patterns": ("a.*",), **fields})


def test_a_known_token_is_welcomed_under_its_own_name_after_the_store_was_asked(desk: Desk) -> None:
    conn = desk.open()
    desk.tell(conn, hello_client(token=desk.token("alice", "client")))
    assert conn not in desk.said
    desk.turns()
    welcome = desk.last(conn, Welcome)
    assert (welcome.corr_id, welcome.identity, welcome.kind) == (7, "token:alice", "client")
    assert (welcome.lease_ttl_s, welcome.lease_margin_s, welcome.idle_timeout_s) == (LEASE_TTL_S, LEASE_MARGIN_S, IDLE_TIMEOUT_S)


def test_the_servers_own_user_needs_no_token_on_the_unix_socket(desk: Desk) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, hello_client())
    assert desk.last(conn, Welcome).identity == f"uid:{UNIX.uid}"


@pytest.mark.parametrize("peer", [TCP, Peer("unix", 1001, "unix socket"), Peer("unix", None, "unix socket")])
def test_nobody_else_comes_in_without_a_token(desk: Desk, peer: Peer) -> None:
    conn = desk.open(peer)
    desk.ask(conn, hello_client())
    assert isinstance(desk.hung_up[conn], Unauthorized)
    assert conn not in desk.said


def test_an_unknown_token_is_refused_even_on_the_unix_socket(desk: Desk) -> None:
    conn = desk.open(UNIX)
    desk.ask(conn, hello_client(token="guess"))
    assert isinstance(desk.hung_up[conn], Unauthorized)


@pytest.mark.parametrize("fields", [{"revoked_at": 1.0}, {"expires_at": 1.0}, {"kind": "other"}])
def test_a_token_that_is_over_or_for_something_else_is_refused(desk: Desk, fields: dict[str, Any]) -> None:
    conn = desk.open()
    kind = fields.pop("kind", "client")
    desk.ask(conn, hello_client(token=desk.token("t", kind, **fields)))
    assert isinstance(desk.hung_up[conn], Unauthorized)


@pytest.mark.parametrize(("oldest", "version", "fits"), [(1, 1, True), (1, 9, True), (2, 9, True), (3, 9, False), (0, 0, False)])
def test_the_two_sides_need_a_common_version(desk: Desk, oldest: int, version: int, fits: bool) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, hello_client(oldest=oldest, version=version))
    if fits:
        assert desk.last(conn, Welcome).version == min(version, PROTOCOL_VERSION)
    else:
        assert isinstance(desk.hung_up[conn], VersionMismatch)


@pytest.mark.parametrize("first", [SubmitJobs(1, []), GiveCredit(1), Heartbeat(1)])
def test_the_first_frame_must_be_a_hello(desk: Desk, first: Any) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, first)
    assert isinstance(desk.hung_up[conn], ProtocolError)


def test_a_second_hello_before_the_first_was_answered_ends_the_connection(desk: Desk) -> None:
    conn = desk.open()
    desk.tell(conn, hello_client(token=desk.token("alice", "client")))
    desk.tell(conn, hello_client(token="guess"))
    assert isinstance(desk.hung_up[conn], ProtocolError)
    desk.turns()
    assert conn not in desk.said


def test_a_second_hello_after_the_welcome_ends_the_connection(desk: Desk) -> None:
    conn = desk.node()
    desk.tell(conn, hello_client())
    assert isinstance(desk.hung_up[conn], ProtocolError)


def test_the_first_common_codec_in_our_order_is_chosen(desk: Desk) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, hello_client(codecs=("lz4", "gzip", "zstd")))
    assert desk.last(conn, Welcome).codecs == ("zstd",)


# ---------------------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize(("kind", "fits"), [("worker", False), ("client", True), ("admin", True)])
def test_which_tokens_a_client_may_use(desk: Desk, kind: str, fits: bool) -> None:
    conn = desk.open()
    desk.ask(conn, hello_client(token=desk.token("t", kind)))
    assert (conn not in desk.hung_up) is fits


@pytest.mark.parametrize(("kind", "fits"), [("worker", True), ("client", False), ("admin", False)])
def test_which_tokens_a_worker_may_use(desk: Desk, kind: str, fits: bool) -> None:
    conn = desk.open()
    desk.ask(conn, hello_worker(token=desk.token("t", kind)))
    assert (conn not in desk.hung_up) is fits
    if not fits:
        assert isinstance(desk.hung_up[conn], Forbidden)


@pytest.mark.parametrize(("patterns", "fits"), [(("a.1",), True), (("a.*",), True), (("a.>",), False), ((">",), False)])
def test_a_worker_token_with_a_scope_subscribes_only_inside_it(desk: Desk, patterns: tuple[str, ...], fits: bool) -> None:
    conn = desk.open()
    desk.ask(conn, hello_worker(token=desk.token("t", "worker", "a.*"), patterns=patterns))
    assert (conn not in desk.hung_up) is fits


def test_a_worker_cannot_leave_its_scope_by_subscribing_later(desk: Desk) -> None:
    conn = desk.worker(peer=TCP, token=desk.token("t", "worker", "a.*"), patterns=("a.1",))
    desk.ask(conn, Subscribe(99, ("b.1",)))
    [error] = [message for message in desk.said[conn] if getattr(message, "corr_id", 0) == 99]
    assert error.code == "FORBIDDEN"  # type: ignore[union-attr]
    assert desk.broker.workers["w1"].patterns == ("a.1",)


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": "has.dot"},
        {"worker_id": ""},
        {"incarnation": "no spaces"},
        {"patterns": ("a..b",)},
        {"patterns": tuple(f"a.{number}" for number in range(PATTERNS_MAX + 1))},
        {"ttl_s": 0.1},
        {"ttl_s": float("nan")},
    ],
)
def test_a_worker_that_can_never_work_is_told_so_and_hung_up_on(desk: Desk, fields: dict[str, Any]) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, hello_worker(**fields))
    assert isinstance(desk.hung_up[conn], InvalidInput)
    assert desk.broker.workers == {}


def test_a_client_id_that_cannot_be_is_refused(desk: Desk) -> None:
    conn = desk.open(UNIX)
    desk.tell(conn, hello_client(client_id="with spaces"))
    assert isinstance(desk.hung_up[conn], InvalidInput)


# ---------------------------------------------------------------------------------------------------- ends


def test_a_peer_that_does_not_say_hello_is_dropped(desk: Desk) -> None:
    conn = desk.open()
    desk.pass_time(HANDSHAKE_TIMEOUT_S - 0.5)
    assert conn not in desk.hung_up
    desk.pass_time(1.0)
    assert isinstance(desk.hung_up[conn], ProtocolError)


def test_a_silent_client_is_dropped_and_one_that_beats_is_not(desk: Desk) -> None:
    silent, beating = desk.node(), desk.node()
    for _ in range(int(IDLE_TIMEOUT_S / 20) + 1):
        desk.tell(beating, Heartbeat(1))
        desk.pass_time(20.0)
    assert silent in desk.hung_up
    assert beating not in desk.hung_up


def test_a_silent_worker_is_dropped_after_its_own_ttl(desk: Desk) -> None:
    conn = desk.worker(ttl_s=5.0)
    desk.pass_time(5.0 + LEASE_MARGIN_S - 0.5)
    assert conn not in desk.hung_up
    desk.pass_time(1.0)
    assert conn in desk.hung_up
    assert desk.broker.workers == {}


def test_a_new_connection_of_the_same_worker_takes_the_place_of_the_old(desk: Desk) -> None:
    old, new = desk.worker("w1"), desk.worker("w1")
    assert isinstance(desk.hung_up[old], ProtocolError)
    assert desk.broker.workers["w1"].conn == new
    desk.close(old)
    assert desk.broker.workers["w1"].conn == new


def test_a_new_start_of_the_same_worker_ends_the_old_one_for_good(desk: Desk) -> None:
    old, new = desk.worker("w1"), desk.worker("w1", incarnation="w1-2")
    assert desk.hung_up[old].code == "INVALID"  # type: ignore[union-attr]
    assert desk.broker.workers["w1"].conn == new


def test_what_a_peer_sent_before_it_noticed_the_hang_up_is_not_heard(desk: Desk) -> None:
    conn = desk.open()
    desk.tell(conn, hello_client())
    desk.tell(conn, hello_client(token=desk.token("alice", "client")))
    desk.turns()
    assert conn not in desk.said
