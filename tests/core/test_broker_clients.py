"""Requests of clients to a broker, and the jobs that they may touch."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.access import PeerKind
from tasuki.core.broker.client_messages import ROWS_AT_ONCE
from tasuki.core.broker.events import BlobPiece, DiskSpace, Query, ReceiveBlob, SendBlob, TurnDone
from tasuki.core.job import InputFile, JobSpec, State
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.machine import Ticked
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    BlobGet,
    BlobPut,
    CancelJobs,
    Chunk,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    JobsFinished,
    JobsReleased,
    JobsStarted,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Subscribe,
)
from tasuki.core.store_messages import BlobClaim, BlobPlace
from tasuki.errors import ProtocolError, Unauthorized
from tasuki.stores.batching import execute
from tests.core.broker_stage import TCP, BrokerStage, ending


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


# ---------------------------------------------------------------------------------------------------- which messages


@pytest.mark.parametrize(
    "message",
    [
        GiveCredit(1),
        Subscribe(1, ("a",)),
        JobsStarted([]),
        JobsFinished([]),
        JobsReleased([]),
        AssignJobs(1.0, []),
        Results([]),
        Reply(1),
        HelloWorker(msg_id=1, worker_id="w", incarnation="i"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_client_may_not_send_what_workers_and_servers_send(stage: BrokerStage, message: Any) -> None:
    conn = stage.node()
    stage.tell(conn, message)
    assert isinstance(stage.hung_up[conn], ProtocolError)


@pytest.mark.parametrize(
    "message",
    [SubmitJobs(1, []), CancelJobs(1, []), AssignJobs(1.0, []), Results([]), Reply(1)],
    ids=lambda message: type(message).__name__,
)
def test_a_worker_may_not_send_what_clients_and_servers_send(stage: BrokerStage, message: Any) -> None:
    conn = stage.worker()
    stage.tell(conn, message)
    assert isinstance(stage.hung_up[conn], ProtocolError)


def test_a_clients_heartbeat_is_answered_without_the_store(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.tell(conn, Heartbeat(41))
    assert stage.last(conn, HeartbeatAnswer).corr_id == 41


def test_the_driver_learns_that_a_blob_comes_from_a_worker(stage: BrokerStage) -> None:
    token = stage.token("w", "worker", "a.>")
    conn = stage.worker("w1", peer=TCP, token=token, patterns=("a.>",))
    stage.ask(conn, BlobPut(1, "a" * 64, 3))
    [command] = stage.others
    assert isinstance(command, ReceiveBlob)
    assert command.kind is PeerKind.WORKER


def test_blobs_and_slow_reads_are_handed_to_the_driver_with_who_asks(stage: BrokerStage) -> None:
    conn = stage.client()
    put, chunk, get = BlobPut(1, "a" * 64, 3), Chunk(1, 0, b"abc", True), BlobGet(2, "a" * 64, "job")
    stage.ask(conn, put)
    stage.tell(conn, chunk)
    stage.tell(conn, get)
    identity = stage.broker.sessions[conn].identity
    assert identity is not None
    place = BlobPlace("a" * 64, 3)
    assert stage.others == [
        ReceiveBlob(conn, put, place, identity.owner),
        BlobPiece(conn, chunk),
        SendBlob(conn, get, identity),
    ]


@pytest.mark.parametrize("verb", ["get", "find", "counts", "explain"])
def test_reads_become_queries_under_the_askers_identity(stage: BrokerStage, verb: str) -> None:
    from tasuki.core.protocol import Request

    conn = stage.client()
    stage.worker("w1")
    stage.tell(conn, Request(9, verb, {"job_id": "a"}))
    [query] = stage.others
    assert isinstance(query, Query)
    assert (query.msg_id, query.verb, query.identity.name) == (9, verb, "token:alice")
    assert [worker["worker_id"] for worker in query.workers] == (["w1"] if verb == "explain" else [])


def test_an_unknown_request_is_answered_with_the_known_ones(stage: BrokerStage) -> None:
    answer = stage.request(stage.node(), "frobnicate")
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "NOT_FOUND"
    assert "requeue" in answer.message


@pytest.mark.parametrize("job_ids", [None, "a", [1], {"a": 1}])
@pytest.mark.parametrize("verb", ["watch", "requeue"])
def test_requests_with_job_ids_want_a_list_of_texts(stage: BrokerStage, verb: str, job_ids: Any) -> None:
    answer = stage.request(stage.node(), verb, job_ids=job_ids)
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "INVALID"


# ---------------------------------------------------------------------------------------------------- submit


def test_a_submit_is_acknowledged_after_the_commit_and_not_before(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.tell(conn, SubmitJobs(5, [JobSpec(job_id="a")]))
    turn = stage.broker.next_turn(stage.now())
    assert turn is not None
    assert stage.all(conn, Accepted) == []
    assert stage.job("a") is None


def test_each_job_of_a_submit_is_judged_by_itself_and_named_by_its_index(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.submit(conn, "existed")
    specs = [
        JobSpec(job_id="good"),
        JobSpec(job_id="../bad"),
        JobSpec(job_id="existed"),
        JobSpec(job_id="bad-priority", priority=10),
        JobSpec(job_id="existed", payload=b"other"),
        JobSpec(job_id="also-good"),
    ]
    stage.ask(conn, SubmitJobs(5, specs))
    accepted = stage.last(conn, Accepted)
    assert (accepted.corr_id, accepted.count) == (5, 6)
    told = {item.index: item.code or item.state for item in accepted.exceptions}
    assert told == {1: "INVALID", 2: "PENDING", 3: "INVALID", 4: "CONFLICT"}
    assert [stage.job(job_id) is not None for job_id in ("good", "also-good", "bad-priority")] == [True, True, False]


def test_an_empty_submit_is_answered_too(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.ask(conn, SubmitJobs(5, []))
    assert stage.last(conn, Accepted) == Accepted(5, 0, [])


def test_on_failed_must_be_one_of_two_words(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.ask(conn, SubmitJobs(5, [JobSpec(job_id="a")], True, "explode"))
    assert (stage.last(conn, ErrorMessage).corr_id, stage.last(conn, ErrorMessage).code) == (5, "INVALID")
    assert stage.job("a") is None


def test_a_job_whose_input_blob_is_not_here_or_has_another_size_is_refused(stage: BrokerStage) -> None:
    conn = stage.node()
    gone, here = "a" * 64, "b" * 64
    specs = [
        JobSpec(job_id="without", files=(InputFile("in", sha256=gone, size_bytes=1),)),
        JobSpec(job_id="with", files=(InputFile("in", sha256=here, size_bytes=1),)),
        JobSpec(job_id="other-size", files=(InputFile("in", sha256=here, size_bytes=2),)),
    ]
    stage.store.blobs_stored(stage.store.place_blobs([BlobClaim(here, 1)]))
    stage.ask(conn, SubmitJobs(5, specs))
    assert [(item.index, item.code) for item in stage.last(conn, Accepted).exceptions] == [(0, "NOT_FOUND"), (2, "NOT_FOUND")]
    assert stage.job("with") is not None


def test_a_token_with_a_scope_submits_only_inside_it(stage: BrokerStage) -> None:
    conn = stage.client("client", "alice", "render.>")
    stage.ask(conn, SubmitJobs(5, [JobSpec(job_id="in", subject="render.eu"), JobSpec(job_id="out", subject="other.eu")]))
    assert [(item.index, item.code) for item in stage.last(conn, Accepted).exceptions] == [(1, "FORBIDDEN")]


def test_a_subject_below_job_submit_is_stored_below_job_assign(stage: BrokerStage) -> None:
    conn = stage.client()

    stage.submit(conn, "a", subject="job.submit.books.close")

    job = stage.job("a")
    assert job is not None
    assert job.spec.subject == "job.assign.books.close"
    [grant] = stage.grants(stage.worker(credit=1, patterns=("job.assign.books.>",)))
    assert grant.job_id == "a"


def test_job_submit_and_job_assign_are_one_subject_for_scopes_and_repeats(stage: BrokerStage) -> None:
    conn = stage.client("client", "alice", "job.assign.books")

    for subject in ("job.submit.books", "job.assign.books"):
        stage.submit(conn, "a", subject=subject)
        assert [item.code for item in stage.last(conn, Accepted).exceptions] in ([], [""])  # new, then the same job
    stage.submit(conn, "b", subject="job.submit.other")
    assert [item.code for item in stage.last(conn, Accepted).exceptions] == ["FORBIDDEN"]


def test_no_job_is_taken_while_the_disk_is_full(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.apply(DiskSpace("3 bytes free"))
    stage.submit(conn, "a")
    assert stage.last(conn, ErrorMessage).code == "DISK_FULL"
    assert [server["problem"] for server in stage.broker.describe_servers()] == ["3 bytes free"]
    stage.apply(DiskSpace(""))
    stage.submit(conn, "a")
    assert stage.job("a") is not None


def test_without_watch_no_result_follows(stage: BrokerStage) -> None:
    conn = stage.node()
    stage.ask(conn, SubmitJobs(5, [JobSpec(job_id="a")], watch=False))
    worker = stage.worker(credit=1)
    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0])]))
    assert stage.all(conn, Results) == []


# ---------------------------------------------------------------------------------------------------- whose job it is


def failed_job(stage: BrokerStage, conn: int, job_id: str, **fields: Any) -> None:
    stage.submit(conn, job_id, max_retries=0, **fields)
    worker = stage.worker("breaker", credit=1)
    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0], error_code="EXIT_CODE")]))
    stage.close(worker)
    job = stage.job(job_id)
    assert job is not None
    assert job.state is State.FAILED


ASKERS = {
    "its submitter": (("client", "alice"), True),
    "an admin": (("admin", "root"), True),
    "a token whose scope covers it": (("client", "eu", "render.eu"), True),
    "another client": (("client", "bob"), False),
    "a token of another scope": (("client", "us", "render.us"), False),
}


@pytest.mark.parametrize("asker", ASKERS)
@pytest.mark.parametrize("verb", ["watch", "requeue", "cancel"])
def test_only_those_whose_job_it_is_may_act_on_it(stage: BrokerStage, verb: str, asker: str) -> None:
    arguments, allowed = ASKERS[asker]
    alice = stage.client("client", "alice")
    failed_job(stage, alice, "a", subject="render.eu")
    conn = alice if asker == "its submitter" else stage.client(*arguments)
    if verb == "cancel":
        stage.ask(conn, CancelJobs(77, ["a"]))
        answer: Any = next(m for m in stage.sent[conn] if getattr(m, "corr_id", 0) == 77)
    else:
        answer = stage.request(conn, verb, job_ids=["a"])
    assert isinstance(answer, Reply) is allowed
    if not allowed:
        assert answer.code == "NOT_FOUND"
        assert stage.job("a").generation == 0  # type: ignore[union-attr]


def test_one_job_that_is_not_yours_spoils_the_whole_order(stage: BrokerStage) -> None:
    alice, bob = stage.client("client", "alice"), stage.client("client", "bob")
    stage.submit(alice, "hers")
    stage.submit(bob, "his")
    stage.ask(bob, CancelJobs(77, ["his", "hers"]))
    assert stage.last(bob, ErrorMessage).corr_id == 77
    assert stage.job("his").state is State.PENDING  # type: ignore[union-attr]


def test_the_same_id_and_body_from_another_submitter_shows_nothing_of_the_job(stage: BrokerStage) -> None:
    alice, bob = stage.client("client", "alice"), stage.client("client", "bob")
    failed_job(stage, alice, "a")
    stage.ask(bob, SubmitJobs(5, [JobSpec(job_id="a", max_retries=0)]))
    [item] = stage.last(bob, Accepted).exceptions
    assert (item.code, item.state) == ("FORBIDDEN", "")
    assert stage.all(bob, Results) == []


def test_a_rerun_by_another_submitter_does_not_set_the_job_going(stage: BrokerStage) -> None:
    alice, bob = stage.client("client", "alice"), stage.client("client", "bob")
    failed_job(stage, alice, "a")
    stage.ask(bob, SubmitJobs(5, [JobSpec(job_id="a", max_retries=0)], True, "rerun"))
    assert stage.last(bob, Accepted).exceptions[0].code == "FORBIDDEN"
    job = stage.job("a")
    assert job is not None
    assert (job.state, job.generation) == (State.FAILED, 0)


def test_a_rerun_sets_failed_jobs_going_and_leaves_the_others(stage: BrokerStage) -> None:
    alice = stage.client("client", "alice")
    failed_job(stage, alice, "failed")
    specs = [JobSpec(job_id="new"), JobSpec(job_id="failed", max_retries=0), JobSpec(job_id="no good", max_retries=0)]
    stage.ask(alice, SubmitJobs(5, specs, True, "rerun"))
    accepted = stage.last(alice, Accepted)
    assert (accepted.corr_id, accepted.count) == (5, 3)
    assert {item.index: item.code or item.state for item in accepted.exceptions} == {1: "PENDING", 2: "INVALID"}
    job = stage.job("failed")
    assert job is not None
    assert (job.state, job.generation) == (State.PENDING, 1)
    worker = stage.worker(credit=2)
    stage.ask(worker, JobsFinished([ending(grant, exit_code=0) for grant in stage.grants(worker)]))
    told = {item.job_id: (item.state, item.generation) for message in stage.all(alice, Results)[1:] for item in message.items}
    assert told == {"new": (State.SUCCEEDED, 0), "failed": (State.SUCCEEDED, 1)}


# ---------------------------------------------------------------------------------------------------- admins


@pytest.mark.parametrize("verb", ["workers", "token.create", "token.list", "token.revoke"])
def test_orders_of_operators_need_an_admin(stage: BrokerStage, verb: str) -> None:
    answer = stage.request(stage.client(), verb, token_id="alice")
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "FORBIDDEN"


def test_an_admin_sees_the_workers(stage: BrokerStage) -> None:
    stage.worker("w1", credit=3, host="box", slots=3, patterns=("a.*",), agent="mine/2")
    stage.clock.advance(4)
    answer = stage.request(stage.client("admin", "root"), "workers")
    assert isinstance(answer, Reply)
    [worker] = answer.body
    assert (worker["worker_id"], worker["credit"], worker["running"], worker["patterns"]) == ("w1", 3, 0, ["a.*"])
    assert (worker["agent"], worker["heartbeat_age_s"], worker["ttl_s"]) == ("mine/2", 4.0, LEASE_TTL_S)


def test_a_token_is_made_listed_without_its_hash_and_usable(stage: BrokerStage) -> None:
    from tasuki.core.access import token_sha256
    from tasuki.core.protocol import HelloClient, Welcome

    admin = stage.client("admin", "root")
    made = stage.request(admin, "token.create", token_id="new", kind="client", sha256=token_sha256("s3cret"), label="ci")
    assert isinstance(made, Reply)
    listed = stage.request(admin, "token.list")
    assert isinstance(listed, Reply)
    rows = {row["token_id"]: row for row in listed.body}
    assert (rows["new"]["created_by"], rows["new"]["label"]) == ("token:root", "ci")
    assert all("sha256" not in row for row in listed.body)
    conn = stage.open()
    stage.ask(conn, HelloClient(msg_id=1, client_id="c", token="s3cret"))
    assert stage.last(conn, Welcome).identity == "token:new"


@pytest.mark.parametrize(
    "params",
    [
        {"token_id": "t", "kind": "enrol", "sha256": "0" * 64},
        {"token_id": "t", "kind": "client"},
        {"token_id": "t", "kind": "client", "sha256": "0" * 64, "scope": ["a..b"]},
        {"token_id": "", "kind": "client", "sha256": "0" * 64},
        {"token_id": "t", "kind": "client", "sha256": "the secret itself"},
    ],
)
def test_a_token_that_cannot_be_is_not_made(stage: BrokerStage, params: dict[str, Any]) -> None:
    admin = stage.client("admin", "root")
    answer = stage.request(admin, "token.create", **params)
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "INVALID"
    assert [row.token_id for row in stage.store.tokens()] == ["root"]


def test_revoking_a_token_hangs_up_on_everybody_who_uses_it(stage: BrokerStage) -> None:
    admin, alice, bob = stage.client("admin", "root"), stage.client("client", "alice"), stage.client("client", "bob")
    answer = stage.request(admin, "token.revoke", token_id="alice")
    assert isinstance(answer, Reply)
    assert isinstance(stage.hung_up[alice], Unauthorized)
    assert bob not in stage.hung_up


def test_revoking_what_is_not_there_says_so(stage: BrokerStage) -> None:
    answer = stage.request(stage.client("admin", "root"), "token.revoke", token_id="ghost")
    assert isinstance(answer, ErrorMessage)
    assert answer.code == "NOT_FOUND"


def test_a_client_that_leaves_is_forgotten_by_the_jobs_it_watched(stage: BrokerStage) -> None:
    first, second = stage.node(), stage.node()
    for conn in (first, second):
        stage.submit(conn, "a")
    stage.close(first)
    worker = stage.worker(credit=1)
    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0])]))
    assert stage.all(first, Results) == []
    assert len(stage.all(second, Results)) == 1
    assert stage.broker.watchers == {}


def test_a_token_whose_id_is_taken_is_refused(stage: BrokerStage) -> None:
    admin = stage.node()
    fields = {"token_id": "0123", "kind": "client"}
    assert isinstance(stage.request(admin, "token.create", sha256="a" * 64, **fields), Reply)
    refused = stage.request(admin, "token.create", sha256="b" * 64, **fields)
    assert isinstance(refused, ErrorMessage)
    assert refused.code == "INVALID"


def test_a_connection_ends_when_its_token_expires(stage: BrokerStage) -> None:
    secret = stage.token("brief", "client", expires_at=stage.clock.wall() + 60.0)
    conn = stage.open()
    stage.ask(conn, HelloClient(msg_id=1, client_id="c1", token=secret))
    stage.clock.advance(59.0)
    stage.apply(Ticked())
    assert conn not in stage.hung_up
    stage.clock.advance(1.0)
    stage.apply(Ticked())
    assert isinstance(stage.hung_up[conn], Unauthorized)


# ---------------------------------------------------------------------------------------------------- many jobs of one request


@pytest.mark.parametrize("verb", ["watch", "cancel", "requeue"])
def test_jobs_of_one_request_are_read_and_changed_some_in_each_turn(verb: str) -> None:
    """A job may have megabytes of arguments and file names: a thousand of them at once would be the server's memory."""
    stage = BrokerStage()
    client, job_ids = stage.client(), [f"job-{number}" for number in range(200)]
    stage.submit(client, *job_ids)
    stage.tell(client, CancelJobs(9, job_ids) if verb == "cancel" else Request(9, verb, {"job_ids": job_ids}))
    while (turn := stage.broker.next_turn(stage.now())) is not None:
        assert max(len(turn.get), len(turn.cancel), len(turn.requeue)) <= ROWS_AT_ONCE
        stage.apply(TurnDone(turn, execute(stage.store, turn)))

    answer = stage.last(client, Reply)
    assert answer.corr_id == 9
    assert list(answer.body["states"] if verb == "watch" else answer.body) == job_ids


