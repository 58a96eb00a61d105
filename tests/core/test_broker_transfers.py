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
from tasuki.errors import Forbidden, InvalidInput, ProtocolError, Unauthorized, Unavailable
from tests.core.broker_stage import TCP, BrokerStage

SHA256 = "0" * 64


def beside(stage: BrokerStage, worker_id: str = "w1", incarnation: str = "w1-1", token: str = "") -> int:
    """A connection for transfers; it may have been hung up on."""
    conn = stage.open(TCP)
    stage.ask(conn, HelloWorker(msg_id=1, worker_id=worker_id, incarnation=incarnation, token=token, transfers=True))
    return conn


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


@pytest.fixture
def secret(stage: BrokerStage) -> str:
    return stage.token("lab", "worker")


@pytest.fixture
def worker(stage: BrokerStage, secret: str) -> int:
    return stage.worker(peer=TCP, token=secret, credit=1)


def test_it_moves_blobs_under_the_workers_name_and_beats(stage: BrokerStage, worker: int, secret: str) -> None:
    conn = beside(stage, token=secret)
    put, chunk, get = BlobPut(2, SHA256, 5), Chunk(2, 0, b"bytes", last=True), BlobGet(3, SHA256, "j", 0)

    for message in (put, chunk, get, Heartbeat(4)):
        stage.ask(conn, message)

    assert conn not in stage.hung_up
    assert stage.last(conn, Welcome).corr_id == 1
    assert stage.last(conn, HeartbeatAnswer).corr_id == 4
    gets = [one for one in stage.others if isinstance(one, SendBlob)]
    puts = [one for one in stage.others if isinstance(one, ReceiveBlob)]
    assert [one for one in stage.others if isinstance(one, BlobPiece)] == [BlobPiece(conn, chunk)]
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
def test_it_may_do_nothing_else(stage: BrokerStage, worker: int, secret: str, message: Message) -> None:
    conn = beside(stage, token=secret)

    stage.ask(conn, message)

    assert isinstance(stage.hung_up[conn], ProtocolError)
    assert worker not in stage.hung_up


def test_the_worker_stays_where_it_is_and_alone_gets_jobs(stage: BrokerStage, worker: int, secret: str) -> None:
    conn = beside(stage, token=secret)

    stage.submit(stage.node(), "j1", "j2")

    assert len(stage.grants(worker)) == 1
    assert not stage.grants(conn)
    assert [view["worker_id"] for view in stage.broker.describe_workers()] == ["w1"]
    stage.close(conn)
    assert [view["worker_id"] for view in stage.broker.describe_workers()] == ["w1"]


def test_nobody_comes_in_beside_a_worker_with_another_token(stage: BrokerStage, worker: int) -> None:
    conn = beside(stage, token=stage.token("other", "worker"))

    assert isinstance(stage.hung_up[conn], Forbidden)
    assert worker not in stage.hung_up


def test_a_token_of_one_worker_is_not_good_for_another(stage: BrokerStage) -> None:
    conn = beside(stage, worker_id="w2", token=stage.token("bound", "worker", worker_id="w1"))

    assert isinstance(stage.hung_up[conn], Forbidden)


@pytest.mark.parametrize("kind", ["client", "enrol"])
def test_it_takes_a_token_with_which_a_worker_may_come_in(stage: BrokerStage, kind: str) -> None:
    conn = beside(stage, token=stage.token("other", kind))

    assert isinstance(stage.hung_up[conn], Forbidden)


@pytest.mark.parametrize(("worker_id", "incarnation"), [("", "i"), ("w", ""), ("not a name", "i")])
def test_it_says_whose_it_is(stage: BrokerStage, secret: str, worker_id: str, incarnation: str) -> None:
    conn = beside(stage, worker_id, incarnation, secret)

    assert isinstance(stage.hung_up[conn], InvalidInput)


def test_it_ends_with_its_token_and_when_nothing_is_heard(stage: BrokerStage, worker: int, secret: str) -> None:
    revoked, silent = beside(stage, token=secret), beside(stage, "w2", "w2-1", stage.token("two", "worker"))
    admin = stage.client("admin", "admin")

    stage.request(admin, "token.revoke", token_id="lab")
    stage.pass_time(61.0)

    assert isinstance(stage.hung_up[revoked], Unauthorized)
    assert isinstance(stage.hung_up[silent], Unavailable)
