"""A worker and a client with valid tokens of scope a.> against jobs of other scopes: real servers on every store.

The attacker knows all that it could have learned: ids of jobs, leases and workers, incarnations, the sha256 of an input. It comes
over TCP and over HTTP, to the server of its victim and, where servers share the store, to the other one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tasuki import Client
from tasuki.core import protocol
from tasuki.core.access import token_sha256
from tasuki.core.job import BlobRef, JobSpec, OnDisconnect, Outcome, Progress
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    BlobGet,
    CancelJobs,
    Chunk,
    Claim,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    LogPiece,
    Message,
    Reply,
    Request,
    SubmitJobs,
    Subscribe,
    Welcome,
)
from tasuki.doors.http.routes import ADMINS, ROUTES
from tasuki.wire.messages import FrameDecoder, decode, encode
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess, start_servers
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

VICTIM, CALCULATOR, INCARNATION = "victim", "calculator", "of-the-victim"
SECRET = "TOP-SECRET"
SOON_S = 20.0
NO_JOB = "nothing"
HTTP = httpx.Client(verify=False, trust_env=False, timeout=2 * SOON_S)
IDS = re.compile(r"'(held|waiting|ended|leased|nothing)'|(?<=corr_id=)\d+|(?<=fenced=\[\(')[\w.]+")


def bound_token(server: ServerProcess, worker_id: str, scope: str) -> str:
    """Return a token such as enrolment makes."""
    secret = f"tsk_w_{secrets.token_hex(16)}"
    row = {"token_id": worker_id, "kind": "worker", "sha256": token_sha256(secret), "scope": [scope], "worker_id": worker_id}
    with server.client() as client:
        client.wait(client.aio.call("token.create", **row))
    return secret


def hello_of(worker_id: str, token: str = "", pattern: str = "a.x", **fields: Any) -> HelloWorker:
    fields = {"incarnation": INCARNATION, "patterns": (pattern,), **fields}
    return HelloWorker(msg_id=1, worker_id=worker_id, token=token, **fields)


# ---------------------------------------------------------------------------------------------------- the victims


class Victims:
    """Jobs of b.> and of an app: one is run by a TCP worker, one by an HTTP worker, one waits, one has ended."""

    jobs = ("held", "waiting", "ended", "leased")

    def __init__(self, servers: list[ServerProcess], stack: contextlib.ExitStack, folder: Path) -> None:
        self.servers, self.here = servers, servers[0]
        self.client: Client = stack.enter_context(self.here.client())
        document = folder / "input.bin"
        document.write_bytes(SECRET.encode() * 20_000)
        self.sha256 = hashlib.sha256(document.read_bytes()).hexdigest()
        self._tcp_worker(stack)
        self._finish_one()
        self.client.submit(subject="b.x", payload=SECRET.encode(), files=[document], job_id="held")
        self.claim = self._granted()
        self.worker.send(JobsStarted([self.claim]))
        self._read_input()
        self.client.submit(subject="b.y", payload=SECRET.encode(), job_id="waiting", not_before=time.time() + 3600)
        self._http_worker()
        until(lambda: self.client.status("held").state == "RUNNING", SOON_S, "the victim runs its job")

    def _tcp_worker(self, stack: contextlib.ExitStack) -> None:
        self.worker = stack.enter_context(RawPeer(self.here.url))
        self.worker.send(hello_of(VICTIM, bound_token(self.here, VICTIM, "b.>"), "b.>", ttl_s=600.0))
        assert isinstance(self.worker.receive(), Welcome)
        self.worker.send(GiveCredit(2))

    def _granted(self) -> Claim:
        while not isinstance(assigned := self.worker.receive(SOON_S), AssignJobs):
            assert assigned is not None, "the server hung up"
        [grant] = assigned.grants
        return Claim(grant.job_id, grant.lease_id, grant.attempt)

    def _finish_one(self) -> None:
        ended = self.client.submit(subject="b.x", payload=SECRET.encode(), job_id="ended")
        claim = self._granted()
        outcome = Outcome(result=f"{SECRET} result".encode())
        self.worker.send(JobsFinished([Ending(claim.job_id, claim.lease_id, claim.attempt, outcome)]))
        ended.result(SOON_S)

    def _http_worker(self) -> None:
        self.bearer = {"Authorization": f"Bearer {bound_token(self.here, CALCULATOR, 'job.assign.zpe')}"}
        self.client.submit(subject="job.assign.zpe", payload=f'"{SECRET}"'.encode(), job_id="leased")
        leased = HTTP.post(f"{self.here.http_url}/calc/zpe/compute/jobs/lease?wait=10", headers=self.bearer)
        self.lease_id = leased.json()["lease_id"]
        inner, _, attempt = self.lease_id.rpartition(".")
        self.http_claim = Claim("leased", inner, int(attempt))
        until(lambda: self.client.status("leased").state == "RUNNING", SOON_S, "the HTTP worker has its job")

    def _read_input(self) -> None:
        """Read the input as only the holder of the lease may."""
        self.worker.send(BlobGet(6, self.sha256, "held"))
        data = b""
        while not isinstance(piece := self.worker.receive(SOON_S), Chunk) or not piece.last:
            data += piece.data if isinstance(piece, Chunk) else b""
        assert hashlib.sha256(data + piece.data).hexdigest() == self.sha256

    def finish(self) -> None:
        """Report the result: it is the job's."""
        self.worker.send(JobsFinished([Ending("held", self.claim.lease_id, self.claim.attempt, Outcome(result=b"right"))]))
        assert self.client.job("held").result(SOON_S) == b"right"

    @property
    def claims(self) -> list[Claim]:
        return [self.claim, self.http_claim]

    def seen(self) -> list[Any]:
        """Return all that an administrator sees of the jobs."""
        stories = [self.client.explain(job_id).story for job_id in self.jobs]
        return [self.client.status(job_id) for job_id in self.jobs] + stories

    def go_on(self) -> None:
        """Check that both workers still hold their leases, and that nothing was said to the first in the meantime."""
        self.worker.send(Heartbeat(7, [self.claim]))
        answer = self.worker.receive()
        assert isinstance(answer, HeartbeatAnswer), answer
        assert (answer.cancel, answer.lost) == ([], [])
        url = f"{self.here.http_url}/calc/zpe/compute/jobs/leased/renew"
        renewed = HTTP.post(url, headers=self.bearer, json={"lease_id": self.lease_id})
        assert (renewed.status_code, renewed.json()["cancel"]) == (200, False)


