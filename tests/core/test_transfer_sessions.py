"""HelloWorker.transfers: a connection beside a worker's own, for blobs alone."""

from __future__ import annotations

import pytest

from tasuki.core.broker.events import BlobPiece, ReceiveBlob, SendBlob
from tasuki.core.protocol import (
    BlobGet,
    BlobPut,
    Chunk,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsReleased,
    JobsStarted,
    Message,
    Request,
    Subscribe,
    Welcome,
)
from tasuki.errors import Forbidden, InvalidInput, ProtocolError, Unauthorized
from tests.core.desk import TCP, Desk

SHA256 = "0" * 64


def beside(desk: Desk, worker_id: str = "w1", incarnation: str = "w1-1", token: str = "") -> int:
    """A connection for transfers; it may have been hung up on."""
    conn = desk.open(TCP)
    desk.ask(conn, HelloWorker(msg_id=1, worker_id=worker_id, incarnation=incarnation, token=token, transfers=True))
    return conn


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def secret(desk: Desk) -> str:
    return desk.token("lab", "worker")


@pytest.fixture
def worker(desk: Desk, secret: str) -> int:
    return desk.worker(peer=TCP, token=secret, credit=1)


def test_it_moves_blobs_under_the_workers_name_and_beats(desk: Desk, worker: int, secret: str) -> None:
    conn = beside(desk, token=secret)
    put, chunk, get = BlobPut(2, SHA256, 5), Chunk(2, 0, b"bytes", last=True), BlobGet(3, SHA256, "j", 0)

    for message in (put, chunk, get, Heartbeat(4)):
        desk.ask(conn, message)

    assert conn not in desk.hung_up
    assert desk.last(conn, Welcome).corr_id == 1
    assert desk.last(conn, HeartbeatAnswer).corr_id == 4
    gets = [one for one in desk.others if isinstance(one, SendBlob)]
    puts = [one for one in desk.others if isinstance(one, ReceiveBlob)]
    assert [one for one in desk.others if isinstance(one, BlobPiece)] == [BlobPiece(conn, chunk)]
    assert [(one.conn, one.get, one.worker_id, one.incarnation) for one in gets] == [(conn, get, "w1", "w1-1")]
    assert [(one.conn, one.put) for one in puts] == [(conn, put)]


@pytest.mark.parametrize(
    "message",
    [
        GiveCredit(5),
        JobsFinished([]),
        JobsStarted([]),
        JobsReleased([], ""),
        Subscribe(2, (">",)),
        Request(2, "worker.rotate", {}),
        Request(2, "counts", {}),
        HelloWorker(msg_id=2, worker_id="w1", incarnation="w1-1"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_it_may_do_nothing_else(desk: Desk, worker: int, secret: str, message: Message) -> None:
    conn = beside(desk, token=secret)

    desk.ask(conn, message)

    assert isinstance(desk.hung_up[conn], ProtocolError)
    assert worker not in desk.hung_up


def test_the_worker_stays_where_it_is_and_alone_gets_jobs(desk: Desk, worker: int, secret: str) -> None:
    conn = beside(desk, token=secret)

    desk.submit(desk.node(), "j1", "j2")

    assert len(desk.grants(worker)) == 1
    assert not desk.grants(conn)
    assert [view["worker_id"] for view in desk.broker.describe_workers()] == ["w1"]
    desk.close(conn)
    assert [view["worker_id"] for view in desk.broker.describe_workers()] == ["w1"]


def test_nobody_comes_in_beside_a_worker_with_another_token(desk: Desk, worker: int) -> None:
    conn = beside(desk, token=desk.token("other", "worker"))

    assert isinstance(desk.hung_up[conn], Forbidden)
    assert worker not in desk.hung_up


def test_a_token_of_one_worker_is_not_good_for_another(desk: Desk) -> None:
    conn = beside(desk, worker_id="w2", token=desk.token("bound", "worker", worker_id="w1"))

    assert isinstance(desk.hung_up[conn], Forbidden)


@pytest.mark.parametrize("kind", ["client", "enrol"])
def test_it_takes_a_token_with_which_a_worker_may_come_in(desk: Desk, kind: str) -> None:
    conn = beside(desk, token=desk.token("other", kind))

    assert isinstance(desk.hung_up[conn], Forbidden)


@pytest.mark.parametrize(("worker_id", "incarnation"), [("", "i"), ("w", ""), ("not a name", "i")])
def test_it_says_whose_it_is(desk: Desk, secret: str, worker_id: str, incarnation: str) -> None:
    conn = beside(desk, worker_id, incarnation, secret)

    assert isinstance(desk.hung_up[conn], InvalidInput)


def test_it_ends_with_its_token_and_when_nothing_is_heard(desk: Desk, worker: int, secret: str) -> None:
    revoked, silent = beside(desk, token=secret), beside(desk, "w2", "w2-1", desk.token("two", "worker"))
    admin = desk.client("admin", "admin")

    desk.request(admin, "token.revoke", token_id="lab")
    desk.pass_time(61.0)

    assert isinstance(desk.hung_up[revoked], Unauthorized)
    assert isinstance(desk.hung_up[silent], ProtocolError)
