"""Peers with a valid token that ask too much, report nonsense or do not read: bounded, and never at the cost of others."""

from __future__ import annotations

import hashlib
import math
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from tasuki import Client
from tasuki.core.job import InputFile, JobSpec, Outcome
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    BlobGet,
    CancelJobs,
    Claim,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    Message,
    Reply,
    Request,
    SubmitJobs,
)
from tasuki.wire.messages import encode
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess, open_files, peer_ports, rss_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
MIB = 1 << 20
Served = Callable[[], None]


@pytest.fixture(scope="module")
def listed_jobs(server: ServerProcess, good_client: Client) -> None:
    """Enough finished jobs that a page of them is large."""
    specs = [JobSpec(job_id=f"listed-{n}", subject="noop", headers={"note": "x" * 400}) for n in range(1000)]
    for handle in good_client.submit_many(specs):
        handle.outcome(timeout=30)


# ---------------------------------------------------------------------------------------------------- slow readers


def test_peer_that_asks_much_and_never_reads_is_bounded_and_others_are_served(
    server: ServerProcess, listed_jobs: None, others_are_served: Served
) -> None:
    # Given a peer with a tiny receive buffer that never reads
    before = rss_bytes(server.pid)
    with RawPeer(server.url, receive_buffer_bytes=4096) as peer:
        peer.as_client(server.token)
        # When it asks for large pages again and again
        request = encode(Request(7, "find", {"limit": 1000}))
        peer.flood(request * 100, limit_bytes=2 * MIB)
        # Then others get their answers, and its unread answers do not pile up
        others_are_served()
        assert rss_bytes(server.pid) - before < 120 * MIB
    others_are_served()


def test_questions_that_nobody_waits_for_any_more_are_not_worked_off(
    server: ServerProcess, listed_jobs: None, others_are_served: Served
) -> None:
    # Given a peer that asks for thousands of pages in one go and hangs up
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        peer.flood(encode(Request(7, "find", {"limit": 1000})) * 3000, limit_bytes=1)
    # Then the reader is free for others at once
    began = time.monotonic()
    others_are_served()
    assert time.monotonic() - began < 4


def test_slow_reader_that_is_hung_up_on_keeps_no_memory(server: ServerProcess, others_are_served: Served) -> None:
    # Given peers that have megabytes of unread answers waiting
    big = b"x" * 60_000
    token_id, token = server.create_named_token("client")
    with server.client(token=token) as client:
        jobs = client.submit_many([JobSpec(job_id=f"unread-{n}", subject="echo.unread", payload=big) for n in range(100)])
        assert all(job.result(timeout=30) == big for job in jobs)
    peers = [RawPeer(server.url, receive_buffer_bytes=4096).as_client(token) for _ in range(5)]
    for peer in peers:
        peer.send(Request(2, "watch", {"job_ids": [job.job_id for job in jobs]}))
    ports = {peer.socket.getsockname()[1] for peer in peers}
    until(lambda: all(select.select([peer.socket], [], [], 0)[0] for peer in peers), what="answers wait for all of them")
    assert peer_ports(server.pid, server.port) >= ports
    # When the server hangs up on them
    with server.client() as admin:
        admin.wait(admin.aio.call("token.revoke", token_id=token_id))
    others_are_served()
    # Then their connections are really gone soon, though they never read what was left for them
    until(lambda: not ports & peer_ports(server.pid, server.port), timeout_s=8, what="the server drops the hung-up connections")
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def large_job(server: ServerProcess, tmp_path: Path) -> tuple[str, BlobGet]:
    """A token, and the download of an input of a job of it whose description is large too."""
    token = server.create_token("client")
    document = tmp_path / "input"
    document.write_bytes(os.urandom(8 * MIB))
    with server.client(token=token) as client:
        job = client.submit(subject="nobody", files=[document], headers={f"h{n}": "x" * 2500 for n in range(64)}, watch=False)
    return token, BlobGet(2, hashlib.sha256(document.read_bytes()).hexdigest(), job.job_id)


@pytest.mark.parametrize("what", ["downloads", "answers"])
def test_what_one_token_does_not_read_on_many_connections_is_bounded_and_others_are_served(
    server: ServerProcess, large_job: tuple[str, BlobGet], others_are_served: Served, what: str
) -> None:
    token, download = large_job
    asked: list[Message] = [replace(download, msg_id=number) for number in range(2, 6)]
    if what == "answers":
        asked = [Request(number, "get", {"job_ids": [download.job_id]}) for number in range(2, 15)]
    before, connections = rss_bytes(server.pid), 60 if what == "downloads" else 200
    with ExitStack() as stack:
        for _ in range(connections):
            peer = stack.enter_context(RawPeer(server.url, receive_buffer_bytes=4096))
            with suppress(ConnectionError):
                peer.as_client(token).send(*asked)
        others_are_served()
        assert rss_bytes(server.pid) - before < 150 * MIB
    others_are_served()