def test_a_job_that_ends_while_the_rest_of_its_request_is_read_is_told() -> None:
    stage = BrokerStage()
    submitter, client = stage.client(), stage.client("admin", "root")
    job_ids = [f"job-{number}" for number in range(ROWS_AT_ONCE + 1)]
    stage.submit(submitter, *job_ids)
    stage.tell(client, Request(9, "watch", {"job_ids": job_ids}))
    first = stage.broker.next_turn(stage.now())
    assert first is not None
    stage.apply(TurnDone(first, execute(stage.store, first)))
    stage.ask(stage.node(), CancelJobs(9, ["job-0"]))

    assert [item.job_id for message in stage.all(client, Results) for item in message.items] == ["job-0"]


def test_a_foreign_job_far_behind_own_ones_refuses_the_whole_cancel() -> None:
    stage = BrokerStage()
    client, job_ids = stage.client(), [f"job-{number}" for number in range(ROWS_AT_ONCE + 5)]
    stage.submit(client, *job_ids)

    stage.ask(client, CancelJobs(9, [*job_ids, "nobody's"]))

    assert (stage.last(client, ErrorMessage).corr_id, stage.last(client, ErrorMessage).code) == (9, "NOT_FOUND")
    assert {job.state for job in stage.store.get(job_ids)} == {State.PENDING}


def test_orders_of_administrators_that_give_a_reason_are_in_the_audit(stage: BrokerStage) -> None:
    alice, root = stage.client(), stage.client("admin", "root")
    stage.submit(alice, "a", "b", "c")

    stage.ask(alice, CancelJobs(7, ["a"], "mine"))
    stage.ask(root, CancelJobs(8, ["b"]))
    stage.ask(root, CancelJobs(9, ["c"], "wrong input"))
    stage.request(root, "requeue", job_ids=["c"], reason="it is right now")

    found = [
        (row.actor, row.action, row.target, row.detail) for row in stage.store.audit() if not row.action.startswith("token.")
    ]
    assert found == [("token:root", "run.rerun", "c", "it is right now"), ("token:root", "run.cancel", "c", "wrong input")]
