"""Questions about logs at a broker: who may ask, who is asked, and that there is always an answer. The test plays all peers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tasuki.core.broker.events import ClusterView, JobSeen, Query
from tasuki.core.broker.log_reads import ANSWER_WITHIN_S, READS_PER_CLIENT, READS_PER_WORKER, checked_progress, question_of
from tasuki.core.cluster_messages import ServerInfo, WorkerInfo
from tasuki.core.job import Progress
from tasuki.core.machine import Peer
from tasuki.core.protocol import Claim, ErrorMessage, Heartbeat, JobsStarted, LogPiece, ReadLog, Reply, Request
from tasuki.errors import ProtocolError
from tests.core.broker_stage import TCP, UNIX, BrokerStage, claim

_numbers = itertools.count(1000)


class LogStage(BrokerStage):
    """A broker whose driver reads rows at once."""

    def follow(self, conn: int, job_id: str = "job", **params: Any) -> int:
        """Ask for a log; the msg_id of the question."""
        msg_id = next(_numbers)
        self.tell(conn, Request(msg_id, "logs", {"job_id": job_id, **params}))
        query = self.others.pop()
        assert isinstance(query, Query)
        assert query.question is not None
        job = self.job(job_id)
        assert job is not None
        self.apply(JobSeen(conn, msg_id, query.question, job))
        return msg_id

    def answer(self, conn: int, msg_id: int) -> dict[str, Any]:
        [reply] = [message for message in self.all(conn, Reply) if message.corr_id == msg_id]
        body: dict[str, Any] = reply.body
        return body

    def is_answered(self, conn: int, msg_id: int) -> bool:
        return any(message.corr_id == msg_id for message in self.all(conn, Reply))


@pytest.fixture
def stage() -> LogStage:
    return LogStage()


@pytest.fixture
def client(stage: LogStage) -> int:
    return stage.client("admin")


def running(stage: LogStage, client: int, *, exec: str = "run", **fields: Any) -> int:
    """A worker that runs the job `job`."""
    worker = stage.worker(credit=1, **{"version": 2, **fields})
    stage.submit(client, "job", exec=exec)
    [grant] = stage.grants(worker)
    stage.ask(worker, JobsStarted([claim(grant)]))
    return worker


def test_a_question_goes_to_the_worker_and_its_piece_to_the_client(stage: LogStage, client: int) -> None:
    worker = running(stage, client)

    msg_id = stage.follow(client, offset=3, stream="stderr", wait_s=20.0)
    question = stage.last(worker, ReadLog)
    stage.tell(worker, LogPiece(question.msg_id, 3, b"new", 6, 6))

    [grant] = stage.grants(worker)
    assert (question.lease_id, question.stream, question.offset, question.wait_s) == (grant.lease_id, "stderr", 3, 20.0)
    answer = stage.answer(client, msg_id)
    assert (answer["data"], answer["offset"], answer["next"], answer["end"]) == (b"new", 3, 6, 6)
    assert (answer["state"], answer["attempt"], answer["ended"], answer["complete"]) == ("RUNNING", 1, False, False)


def test_a_job_that_waits_is_answered_at_once(stage: LogStage, client: int) -> None:
    stage.submit(client, "job", exec="run")

    answer = stage.answer(client, stage.follow(client, wait_s=20.0))

    assert (answer["state"], answer["data"], answer["ended"]) == ("PENDING", b"", False)


def test_the_offset_of_another_attempt_is_not_taken_for_one_of_this(stage: LogStage, client: int) -> None:
    worker = running(stage, client)

    stage.follow(client, offset=5000, attempt=7)

    assert stage.last(worker, ReadLog).offset == 0


def test_a_worker_of_version_1_is_not_asked(stage: LogStage, client: int) -> None:
    worker = running(stage, client, version=1)

    answer = stage.answer(client, stage.follow(client, wait_s=20.0))

    assert (answer["unsupported"], stage.all(worker, ReadLog)) == (True, [])


def test_a_worker_that_says_nothing_costs_a_bounded_wait(stage: LogStage, client: int) -> None:
    running(stage, client, ttl_s=3600.0)
    msg_id = stage.follow(client, wait_s=10.0)

    stage.pass_time(10.0 + ANSWER_WITHIN_S - 0.1)
    before = stage.is_answered(client, msg_id)
    stage.pass_time(0.2)

    assert (before, stage.answer(client, msg_id)["data"]) == (False, b"")


def test_whoever_asked_a_worker_that_left_is_answered(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    msg_id = stage.follow(client, wait_s=20.0)

    stage.close(worker)
    stage.pass_time(0.1)

    assert stage.answer(client, msg_id)["data"] == b""


@pytest.mark.parametrize(
    "piece",
    [
        {"offset": 2, "data": b"again", "next": 7, "cut_bytes": -3},
        {"offset": 5, "data": b"x", "next": 99},
        {"offset": 5, "data": b"x" * 20, "next": 25},
        {"offset": 8, "data": b"x", "next": 9, "cut_bytes": 0},
        {"offset": -5, "data": b"", "next": -5, "cut_bytes": -10},
        {"offset": 2**70, "data": b"", "next": 2**70, "cut_bytes": 2**70 - 5},
    ],
)
def test_a_piece_that_makes_no_sense_tells_the_client_nothing(stage: LogStage, client: int, piece: dict[str, Any]) -> None:
    worker = running(stage, client)
    msg_id = stage.follow(client, offset=5, max_bytes=10)
    question = stage.last(worker, ReadLog)

    stage.tell(worker, LogPiece(question.msg_id, **{"end": 0, **piece}))

    answer = stage.answer(client, msg_id)
    assert (answer["offset"], answer["data"], answer["next"]) == (5, b"", 5)
    assert worker not in stage.hung_up


def test_nobody_answers_for_another_worker_or_twice(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    other = stage.worker("w2", version=2)
    msg_id = stage.follow(client)
    question = stage.last(worker, ReadLog)

    stage.tell(other, LogPiece(question.msg_id, 0, b"forged", 6, 6))
    forged = stage.is_answered(client, msg_id)
    stage.tell(worker, LogPiece(question.msg_id, 0, b"real", 4, 4))
    stage.tell(worker, LogPiece(question.msg_id, 0, b"again", 5, 5))
    stage.tell(worker, LogPiece(777, 0, b"unasked", 7, 7))

    assert (forged, stage.answer(client, msg_id)["data"]) == (False, b"real")


def test_a_client_has_only_so_many_questions_at_workers(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    for _ in range(READS_PER_CLIENT):
        stage.follow(client, wait_s=20.0)

    refused = stage.follow(client)
    asked = len(stage.all(worker, ReadLog))
    stage.tell(worker, LogPiece(stage.last(worker, ReadLog).msg_id, 0, b"", 0, 0))
    stage.follow(client)

    assert stage.last(client, ErrorMessage).corr_id == refused
    assert stage.last(client, ErrorMessage).code == "OVERLOADED"
    assert (asked, len(stage.all(worker, ReadLog))) == (READS_PER_CLIENT, READS_PER_CLIENT + 1)


def test_a_client_that_follows_much_is_not_kept_waiting_by_its_own_questions(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    for _ in range(READS_PER_CLIENT):
        stage.follow(client, wait_s=20.0)

    half = READS_PER_CLIENT // 2
    assert [question.wait_s for question in stage.all(worker, ReadLog)] == [20.0] * half + [0.0] * half


def test_a_worker_has_only_so_many_and_the_later_ones_do_not_wait(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    clients = [stage.client("admin", f"follower-{number}") for number in range(READS_PER_WORKER)]
    for one in clients:
        stage.follow(one, wait_s=20.0)

    answer = stage.answer(client, stage.follow(client, wait_s=20.0))

    waits = [question.wait_s for question in stage.all(worker, ReadLog)]
    half = READS_PER_WORKER // 2
    assert (answer["data"], waits) == (b"", [20.0] * half + [0.0] * (READS_PER_WORKER - half))


def test_a_client_that_left_leaves_no_question_behind(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    leaving = stage.client("admin", "leaving")
    for _ in range(READS_PER_CLIENT):
        stage.follow(leaving, wait_s=20.0)
    stage.close(leaving)
    for question in stage.all(worker, ReadLog):
        stage.tell(worker, LogPiece(question.msg_id, 0, b"for nobody", 10, 10))

    assert not stage.is_answered(leaving, 0)
    assert stage.broker.workers["w1"].log_reads == 0


def elsewhere(stage: LogStage, address: str) -> None:
    worker = WorkerInfo(worker_id="w1", incarnation="w1-1", patterns=(">",))
    stage.apply(ClusterView((ServerInfo(server_id="other", addresses=(address,), workers=(worker,)),)))


@pytest.mark.parametrize(
    ("peer", "address", "told"),
    [
        (TCP, "tcp://10.0.0.8:7000", ["tcp://10.0.0.8:7000"]),
        (TCP, "tcp://127.0.0.1:7000", None),
        (UNIX, "tcp://127.0.0.1:7000", ["tcp://127.0.0.1:7000"]),
    ],
)
def test_of_a_worker_at_another_server_the_client_learns_where(peer: Peer, address: str, told: list[str] | None) -> None:
    stage = LogStage()
    client = stage.client("admin", peer=peer)
    stage.close(running(stage, client))
    elsewhere(stage, address)

    assert stage.answer(client, stage.follow(client)).get("elsewhere") == told


def test_a_job_of_a_handler_has_no_logs(stage: LogStage, client: int) -> None:
    stage.submit(client, "job")

    stage.follow(client)

    assert stage.last(client, ErrorMessage).code == "NOT_FOUND"


def test_progress_of_a_handlers_job_is_asked_of_its_worker(stage: LogStage, client: int) -> None:
    worker = running(stage, client, exec="")

    msg_id = stage.follow(client, stream="progress")

    question = stage.last(worker, ReadLog)
    assert question.stream == "progress"
    line = b'{"fraction":0.5,"text":"half"}\n'
    stage.tell(worker, LogPiece(question.msg_id, 0, line, len(line), len(line)))
    assert stage.answer(client, msg_id)["data"] == line


def test_progress_comes_with_a_heartbeat_and_is_told_with_the_log(stage: LogStage, client: int) -> None:
    worker = running(stage, client)
    [grant] = stage.grants(worker)
    told = {grant.lease_id: Progress(0.5, "half"), "unknown": Progress(0.1)}

    stage.ask(worker, Heartbeat(9, [Claim(grant.job_id, grant.lease_id, grant.attempt)], told))

    job = stage.job("job")
    assert job is not None
    assert job.progress == Progress(0.5, "half")
    msg_id = stage.follow(client)
    stage.tell(worker, LogPiece(stage.last(worker, ReadLog).msg_id, 0, b"", 0, 0))
    assert (stage.answer(client, msg_id)["progress"], stage.answer(client, msg_id)["progress_text"]) == (0.5, "half")


@pytest.mark.parametrize(
    "progress", [Progress(float("nan")), Progress(-0.1), Progress(1.1), Progress(0.5, "a\0b"), Progress(0.5, "\x1b[2J")]
)
def test_progress_that_cannot_be_kept_is_left_out(progress: Progress) -> None:
    assert checked_progress({"lease": progress, "other": Progress(0.5, "x" * 300)}) == {"other": Progress(0.5, "x" * 200)}


def test_a_question_has_defaults() -> None:
    asked = question_of({"job_id": "job"})

    assert (asked.stream, asked.offset, asked.attempt, asked.wait_s) == ("stdout", 0, 0, 0.0)


@pytest.mark.parametrize("message", [ReadLog(1, "lease", "stdout"), LogPiece(1, 0, b"", 0, 0)])
def test_a_client_that_speaks_as_a_server_or_a_worker_is_hung_up_on(
    stage: LogStage, client: int, message: ReadLog | LogPiece
) -> None:
    stage.tell(client, message)

    assert isinstance(stage.hung_up[client], ProtocolError)


def test_a_worker_that_asks_for_logs_is_hung_up_on(stage: LogStage) -> None:
    worker = stage.worker(version=2)

    stage.tell(worker, ReadLog(1, "lease", "stdout"))

    assert isinstance(stage.hung_up[worker], ProtocolError)