def test_many_downloads_on_one_connection_do_not_use_up_the_descriptors(
    server: ServerProcess, good_client: Client, others_are_served: Served, tmp_path
) -> None:
    # Given a job with a large input, and its submitter
    path = tmp_path / "input.bin"
    path.write_bytes(os.urandom(2 * MIB))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with server.client() as client:
        client.submit(job_id="many-downloads", subject="nobody.takes", files=[path], watch=False)
    before = open_files(server.pid)
    highest = before
    with RawPeer(server.url, receive_buffer_bytes=4096) as peer:
        peer.as_client(server.token)
        # When it asks for it 2,000 times without reading
        peer.flood(b"".join(encode(BlobGet(n, sha256, "many-downloads")) for n in range(1, 2001)), limit_bytes=1)
        for _ in range(20):
            highest = max(highest, open_files(server.pid))
            others_are_served()
    # Then only a few were open at once
    assert highest - before < 100


# ---------------------------------------------------------------------------------------------------- nonsense from workers

HUGE = 1 << 63
HUGER = (1 << 64) - 1


@pytest.fixture(scope="module")
def worker_token(server: ServerProcess) -> str:
    return server.create_token("worker")


@pytest.fixture
def held(server: ServerProcess, worker_token: str) -> Iterator[tuple[RawPeer, Claim]]:
    """A worker that speaks bytes, and an attempt that it really holds."""
    subject = f"raw.{os.urandom(4).hex()}"
    with RawPeer(server.url) as peer:
        peer.as_worker(worker_token, worker_id=f"raw-{os.urandom(4).hex()}", patterns=(subject,)).send(GiveCredit(1))
        with server.client() as client:
            client.submit(subject=subject, watch=False)
        assigned = peer.receive()
        assert isinstance(assigned, AssignJobs), assigned
        grant = assigned.grants[0]
        yield peer, Claim(grant.job_id, grant.lease_id, grant.attempt)


def strange_reports(claim: Claim) -> dict[str, Message]:
    job_id, lease_id, attempt = claim.job_id, claim.lease_id, claim.attempt

    def ending(outcome: Outcome, attempt: int = attempt, lease_id: str = lease_id, **fields: float) -> Message:
        return JobsFinished([Ending(job_id, lease_id, attempt, outcome, **fields)])

    return {
        "finish-attempt-2^63": ending(Outcome(), HUGE),
        "finish-attempt-negative": ending(Outcome(), -HUGE),
        "finish-exit-code-2^63": ending(Outcome(exit_code=HUGE)),
        "finish-exit-code-2^64-1": ending(Outcome(exit_code=HUGER)),
        "fail-exit-code-2^63": ending(Outcome(exit_code=HUGE, error_code="EXIT_CODE")),
        "fail-attempt-2^63": ending(Outcome(error_code="EXIT_CODE"), HUGE),
        "finish-started-nan": ending(Outcome(), started_at=math.nan),
        "finish-started-inf": ending(Outcome(), started_at=math.inf),
        "fail-started-nan": ending(Outcome(error_code="X"), started_at=math.nan),
        "finish-long-lease": ending(Outcome(), lease_id="l" * 500_000),
        "fail-long-code": ending(Outcome(error_code="E" * 500_000)),
        "fail-long-message": ending(Outcome(error_code="E", message="m" * 3_000_000)),
        "fail-nul-message": ending(Outcome(error_code="E\0", message="\0m\0")),
        "finish-large-inline-result": ending(Outcome(result=bytes(3 * MIB))),
        "finish-strange-sha256": ending(Outcome(result=b"x", result_sha256="../../x")),
        "finish-meta-huge-number": ending(Outcome(meta={"n": HUGER})),
        "fail-empty-code": ending(Outcome(error_code="")),
        "start-attempt-2^63": JobsStarted([Claim(job_id, lease_id, HUGE)]),
        "beat-attempt-2^63": Heartbeat(99, [Claim(job_id, lease_id, HUGE)]),
        "beat-attempt-negative": Heartbeat(99, [Claim(job_id, lease_id, -HUGE)]),
        "release-attempt-2^63": JobsReleased([Claim(job_id, lease_id, HUGE)]),
        "release-long-reason": JobsReleased([claim], "r" * 50_000),
        "unknown-job": JobsFinished([Ending("no-such-job", lease_id, attempt, Outcome())]),
        "nul-in-job-id": JobsFinished([Ending("no\0such", lease_id, attempt, Outcome())]),
        "same-finish-twice-in-one-frame": JobsFinished([Ending(job_id, lease_id, attempt, Outcome())] * 2),
        "credit-2^63": GiveCredit(HUGE),
        "credit-negative": GiveCredit(-1),
    }


