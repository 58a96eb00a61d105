"""/v1/worker: sessions of workers over HTTP. A message is carried out once, and repeated to the worker until it is confirmed."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from tasuki.core.broker import worker_messages
from tasuki.core.job import InputFile, JobSpec, Outcome
from tasuki.core.machine import Now
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    FRAMES_MAX,
    SESSION_HEADER,
    AssignJobs,
    BlobPut,
    Chunk,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    Message,
    Reply,
    Request,
    SubmitJobs,
    Welcome,
)
from tasuki.core.store_messages import Grant
from tasuki.doors.http import worker_sessions
from tasuki.doors.http.exchange import BODY_MAX_BYTES
from tasuki.wire.compression import ZSTD
from tasuki.wire.messages import encode, encode_frame
from tests.doors.http.stage import Stage, messages_of
from tests.support.waiting import until

WAIT_S = 15.0  # of polls that something must end sooner
NONSENSE = b"\x04\0\0\0nons"  # a frame with flags that there are not


def body_of(*messages: Message) -> bytes:
    return b"".join(encode(message) for message in messages)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


class WorkerPeer:
    """A worker's session, used request by request. Its subject is nobody else's."""

    def __init__(self, stage: Stage, token: str = "", **hello: Any) -> None:
        self.stage = stage
        self.token_id, self.token = ("", token) if token else stage.create_named_token("worker")
        self.worker_id = hello.pop("worker_id", "w-" + secrets.token_hex(4))
        self.subject = f"lines.{self.worker_id}"
        fields = {"incarnation": "one", "patterns": (self.subject,), "version": 2, **hello}
        self.hello = HelloWorker(msg_id=1, worker_id=self.worker_id, **fields)
        self.opened = stage.call("POST", "/v1/worker", self.token, content=encode(self.hello))
        self.name = self.opened.headers.get(SESSION_HEADER, "")
        self.numbers = 0

    def post(self, query: str, *messages: Message, content: bytes = b"") -> httpx.Response:
        return self.stage.call("POST", f"/v1/worker/{self.name}{query}", self.token, content=content or body_of(*messages))

    def say(self, *messages: Message) -> None:
        self.numbers += 1
        assert messages_of(self.post(f"?said={self.numbers}", *messages)) == []

    def poll(self, heard: int, wait: float = WAIT_S) -> list[Message]:
        return messages_of(self.post(f"?heard={heard}&wait={wait}"))

    def begin_poll(self, pool: ThreadPoolExecutor, heard: int = 0) -> Future[list[Message]]:
        """A poll that waits; the server has it when this returns."""
        poll = pool.submit(self.poll, heard)
        until(lambda: self.at_server is not None and self.at_server.users, 30.0, "the poll is at the server")
        return poll

    def leave(self) -> httpx.Response:
        return self.stage.call("DELETE", f"/v1/worker/{self.name}", self.token)

    def submit(self, job_id: str = "", **fields: Any) -> str:
        """A job for this worker."""
        job_id = job_id or "j-" + secrets.token_hex(4)
        spec = JobSpec(job_id=job_id, subject=self.subject, **fields)
        answer = self.stage.call("POST", "/v1/frames", self.stage.client, content=body_of(SubmitJobs(1, [spec])))
        assert answer.status_code == 200, answer.text
        return job_id

    def take(self, heard: int = 0) -> Grant:
        """The job that it was given."""
        [assigned] = self.poll(heard)
        assert isinstance(assigned, AssignJobs)
        [grant] = assigned.grants
        return grant

    @property
    def at_server(self) -> worker_sessions.HttpWorkerSession | None:
        return self.stage.door._http.sessions._sessions.get(self.name)

    @property
    def credit(self) -> int | None:
        """The credit of this worker at the broker; None: the worker is unknown."""
        seen = [view["credit"] for view in self.stage.server.broker.describe_workers() if view["worker_id"] == self.worker_id]
        return int(str(seen[0])) if seen else None


@pytest.fixture
def peer(stage: Stage) -> WorkerPeer:
    peer = WorkerPeer(stage)
    assert isinstance(messages_of(peer.opened)[0], Welcome), peer.opened.text
    return peer


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def finished(grant: Grant, result: bytes = b"done") -> JobsFinished:
    return JobsFinished([Ending(grant.job_id, grant.lease_id, grant.attempt, Outcome(result=result))])


def error_of(messages: list[Message]) -> str:
    [error] = messages
    assert isinstance(error, ErrorMessage)
    assert not error.corr_id
    return error.code


# ---------------------------------------------------------------------------------------------------- coming in


def test_a_hello_opens_a_session_by_the_token_of_the_request_and_names_no_other_server(stage: Stage) -> None:
    peer = WorkerPeer(stage, token="", ttl_s=30.0)

    [welcome] = messages_of(peer.opened)

    assert isinstance(welcome, Welcome)
    assert (welcome.corr_id, welcome.kind, welcome.lease_ttl_s, welcome.servers) == (1, "worker", 30.0, ())
    assert len(peer.name) >= 20
    assert peer.credit == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        NONSENSE,
        body_of(HelloClient(msg_id=1, client_id="c")),
        body_of(GiveCredit(1)),
        body_of(HelloWorker(msg_id=1, worker_id="w", incarnation="i"), HelloWorker(msg_id=2, worker_id="v", incarnation="i")),
        body_of(HelloWorker(msg_id=1, worker_id="w", incarnation="i"), GiveCredit(1)),
        body_of(HelloWorker(msg_id=1, worker_id="w", incarnation="i", transfers=True)),
        body_of(HelloWorker(msg_id=1, worker_id="w", incarnation="i"))[:-1],
    ],
    ids=["nothing", "nonsense", "a client's", "credit", "two", "with credit", "for transfers", "half"],
)
def test_what_is_no_hello_of_a_worker_opens_nothing(stage: Stage, body: bytes) -> None:
    answer = stage.call("POST", "/v1/worker", stage.create_token("worker"), content=body)

    assert refusal(answer) == (400, "INVALID_PAYLOAD")
    assert SESSION_HEADER not in answer.headers


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"version": 99, "oldest": 99}, "VERSION"),
        ({"worker_id": "a.dot"}, "INVALID"),
        ({"worker_id": "not a name!"}, "INVALID"),
        ({"incarnation": ""}, "INVALID"),
        ({"ttl_s": 0.1}, "INVALID"),
        ({"patterns": ("other.>",)}, "FORBIDDEN"),
    ],
)
def test_a_hello_that_is_refused_is_told_as_over_tcp_and_leaves_nothing(stage: Stage, hello: dict[str, Any], code: str) -> None:
    before = len(stage.door._http.sessions._sessions)

    peer = WorkerPeer(stage, stage.create_token("worker", scope=["mine.>"]), **{"patterns": ("mine.here",), **hello})

    assert error_of(messages_of(peer.opened)) == code
    assert not peer.name
    assert len(stage.door._http.sessions._sessions) == before


def test_a_token_that_is_bound_to_one_worker_is_not_anothers(stage: Stage) -> None:
    peer = WorkerPeer(stage, stage.create_token("worker", worker_id="bound"), worker_id="another")

    assert error_of(messages_of(peer.opened)) == "FORBIDDEN"


@pytest.mark.parametrize("kind", ["client", "admin"])
def test_only_a_worker_comes_in(stage: Stage, kind: str) -> None:
    assert refusal(WorkerPeer(stage, getattr(stage, kind)).opened) == (403, "FORBIDDEN")


def test_there_is_a_limit_of_sessions_for_which_those_that_have_ended_do_not_count(
    stage: Stage, peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WorkerPeer(stage).name
    monkeypatch.setattr(worker_sessions, "SESSIONS_MAX", len(stage.door._http.sessions._sessions))
    for other in list(stage.door._http.sessions._sessions.values()):
        if other is not peer.at_server:
            stage.run(left(other))

    again = WorkerPeer(stage, peer.token)  # takes the place of one that has ended
    monkeypatch.setattr(worker_sessions, "SESSIONS_MAX", 2)

    assert again.name
    assert error_of(messages_of(WorkerPeer(stage).opened)) == "OVERLOADED"
    assert (peer.poll(0, 0), again.poll(0, 0)) == ([], [])


def test_one_token_has_a_share_of_the_sessions_and_the_others_have_theirs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = stage.door._http.sessions._shares
    assert shares.limit <= worker_sessions.SESSIONS_MAX // 4
    monkeypatch.setattr(shares, "limit", 2)
    first = WorkerPeer(stage)
    second = WorkerPeer(stage, first.token)

    assert error_of(messages_of(WorkerPeer(stage, first.token).opened)) == "OVERLOADED"
    assert WorkerPeer(stage).name

    stage.run(left(second.at_server))  # it counts no more, though its worker can still read why
    assert WorkerPeer(stage, first.token).name


async def left(session: worker_sessions.HttpWorkerSession) -> None:
    session.leave(worker_sessions.Unavailable("a test"))


# ---------------------------------------------------------------------------------------------------- saying


def test_what_was_said_under_a_number_is_done_once(peer: WorkerPeer) -> None:
    for _ in range(3):
        assert messages_of(peer.post("?said=1", GiveCredit(3))) == []
    assert messages_of(peer.post("?said=2", GiveCredit(1))) == []

    assert peer.credit == 4


def test_an_ending_that_is_repeated_is_recorded_once(peer: WorkerPeer) -> None:
    peer.say(GiveCredit(1))
    job_id = peer.submit()
    grant = peer.take()
    for _ in range(2):
        assert messages_of(peer.post("?said=2", finished(grant))) == []

    recorded = peer.poll(1)

    assert recorded == [JobsRecorded([grant.lease_id], [])]
    assert peer.poll(2, 0) == []
    assert peer.stage.get(f"/v1/jobs/{job_id}").json()["state"] == "SUCCEEDED"


@pytest.mark.parametrize("number", [3, 7])
def test_what_is_out_of_turn_is_not_done(peer: WorkerPeer, number: int) -> None:
    peer.say(GiveCredit(1))

    answer = peer.post(f"?said={number}", GiveCredit(50))

    assert refusal(answer) == (409, "OUT_OF_TURN")
    assert peer.credit == 1


def test_an_old_number_is_out_of_turn_too(peer: WorkerPeer) -> None:
    peer.say(GiveCredit(1))
    peer.say(GiveCredit(1))

    assert refusal(peer.post("?said=1", GiveCredit(50))) == (409, "OUT_OF_TURN")
    assert peer.credit == 2


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("", body_of(GiveCredit(50))),
        ("?heard=0", body_of(GiveCredit(50))),
        ("?said=1", b""),
        ("?said=0", body_of(GiveCredit(50))),
        ("?said=-1", body_of(GiveCredit(50))),
        ("?said=x", body_of(GiveCredit(50))),
        ("?said=1&heard=x", body_of(GiveCredit(50))),
        ("?said=1&heard=0&wait=61", body_of(GiveCredit(50))),
        ("?said=1", NONSENSE),
        ("?said=1", body_of(GiveCredit(50), GiveCredit(50))[:-1]),
        ("?said=1", body_of(*[GiveCredit(50)] * (FRAMES_MAX + 1))),
        ("?said=1", body_of(GiveCredit(50), BlobPut(2, "0" * 64, 5))),
        ("?said=1", body_of(GiveCredit(50), Chunk(2, 0, b"bytes"))),
        ("?said=1", body_of(GiveCredit(50), ErrorMessage(1, "INVALID", "ours to say"))),
    ],
)
def test_a_request_is_good_as_a_whole_or_nothing_of_it_is_done(peer: WorkerPeer, query: str, body: bytes) -> None:
    answer = peer.post(query, content=body)

    assert refusal(answer) == (400, "INVALID_PAYLOAD")
    assert peer.credit == 0
    peer.say(GiveCredit(2))
    assert peer.credit == 2


def test_a_body_that_is_too_large_or_becomes_so_is_refused(peer: WorkerPeer) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(FRAME_MAX_BYTES - 100))
    bomb = encode_frame(99, b"\x80", packed, ZSTD) * 5

    answers = [peer.post("?said=1", content=bytes(BODY_MAX_BYTES + 1)), peer.post("?said=1", content=bomb)]

    assert [refusal(answer) for answer in answers] == [(413, "TOO_LARGE")] * 2
    peer.say(GiveCredit(1))
    assert peer.credit == 1


def test_a_message_that_no_worker_may_send_ends_the_session_and_it_hears_why(peer: WorkerPeer) -> None:
    peer.say(peer.hello)

    assert error_of(peer.poll(0)) == "PROTOCOL"
    assert peer.credit is None


def test_a_question_that_is_newer_than_the_server_is_answered(peer: WorkerPeer) -> None:
    newer = encode_frame(99, b"\x81\xa6msg_id\x07")

    assert messages_of(peer.post("?said=1", content=newer + encode(GiveCredit(1)))) == []

    [error] = peer.poll(0)
    assert isinstance(error, ErrorMessage)
    assert (error.corr_id, error.code) == (7, "UNKNOWN_FRAME")
    assert peer.credit == 1


# ---------------------------------------------------------------------------------------------------- hearing


def test_what_was_told_is_told_again_until_it_is_heard(peer: WorkerPeer) -> None:
    peer.say(Heartbeat(5), Heartbeat(6))
    both = peer.poll(0)
    until(lambda: len(peer.poll(0, 0)) == 2, what="both are answered")

    again, rest, nothing = peer.poll(0), peer.poll(1), peer.poll(2, 0)

    assert [message.corr_id for message in again if isinstance(message, HeartbeatAnswer)] == [5, 6]
    assert both == again[: len(both)]
    assert rest == again[1:]
    assert nothing == []


@pytest.mark.parametrize("heard", [0, 3, 9])
def test_nobody_has_heard_more_than_was_told_or_less_than_before(peer: WorkerPeer, heard: int) -> None:
    peer.say(Heartbeat(5), Heartbeat(6))
    until(lambda: len(peer.poll(0, 0)) == 2)
    assert peer.poll(2, 0) == []

    answer = peer.post(f"?heard={heard}")

    assert refusal(answer) == (409, "OUT_OF_TURN")


def test_a_poll_ends_with_nothing_when_its_wait_is_over(peer: WorkerPeer) -> None:
    began = time.monotonic()

    assert peer.poll(0, 0.1) == []
    assert 0.1 <= time.monotonic() - began < WAIT_S / 2


def test_a_poll_is_answered_as_soon_as_there_is_something(peer: WorkerPeer, pool: ThreadPoolExecutor) -> None:
    peer.say(GiveCredit(1))
    poll = peer.begin_poll(pool)
    began = time.monotonic()

    job_id = peer.submit()
    [assigned] = poll.result(30.0)

    assert isinstance(assigned, AssignJobs)
    assert [grant.job_id for grant in assigned.grants] == [job_id]
    assert time.monotonic() - began < 2.0


def test_one_request_may_say_and_hear(peer: WorkerPeer) -> None:
    answers = messages_of(peer.post(f"?said=1&heard=0&wait={WAIT_S}", Heartbeat(5)))

    assert answers == [HeartbeatAnswer(5)]


def test_a_second_poll_ends_the_first_and_nothing_is_lost(peer: WorkerPeer, pool: ThreadPoolExecutor) -> None:
    first = peer.begin_poll(pool)
    second = pool.submit(peer.poll, 0)

    assert first.result(30.0) == []
    peer.say(Heartbeat(5))
    assert second.result(30.0) == [HeartbeatAnswer(5)]


def test_what_a_poll_was_answered_that_its_worker_had_left_is_not_lost(peer: WorkerPeer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        peer.stage.http.post(
            f"/v1/worker/{peer.name}?heard=0&wait=15", headers={"Authorization": f"Bearer {peer.token}"}, timeout=0.2
        )
    peer.say(Heartbeat(5))

    assert peer.poll(0) == [HeartbeatAnswer(5)]


def test_a_large_backlog_comes_in_several_answers(peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_sessions, "ANSWER_MAX_BYTES", 1)
    peer.say(Heartbeat(5), Heartbeat(6))

    assert [peer.poll(heard) for heard in (0, 1)] == [[HeartbeatAnswer(5)], [HeartbeatAnswer(6)]]


def test_what_nobody_hears_is_not_kept_without_end(peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_sessions, "KEPT_MAX_BYTES", 10_000)
    peer.say(GiveCredit(3))
    for _ in range(3):
        peer.submit(payload=bytes(6000))
    until(lambda: peer.credit is None, what="the broker has forgotten it")

    assert error_of(peer.poll(0)) == "OVERLOADED"
    assert peer.at_server is not None
    assert peer.at_server._kept_bytes < 1000


# ---------------------------------------------------------------------------------------------------- whose it is, and its end


def test_the_session_of_another_token_is_as_unknown_as_one_that_there_never_was(stage: Stage, peer: WorkerPeer) -> None:
    stranger = stage.create_token("worker")

    answers = [
        stage.call(method, f"/v1/worker/{name}", token)
        for name, token in ((peer.name, stranger), ("made-up", peer.token))
        for method in ("POST", "DELETE")
    ]

    assert [refusal(answer) for answer in answers] == [(404, "NOT_FOUND")] * 4
    assert len({answer.text for answer in answers}) == 1
    assert peer.poll(0, 0) == []


def test_a_worker_that_leaves_is_gone_at_once(peer: WorkerPeer, pool: ThreadPoolExecutor) -> None:
    poll = peer.begin_poll(pool)

    answer = peer.leave()

    assert (answer.status_code, answer.json()) == (200, {"session": "ended"})
    assert peer.credit is None
    assert error_of(poll.result(30.0)) == "UNAVAILABLE"
    assert refusal(peer.leave()) == refusal(peer.post("?heard=0")) == (404, "NOT_FOUND")


@pytest.mark.parametrize(("incarnation", "code"), [("one", "PROTOCOL"), ("two", "INVALID")])
def test_a_new_session_of_the_same_worker_ends_the_old_one(
    stage: Stage, peer: WorkerPeer, pool: ThreadPoolExecutor, incarnation: str, code: str
) -> None:
    poll = peer.begin_poll(pool)

    new = WorkerPeer(stage, peer.token, worker_id=peer.worker_id, incarnation=incarnation)

    assert error_of(poll.result(30.0)) == code
    assert refusal(peer.post("?heard=1")) == (404, "NOT_FOUND")
    new.say(GiveCredit(2))
    assert peer.credit == 2


def test_a_token_that_is_revoked_ends_the_poll_and_every_request_after_it(
    stage: Stage, peer: WorkerPeer, pool: ThreadPoolExecutor
) -> None:
    poll = peer.begin_poll(pool)

    stage.revoke_token(peer.token_id)

    assert error_of(poll.result(30.0)) == "UNAUTHORIZED"
    assert [refusal(answer) for answer in (peer.post("?heard=0"), peer.post("?said=1", GiveCredit(1)), peer.leave())] == [
        (403, "TOKEN_REVOKED")
    ] * 3
    assert peer.credit is None


def test_a_token_that_expires_ends_the_poll_and_every_request_after_it(
    stage: Stage, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = WorkerPeer(stage, stage.create_token("worker", expires_at=time.time() + 3600))
    poll = peer.begin_poll(pool)

    clock = stage.server.now
    monkeypatch.setattr(stage.server, "now", lambda: Now(clock().monotonic, clock().wall + 3601))

    assert error_of(poll.result(30.0)) == "UNAUTHORIZED"
    assert refusal(peer.post("?heard=0")) == (401, "UNAUTHORIZED")


def test_a_token_that_is_rotated_is_followed_by_its_answer(stage: Stage, pool: ThreadPoolExecutor) -> None:
    peer = WorkerPeer(stage, stage.create_token("worker", worker_id="rotates"), worker_id="rotates")
    poll = peer.begin_poll(pool)

    peer.say(Request(9, "worker.rotate", {"token_id": "next-one", "sha256": "0" * 64}))

    [reply] = poll.result(30.0)
    assert isinstance(reply, Reply)
    assert (reply.corr_id, reply.body["token_id"]) == (9, "next-one")
    assert refusal(peer.post("?heard=1")) == (403, "TOKEN_REVOKED")


def test_a_session_of_which_nothing_is_heard_is_forgotten_and_one_with_a_poll_is_not(
    stage: Stage, peer: WorkerPeer, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tick() -> None:
        stage.door._http.sessions.tick()

    other = WorkerPeer(stage)
    poll = other.begin_poll(pool)
    stage.run(tick())
    before = peer.credit, other.credit

    monkeypatch.setattr(worker_sessions, "KEPT_S", 0.0)
    stage.run(tick())

    assert before == (0, 0)
    assert (peer.credit, other.credit) == (None, 0)
    assert refusal(peer.post("?heard=0")) == (404, "NOT_FOUND")
    other.leave()
    poll.result(30.0)


def test_a_server_that_closes_answers_the_polls(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with Stage(tmp_path) as stage:
        peer = WorkerPeer(stage)
        poll = peer.begin_poll(pool)
        began = time.monotonic()

        stage.run(stage.door.close())

        [error] = poll.result(30.0)
        assert isinstance(error, ErrorMessage)
        assert (error.code, error.message) == ("UNAVAILABLE", "the server is going down; try again")
        assert time.monotonic() - began < 2.0


# ---------------------------------------------------------------------------------------------------- what it was given


async def sweep(stage: Stage) -> None:
    stage.door._http.sessions.tick()


def test_a_worker_that_hung_up_in_the_middle_of_a_poll_is_missed_sooner(
    stage: Stage, peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        stage.http.post(f"/v1/worker/{peer.name}?heard=0&wait=15", headers={"Authorization": f"Bearer {peer.token}"}, timeout=0.1)
    until(lambda: peer.at_server is not None and not peer.at_server.users, what="the server has noticed")
    other = WorkerPeer(stage)
    other.poll(0, 0)

    monkeypatch.setattr(worker_sessions, "LEFT_S", 0.0)
    stage.run(sweep(stage))

    assert (peer.credit, other.credit) == (None, 0)


def state_of(peer: WorkerPeer, job_id: str) -> str:
    return str(peer.stage.get(f"/v1/jobs/{job_id}").json()["state"])


def test_a_job_that_a_lost_worker_never_heard_of_is_anybodys_at_once(
    stage: Stage, peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.say(GiveCredit(1))
    job_id = peer.submit()
    until(lambda: peer.at_server is not None and peer.at_server._kept, what="it is assigned")

    monkeypatch.setattr(worker_sessions, "KEPT_S", 0.0)
    stage.run(sweep(stage))

    until(lambda: state_of(peer, job_id) == "PENDING", 30.0, "it waits for another worker")


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_job_that_a_lost_worker_has_is_its_own_also_if_it_was_sent_again_unheard(
    stage: Stage, peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch, confirmed: bool
) -> None:
    monkeypatch.setattr(worker_messages, "REDELIVER_AFTER_S", 0.01)
    peer.say(GiveCredit(1))
    job_id = peer.submit()
    peer.take()
    if confirmed:
        peer.post("?heard=1")
    until(lambda: peer.at_server is not None and len(peer.at_server._kept) >= 2 - confirmed, 30.0, "it is sent again")

    monkeypatch.setattr(worker_sessions, "KEPT_S", 0.0)
    stage.run(sweep(stage))
    monkeypatch.undo()

    # it is not given to the next one that asks, as long as its lease lasts
    other = WorkerPeer(stage, patterns=(peer.subject,))
    other.say(GiveCredit(1))
    [second] = [peer.submit()]
    assert other.take().job_id == second
    assert state_of(peer, job_id) == "ASSIGNED"


# ---------------------------------------------------------------------------------------------------- large things


def test_a_worker_reads_the_inputs_of_the_jobs_that_it_holds_and_no_others(stage: Stage, peer: WorkerPeer) -> None:
    data = secrets.token_bytes(100_000)
    sha256 = hashlib.sha256(data).hexdigest()
    assert stage.call("PUT", f"/v1/blobs/{sha256}", stage.client, content=data).status_code == 200
    file = InputFile("data.bin", sha256=sha256, size_bytes=len(data))
    job_id = peer.submit(files=[file])
    other = peer.submit()

    def get(token: str = peer.token, job_id: str = job_id, **who: str) -> httpx.Response:
        params = {"job_id": job_id, "worker_id": peer.worker_id, "incarnation": "one", **who}
        return stage.call("GET", f"/v1/blobs/{sha256}", token, params=params)

    before = get()
    peer.say(GiveCredit(1))
    assert peer.take().job_id == job_id
    stranger = WorkerPeer(stage)

    assert get().content == data
    others_words = [
        before,
        get(incarnation="two"),
        get(worker_id="somebody"),
        get(job_id=other),
        get(stranger.token, worker_id=stranger.worker_id),
        get(job_id="no-such-job"),
    ]
    assert [refusal(answer) for answer in others_words] == [(404, "NOT_FOUND")] * 6
    assert refusal(get(stranger.token)) == (403, "FORBIDDEN")  # who knows all of it but has another token
    assert refusal(get(worker_id="")) == (400, "INVALID_PAYLOAD")


def test_a_worker_sends_a_large_result(stage: Stage, peer: WorkerPeer) -> None:
    data = secrets.token_bytes(100_000)
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    who = {"worker_id": peer.worker_id, "incarnation": "one"}

    offers = [stage.call("POST", path, peer.token, params=who, json={"size_bytes": len(data)}).json()["have"]]
    put = stage.call("PUT", path, peer.token, params=who, content=data)
    offers.append(stage.call("POST", path, peer.token, params=who, json={"size_bytes": len(data)}).json()["have"])

    assert put.status_code == 200, put.text
    assert offers == [False, True]
    assert peer.credit == 0  # its own connection is as it was