@pytest.fixture(scope="module", params=["sqlite-1", "postgresql-1", "postgresql-2", "redis-1", "redis-2"])
def victims(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    """All attacks on one store meet the same victims, at one server or at two."""
    kind, _, count = request.param.partition("-")
    folder, store = tmp_path_factory.mktemp(request.param), ""
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            postgres = request.getfixturevalue("postgres")
            store = postgres.borrow()
            stack.callback(postgres.give_back, store)
        elif kind == "redis":
            store = request.getfixturevalue("redis_service").url()
        blobs = str(folder / "blobs") if store else ""
        options = ("--http", "127.0.0.1:0", "--app", "zpe")
        made = Victims(stack.enter_context(start_servers(folder, int(count), *options, store=store, blobs=blobs)), stack, folder)
        yield made
        made.finish()


@pytest.fixture(autouse=True)
def unharmed(victims: Victims) -> Iterator[None]:
    """After the attacks the jobs are as before, and their workers go on."""
    before = victims.seen()
    yield
    assert victims.seen() == before
    victims.go_on()


# ---------------------------------------------------------------------------------------------------- the attacker's ways in

Exchange = Callable[[ServerProcess, str, HelloWorker | None, list[Message]], list[Message]]


def over_tcp(server: ServerProcess, token: str, hello: HelloWorker | None, messages: list[Message]) -> list[Message]:
    """Say Hello (as a client, unless as a worker) and the messages; return the answers, until there is one for each."""
    with RawPeer(server.url) as peer:
        first = peer.hello_client(token) if hello is None else peer.send(replace(hello, token=token)).receive()
        if not isinstance(first, Welcome):
            return [] if first is None else [first]
        answers: list[Message] = []
        peer.send(*messages)
        while open_requests(messages, answers) and (answer := peer.receive(SOON_S)) is not None:
            answers.append(answer)
        return answers


def over_http(server: ServerProcess, token: str, hello: HelloWorker | None, messages: list[Message]) -> list[Message]:
    """Do the same with requests."""
    post = partial(post_frames, server, token)
    if hello is None:
        return post(protocol.FRAMES_PATH, messages)[1]
    session, answers = post(protocol.WORKER_PATH, [hello])
    if not session:
        return answers
    path = f"{protocol.WORKER_PATH}/{session}"
    answers = post(f"{path}?said=1", messages)[1]
    while open_requests(messages, answers) and not any(isinstance(answer, ErrorMessage) for answer in answers):
        answers += post(f"{path}?heard={len(answers)}&wait={SOON_S}", [])[1]
    return answers


def open_requests(messages: list[Message], answers: list[Message]) -> int:
    """Return how many messages have still to be answered. A start is answered only if it is refused, with a corr_id of -1."""
    asked = sum(isinstance(message, JobsFinished) or getattr(message, "msg_id", 0) > 0 for message in messages)
    return asked - sum(getattr(answer, "corr_id", 0) >= 0 for answer in answers)


def post_frames(server: ServerProcess, token: str, path: str, messages: list[Message]) -> tuple[str, list[Message]]:
    """Return the session, if one was opened, and the messages of the answer; a refusal of the request is an ErrorMessage."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": protocol.FRAMES_TYPE}
    response = HTTP.post(server.http_url + path, content=b"".join(map(encode, messages)), headers=headers)
    if response.status_code != 200:
        error = response.json()["error"]
        return "", [ErrorMessage(0, error["code"], error["message"])]
    frames = FrameDecoder(protocol.FRAME_MAX_BYTES).feed(response.content)
    session = response.headers.get(protocol.SESSION_HEADER, "")
    return session, [decode(frame, protocol.FRAME_MAX_BYTES) for frame in frames]


@pytest.fixture(params=[over_tcp, over_http])
def exchange(request: pytest.FixtureRequest) -> Exchange:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def worker_token(victims: Victims) -> str:
    return victims.here.create_token("worker", scope=("a.>",))


@pytest.fixture(scope="module")
def client_token(victims: Victims) -> str:
    return victims.here.create_token("client", scope=("a.>",))


def check_refused(answers: list[Message], attack: str) -> None:
    """Check that nothing was given, done or told: not even whether a job exists."""
    assert answers, attack
    for answer in answers:
        match answer:
            case ErrorMessage():
                assert answer.code in ("FORBIDDEN", "NOT_FOUND", "PROTOCOL", "INVALID", "INVALID_PAYLOAD"), (attack, answer)
            case HeartbeatAnswer():
                assert answer.cancel == [], (attack, answer)
            case JobsRecorded():
                assert answer.recorded == [], (attack, answer)
            case Accepted():
                assert [(one.code, one.state) for one in answer.exceptions] == [("FORBIDDEN", "")] * answer.count, (
                    attack,
                    answer,
                )
            case Reply():
                assert answer.body == {"jobs": [], "cursor": None}, (attack, answer)
            case _:
                raise AssertionError((attack, answer))
    assert SECRET not in repr(answers), attack
    shown = {IDS.sub("ID", repr(answer)) for answer in answers if not isinstance(answer, HeartbeatAnswer)}
    assert len(shown) <= 1, f"{attack}: the answers for different jobs are not the same: {shown}"


# ---------------------------------------------------------------------------------------------------- a malicious worker


def ending(claim: Claim, **outcome: Any) -> JobsFinished:
    return JobsFinished([Ending(claim.job_id, claim.lease_id, claim.attempt, Outcome(**outcome))])


WORKER_ATTACKS: dict[str, Callable[[Claim, str], Message]] = {
    "renew": lambda claim, sha256: Heartbeat(8, [claim], {claim.lease_id: Progress(0.5, "forged")}),
    "start": lambda claim, sha256: JobsStarted([claim]),
    "give back": lambda claim, sha256: JobsReleased([claim]),
    "finish": lambda claim, sha256: ending(claim, result=b"forged"),
    "fail": lambda claim, sha256: ending(claim, error_code="EXIT_CODE", message="forged"),
    "fail for good": lambda claim, sha256: ending(claim, error_code="EXIT_CODE", permanent=True),
    "end as canceled": lambda claim, sha256: ending(claim, error_code="CANCELED"),
    "finish with its input": lambda claim, sha256: ending(claim, result_ref=BlobRef(sha256, 200_000)),
    "read its input": lambda claim, sha256: BlobGet(5, sha256, claim.job_id),
    "subscribe": lambda claim, sha256: Subscribe(5, ("b.>",)),
    "forge its log": lambda claim, sha256: LogPiece(1, 0, b"forged", 6, 6),
    "ask as a client": lambda claim, sha256: Request(5, "get", {"job_ids": [claim.job_id]}),
    "cancel": lambda claim, sha256: CancelJobs(5, [claim.job_id]),
}


def test_a_worker_of_another_scope_can_do_nothing_to_leases_that_it_knows(
    victims: Victims, exchange: Exchange, worker_token: str
) -> None:
    claims = [*victims.claims, Claim(NO_JOB, "0123456789abcdef", 1)]
    for server, (name, attack) in itertools.product(victims.servers, WORKER_ATTACKS.items()):
        messages = [attack(claim, victims.sha256) for claim in claims]
        hello = hello_of("stranger", resumed=True)
        answers = exchange(server, worker_token, hello, [GiveCredit(9), *messages, Heartbeat(9, claims)])

        check_refused(answers, name)
        renewals = [answer.lost for answer in answers if isinstance(answer, HeartbeatAnswer)]
        assert renewals == [] or renewals[-1] == [claim.lease_id for claim in claims], name


HELLOS: dict[str, HelloWorker] = {
    "the TCP worker": hello_of(VICTIM),
    "the TCP worker, again": hello_of(VICTIM, resumed=True),
    "its connection for blobs": hello_of(VICTIM, transfers=True),
    "the HTTP worker": hello_of(CALCULATOR, incarnation="http", resumed=True),
    "a worker of its subjects": hello_of("stranger", pattern="b.>"),
    "a worker of all subjects": hello_of("stranger", pattern=">"),
    "a worker with the name of all jobs without a subject": hello_of("default", pattern="a.>"),
    "a worker with the name of the app": hello_of("zpe", pattern="a.>"),
}


def test_a_worker_of_another_scope_cannot_say_that_it_is(
    victims: Victims, exchange: Exchange, worker_token: str, rogue_token: str
) -> None:
    messages = [Heartbeat(5, victims.claims), BlobGet(6, victims.sha256, "held")]
    for server, token, (name, hello) in itertools.product(victims.servers, (worker_token, rogue_token), HELLOS.items()):
        answers = exchange(server, token, hello, messages)

        check_refused(answers, name)
        assert isinstance(answers[0], ErrorMessage), f"it was let in as {name}"


@pytest.fixture(scope="module")
def rogue_token(victims: Victims) -> str:
    return bound_token(victims.here, "rogue", "a.>")


# ---------------------------------------------------------------------------------------------------- a malicious client

CLIENT_ATTACKS: dict[str, Callable[[str, str], Message]] = {
    "get": lambda job_id, sha256: Request(5, "get", {"job_ids": [job_id]}),
    "get its result": lambda job_id, sha256: Request(5, "get", {"job_ids": [job_id], "result": True}),
    "find": lambda job_id, sha256: Request(5, "find", {"subject": ">"}),
    "find by its text": lambda job_id, sha256: Request(5, "find", {"text": job_id}),
    "find by its worker": lambda job_id, sha256: Request(5, "find", {"worker_id": VICTIM}),
    "explain": lambda job_id, sha256: Request(5, "explain", {"job_id": job_id}),
    "read its log": lambda job_id, sha256: Request(5, "logs", {"job_id": job_id}),
    "watch": lambda job_id, sha256: Request(5, "watch", {"job_ids": [job_id]}),
    "requeue": lambda job_id, sha256: Request(5, "requeue", {"job_ids": [job_id]}),
    "cancel": lambda job_id, sha256: CancelJobs(5, [job_id]),
    "read its input": lambda job_id, sha256: BlobGet(5, sha256, job_id),
    "submit to its subject": lambda job_id, sha256: SubmitJobs(5, [JobSpec(job_id="mine", subject="b.x")]),
    "submit it again": lambda job_id, sha256: SubmitJobs(5, [JobSpec(job_id=job_id, subject="b.x")], True, "rerun"),
    "detach its worker": lambda job_id, sha256: Request(5, "detach", {"worker_id": VICTIM, "now": True}),
    "revoke its token": lambda job_id, sha256: Request(5, "token.revoke", {"token_id": VICTIM}),
    "revoke its worker": lambda job_id, sha256: Request(5, "worker.revoke", {"worker_id": VICTIM}),
    "list the workers": lambda job_id, sha256: Request(5, "workers"),
    "report its end": lambda job_id, sha256: JobsFinished([]),
}


def test_a_client_of_another_scope_can_do_nothing_to_jobs_that_it_knows(
    victims: Victims, exchange: Exchange, client_token: str
) -> None:
    for server, (name, attack) in itertools.product(victims.servers, CLIENT_ATTACKS.items()):
        messages = [attack(job_id, victims.sha256) for job_id in (*victims.jobs, NO_JOB)]

        check_refused(exchange(server, client_token, None, messages), name)


# ---------------------------------------------------------------------------------------------------- requests of either

REQUESTS = (
    *(f"{route.method} {route.path}" for route in ROUTES if "{job_id}" in route.path or "{worker_id}" in route.path),
    *(f"{route.method} {route.path}" for route in ROUTES if route.kinds == ADMINS and "{" not in route.path.replace("{app}", "")),
    "GET /v1/blobs/{sha256}?job_id={job_id}",
    "GET /v1/blobs/{sha256}?job_id={job_id}&worker_id=victim&incarnation=of-the-victim",
    "GET /v1/blobs/{sha256}?job_id={job_id}&worker_id=stranger&incarnation=of-the-victim",
    "POST /calc/{app}/compute/jobs/lease",
)


@pytest.mark.parametrize("kind", ["worker", "client"])
def test_no_request_with_a_token_of_another_scope_tells_or_does_anything(
    victims: Victims, worker_token: str, client_token: str, kind: str
) -> None:
    bodies = {
        "renew": {"lease_id": victims.lease_id},
        "result": {"lease_id": victims.lease_id, "result": {}, "summary_text": "", "freqs_csv": ""},
        "failed": {"lease_id": victims.lease_id, "error_code": "FORGED", "permanent": True},
    }
    token = worker_token if kind == "worker" else client_token
    for server, line in itertools.product(victims.servers, REQUESTS):
        answers = set()
        for job_id in (*victims.jobs, NO_JOB):
            method, path = line.format(app="zpe", job_id=job_id, worker_id=CALCULATOR, sha256=victims.sha256).split()
            body = bodies.get(path.rpartition("/")[2], {}) if method == "POST" else None
            headers = {"Authorization": f"Bearer {token}"}
            response = HTTP.request(method, server.http_url + path, json=body, headers=headers)
            assert response.status_code in (400, 403, 404), (line, response.text)
            answers.add(IDS.sub("ID", response.text))
        assert len(answers) == 1, f"{line}: the answers for different jobs are not the same: {answers}"


BATCHES: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "/calc/zpe/compute/jobs/renew": lambda lease: {"leases": [lease]},
    "/calc/zpe/compute/jobs/result": lambda lease: {
        "results": [{**lease, "result": {"forged": True}, "summary_text": "", "freqs_csv": ""}]
    },
    "/calc/zpe/compute/jobs/failed": lambda lease: {"failures": [{**lease, "error_code": "FORGED", "permanent": True}]},
    "/v1/jobs/cancel": lambda lease: {"job_ids": [lease["job_id"]]},
    "/v1/jobs/requeue": lambda lease: {"job_ids": [lease["job_id"]]},
}


def test_no_batch_of_another_token_tells_or_does_anything(victims: Victims, worker_token: str, client_token: str) -> None:
    """Also the token of another worker of the same app, which knows the lease."""
    of_the_app = bound_token(victims.here, f"second-{len(victims.servers)}", "job.assign.zpe")
    for server, token, (path, body_of) in itertools.product(
        victims.servers, (worker_token, client_token, of_the_app), BATCHES.items()
    ):
        for job_id in (*victims.jobs, NO_JOB):
            body = body_of({"job_id": job_id, "lease_id": victims.lease_id})
            response = HTTP.post(server.http_url + path, json=body, headers={"Authorization": f"Bearer {token}"})
            items = response.json().get("items", [{"status": response.status_code}])
            assert {item["status"] for item in items} <= {403, 404, 409}, (path, job_id, response.text)
            assert job_id == "leased" or {item["status"] for item in items} <= {403, 404}, (path, job_id, response.text)
            assert SECRET not in response.text


# ---------------------------------------------------------------------------------------------------- shutting it out


@pytest.mark.parametrize("verb", ["token.revoke", "detach"])
def test_an_administrator_frees_the_jobs_that_a_worker_took_and_keeps(victims: Victims, verb: str) -> None:
    here, there = victims.here, victims.servers[-1]
    token_id, token = there.create_named_token("worker", scope=("c.>",))
    names = [f"{verb}-{number}" for number in range(20)]
    with RawPeer(there.url) as hoarder:
        keep = {"on_disconnect": OnDisconnect.KEEP, "reconnect_grace_s": 3600.0}
        hoarder.send(hello_of("hoarder", token, f"c.{verb}", ttl_s=600.0, **keep)).receive()
        hoarder.send(GiveCredit(20))
        for name in names:
            victims.client.submit(subject=f"c.{verb}", payload=b"", job_id=name)
        states_are(victims.client, names, "ASSIGNED")

    with here.client() as client:
        client.wait(client.aio.call(verb, token_id=token_id, worker_id="hoarder", now=True))

    states_are(victims.client, names, "PENDING")
    assert {victims.client.status(name).losses for name in names} == {0}


def states_are(client: Client, names: list[str], state: str) -> None:
    until(lambda: {client.status(name).state for name in names} == {state}, SOON_S, f"they are {state}")