@pytest.mark.parametrize("name", list(strange_reports(Claim("j", "l", 1))))
def test_nonsense_from_a_worker_harms_nobody_else(held: tuple[RawPeer, Claim], others_are_served: Served, name: str) -> None:
    # Given a worker that holds an attempt
    peer, claim = held
    # When it reports what cannot be
    peer.send(strange_reports(claim)[name])
    # Then it alone is concerned: everybody else is served, now and later
    others_are_served()
    others_are_served()


def test_worker_cannot_finish_what_another_holds(server: ServerProcess, held: tuple[RawPeer, Claim], worker_token: str) -> None:
    # Given an attempt that one worker holds, and another that knows all its numbers
    owner, claim = held
    with RawPeer(server.url) as thief:
        thief.as_worker(worker_token, worker_id="thief", patterns=("nothing.here",))
        # When the other reports it as finished
        thief.send(JobsFinished([Ending(*msgspec_fields(claim), Outcome(result=b"stolen"))]))
        answer = thief.receive()
        # Then it is fenced, and the owner's own report counts
        assert isinstance(answer, JobsRecorded)
        assert [lease_id for lease_id, _ in answer.fenced] == [claim.lease_id]
    owner.send(JobsFinished([Ending(*msgspec_fields(claim), Outcome(result=b"own"))]))
    recorded = owner.receive()
    assert isinstance(recorded, JobsRecorded)
    assert recorded.recorded == [claim.lease_id]
    with server.client() as client:
        assert client.job(claim.job_id).result(timeout=30) == b"own"


def msgspec_fields(claim: Claim) -> tuple[str, str, int]:
    return claim.job_id, claim.lease_id, claim.attempt


def test_client_that_sends_a_workers_frame_is_cut_off(server: ServerProcess, others_are_served: Served) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send(JobsFinished([Ending("j", "l", 1, Outcome())]))
        assert peer.farewell().code == "PROTOCOL"
    others_are_served()


def test_worker_that_sends_a_clients_frame_is_cut_off(
    server: ServerProcess, worker_token: str, others_are_served: Served
) -> None:
    with RawPeer(server.url) as peer:
        peer.as_worker(worker_token, patterns=("nothing.here",)).send(SubmitJobs(5, [JobSpec(job_id="from-a-worker")]))
        assert peer.farewell().code == "PROTOCOL"
    others_are_served()


# ---------------------------------------------------------------------------------------------------- nonsense from clients


@pytest.mark.parametrize(
    "fields",
    [
        {"job_id": ""},
        {"job_id": ".hidden"},
        {"job_id": "../up"},
        {"job_id": "x" * 129},
        {"subject": "a..b"},
        {"subject": "a.*"},
        {"subject": "x" * 100_000},
        {"priority": 10},
        {"priority": -HUGE},
        {"max_retries": HUGE},
        {"max_losses": -1},
        {"backoff_s": math.nan},
        {"timeout_s": math.inf},
        {"timeout_s": 0.0},
        {"not_before": math.nan},
        {"not_before": 1e300},
        {"payload": bytes(65 * 1024)},
        {"exec": "a\0b"},
        {"args": ("x",) * 5000},
        {"args": ("x\0",)},
        {"env": {"A=B": "x"}},
        {"files": (InputFile("../x", data=b""),)},
        {"files": (InputFile("/etc/passwd", data=b""),)},
        {"files": (InputFile("a", data=b""), InputFile("A", data=b""))},
        {"files": (InputFile("a", sha256="../../x", size_bytes=1),)},
        {"files": (InputFile("a", sha256="0" * 64, size_bytes=-1),)},
        {"array_id": "no/slashes"},
        {"headers": {"k": "v" * 3_000_000}},
    ],
    ids=lambda fields: "-".join(fields) + "-" + str(next(iter(fields.values())))[:20],
)
def test_impossible_job_is_refused_by_name_and_the_rest_of_its_frame_is_taken(
    server: ServerProcess, others_are_served: Served, fields: dict[str, object]
) -> None:
    # Given one frame with an impossible job between two good ones
    first, last = f"first-{os.urandom(6).hex()}", f"last-{os.urandom(6).hex()}"
    bad = JobSpec(**{"job_id": f"bad-{os.urandom(6).hex()}", "subject": "noop", **fields})
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id = peer.next_id()
        peer.send(SubmitJobs(msg_id, [JobSpec(job_id=first, subject="noop"), bad, JobSpec(job_id=last, subject="noop")]))
        accepted = peer.answer(msg_id)
    # Then only that one is refused
    assert isinstance(accepted, Accepted), accepted
    assert accepted.count == 3
    assert [item.index for item in accepted.exceptions] == [1], accepted
    assert accepted.exceptions[0].code in {"INVALID", "TOO_LARGE"}
    with server.client() as client:
        assert client.job(first).result(timeout=30) == client.job(last).result(timeout=30) == b""
    others_are_served()


def test_submit_with_an_unknown_on_failed_is_refused(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send(SubmitJobs(50, [JobSpec(job_id="odd", subject="noop")], True, "explode"))
        answer = peer.answer(50)
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "INVALID"


def test_the_same_submit_frame_many_times_is_one_job(server: ServerProcess, others_are_served: Served, tmp_path) -> None:
    # Given a job that leaves a trace of every run
    gate = tmp_path / "gate"
    spec = JobSpec(job_id="repeated-frame", subject="wait", payload=str(gate).encode())
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        # When its frame comes 500 times, with the same msg_id
        peer.send(*[SubmitJobs(60, [spec])] * 500)
        # Then each is answered, and there is one run
        answers = [peer.answer(60) for _ in range(500)]
        assert sum(not answer.exceptions for answer in answers) == 1
        assert {item.state for answer in answers for item in answer.exceptions} <= {"PENDING", "ASSIGNED", "RUNNING"}
        others_are_served()
        gate.touch()
        with server.client() as client:
            assert client.job("repeated-frame").result(timeout=30) == b"the gate is open"
    assert len(gate.with_name("gate.runs").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("verb", "params", "code"),
    [
        ("no-such-verb", {}, "NOT_FOUND"),
        ("get", {}, "INVALID"),
        ("get", {"job_ids": "text"}, "INVALID"),
        ("get", {"job_ids": [1]}, "INVALID"),
        ("get", {"job_ids": ["x"] * 10_001}, "INVALID"),
        ("get", {"job_ids": ["x" * 100_000]}, "NOT_FOUND"),
        ("find", {"limit": 0}, "INVALID"),
        ("find", {"limit": HUGE}, "INVALID"),
        ("find", {"limit": 10, "unknown": 1}, "INVALID"),
        ("find", {"states": ["NO_STATE"]}, "INVALID"),
        ("find", {"subject": "a..b"}, "INVALID"),
        ("find", {"cursor": "nonsense"}, "INVALID"),
        ("find", {"cursor": "9" * 40}, "INVALID"),
        ("find", {"cursor": 12}, "INVALID"),
        ("find", {"text": 5}, "INVALID"),
        ("explain", {}, "INVALID"),
        ("explain", {"job_id": "unknown"}, "NOT_FOUND"),
        ("watch", {"job_ids": ["unknown"]}, "NOT_FOUND"),
        ("watch", {"job_ids": [None]}, "INVALID"),
        ("requeue", {"job_ids": ["unknown"]}, "NOT_FOUND"),
        ("token.create", {}, "INVALID"),
        ("token.create", {"token_id": "t", "kind": "god", "sha256": "x"}, "INVALID"),
        ("token.revoke", {"token_id": "unknown"}, "NOT_FOUND"),
    ],
)
def test_bad_request_is_answered_with_its_code_and_the_connection_goes_on(
    server: ServerProcess, verb: str, params: dict[str, object], code: str
) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        answer = peer.ask(verb, **params)
        assert isinstance(answer, ErrorMessage), answer
        assert answer.code == code, answer
        assert peer.alive()


def test_token_that_exists_already_is_never_changed_and_others_are_served(
    server: ServerProcess, others_are_served: Served
) -> None:
    # Given a client token
    row = {"token_id": "twice", "kind": "client", "sha256": "4" * 64}
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        assert isinstance(peer.ask("token.create", **row), Reply)
        # When the same one is sent again (a repeat after a lost answer), and others with its id or its hash
        for again in (row, {**row, "kind": "admin"}, {**row, "token_id": "other", "kind": "admin"}):
            peer.ask("token.create", **again)
        # Then there is the one, as it was
        listed = peer.ask("token.list")
        assert isinstance(listed, Reply)
        assert [(found["token_id"], found["kind"]) for found in listed.body if found["token_id"] in ("twice", "other")] == [
            ("twice", "client")
        ]
    others_are_served()


def test_cancel_of_an_unknown_job_is_not_found(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send(CancelJobs(70, ["unknown"]))
        answer = peer.answer(70)
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "NOT_FOUND"
