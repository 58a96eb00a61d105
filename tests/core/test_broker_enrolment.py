"""Enrolment: a worker gets, changes and loses its token; one enrol token is one worker, and nobody becomes somebody else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tasuki.core.access import ENROL_TOKEN_S, WORKER_TOKEN_S, identify, token_sha256
from tasuki.core.broker.events import SomeRevoked, TurnDone
from tasuki.core.protocol import ErrorMessage, GiveCredit, HelloClient, HelloWorker, Reply, Request, SubmitJobs, Welcome
from tasuki.stores.batching import execute
from tests.core.broker_stage import TCP, BrokerStage

SCOPE = ("job.assign.zpe",)


def enrolling(stage: BrokerStage, token_id: str = "e1", **fields: Any) -> int:
    """A peer that came in with an enrol token."""
    conn = stage.open(TCP)
    secret = f"secret-{token_id}"
    if stage.store.token(token_sha256(secret)) is None:
        stage.token(token_id, "enrol", *SCOPE, expires_at=stage.clock.wall() + ENROL_TOKEN_S, **fields)
    stage.ask(conn, HelloClient(msg_id=1, client_id="new", token=secret))
    assert conn not in stage.hung_up, stage.hung_up
    return conn


def register(stage: BrokerStage, conn: int, token_id: str = "t1") -> Reply | ErrorMessage:
    return stage.request(conn, "worker.register", token_id=token_id, sha256=token_sha256(f"secret-{token_id}"))


def worker(stage: BrokerStage, token_id: str, worker_id: str, incarnation: str = "i1") -> int:
    conn = stage.open(TCP)
    hello = HelloWorker(
        msg_id=1, worker_id=worker_id, incarnation=incarnation, token=f"secret-{token_id}", patterns=("job.assign.zpe",)
    )
    stage.ask(conn, hello)
    return conn


def test_an_enrol_token_registers_a_worker_with_a_token_of_its_own() -> None:
    stage = BrokerStage()

    answer = register(stage, enrolling(stage))

    assert isinstance(answer, Reply)
    row = stage.store.token(token_sha256("secret-t1"))
    assert row is not None
    assert (row.kind, row.worker_id, row.scope, row.created_by) == ("worker", "w-e1", SCOPE, "token:e1")
    assert row.expires_at == stage.clock.wall() + WORKER_TOKEN_S
    told = {"worker_id": "w-e1", "token_id": "t1", "expires_at": row.expires_at, "ttl_s": WORKER_TOKEN_S, "scope": list(SCOPE)}
    assert answer.body == told


def test_an_enrol_token_is_good_for_one_registration() -> None:
    stage = BrokerStage()
    first, second = enrolling(stage), enrolling(stage)
    for conn, token_id in ((first, "t1"), (second, "t2")):
        stage.tell(conn, Request(9, "worker.register", {"token_id": token_id, "sha256": token_sha256(f"secret-{token_id}")}))

    stage.turns()

    assert stage.last(first, Reply).corr_id == 9
    assert stage.last(second, ErrorMessage).code == "FORBIDDEN"
    assert stage.store.token(token_sha256("secret-t2")) is None


def test_an_enrol_token_can_do_nothing_else() -> None:
    stage = BrokerStage()
    conn = enrolling(stage)

    stage.ask(conn, SubmitJobs(3, []))
    answers = [stage.last(conn, ErrorMessage), stage.request(conn, "find"), stage.request(conn, "token.list")]

    assert [answer.code for answer in answers if isinstance(answer, ErrorMessage)] == ["FORBIDDEN"] * 3


def test_an_enrol_token_is_no_worker_token() -> None:
    stage = BrokerStage()
    enrolling(stage)

    conn = worker(stage, "e1", "w-e1")

    error = stage.hung_up[conn]
    assert error is not None
    assert error.code == "FORBIDDEN"


def test_a_worker_token_is_good_for_its_own_worker_only() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))

    own, other = worker(stage, "t1", "w-e1"), worker(stage, "t1", "somebody-else")

    assert stage.last(own, Welcome).kind == "worker"
    assert stage.hung_up[other] is not None
    assert own not in stage.hung_up


def test_registering_a_worker_again_ends_the_token_that_it_had() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    connected = worker(stage, "t1", "w-e1")

    answer = register(stage, enrolling(stage, "e2", worker_id="w-e1"), "t2")

    assert isinstance(answer, Reply)
    assert answer.body["worker_id"] == "w-e1"
    assert stage.store.revoked_among(["t1", "t2"]) == ["t1"]
    assert connected in stage.hung_up


def test_a_worker_rotates_its_token_and_comes_back_with_the_new_one() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    conn = worker(stage, "t1", "w-e1")

    answer = stage.request(conn, "worker.rotate", token_id="t2", sha256=token_sha256("secret-t2"))

    assert isinstance(answer, Reply)
    assert stage.store.revoked_among(["t1", "t2"]) == ["t1"]
    again = worker(stage, "t2", "w-e1")
    assert stage.all(again, Welcome)


def test_a_worker_keeps_its_incarnation_at_calc_through_rotations_and_gets_another_by_registering_again() -> None:
    stage = BrokerStage()

    def incarnation(token_id: str) -> str:
        return identify(stage.store.token(token_sha256(f"secret-{token_id}")), stage.clock.wall()).incarnation

    register(stage, enrolling(stage))
    first = incarnation("t1")
    for old, new in (("t1", "t2"), ("t2", "t3")):
        stage.request(worker(stage, old, "w-e1"), "worker.rotate", token_id=new, sha256=token_sha256(f"secret-{new}"))
        assert incarnation(new) == first
    register(stage, enrolling(stage, "e2", worker_id="w-e1"), "t4")

    assert incarnation("t4") != first


def test_nobody_chooses_or_sees_the_incarnation_of_a_token() -> None:
    stage = BrokerStage()
    admin = stage.client("admin", "root")
    row = {"token_id": "t1", "kind": "worker", "sha256": token_sha256("secret-t1"), "worker_id": "w1", "incarnation": "http"}

    stage.request(admin, "token.create", **row)
    listed = stage.request(admin, "token.list")

    assert isinstance(listed, Reply)
    assert all("incarnation" not in shown for shown in listed.body)
    assert identify(stage.store.token(row["sha256"]), 0.0).incarnation != "http"


def test_a_token_that_was_revoked_first_cannot_be_rotated() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    conn = worker(stage, "t1", "w-e1")
    stage.store.revoke_token("t1", actor="somebody at another server")

    answer = stage.request(conn, "worker.rotate", token_id="t2", sha256=token_sha256("secret-t2"))

    assert isinstance(answer, ErrorMessage)
    assert answer.code == "FORBIDDEN"
    assert stage.store.revoked_among(["t1", "t2"]) == ["t1", "t2"]


def test_a_token_of_no_particular_worker_cannot_be_rotated() -> None:
    stage = BrokerStage()
    stage.token("plain", "worker")
    conn = worker(stage, "plain", "w9")

    answer = stage.request(conn, "worker.rotate", token_id="t2", sha256=token_sha256("secret-t2"))

    assert isinstance(answer, ErrorMessage)
    assert answer.code == "FORBIDDEN"


def test_revoking_a_worker_ends_all_its_tokens_and_its_connection() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    connected = worker(stage, "t1", "w-e1")

    answer = stage.request(stage.node(), "worker.revoke", worker_id="w-e1")

    assert isinstance(answer, Reply)
    assert answer.body == {"worker_id": "w-e1", "revoked": ["t1"]}
    assert stage.store.revoked_among(["t1"]) == ["t1"]
    assert connected in stage.hung_up


def test_revoking_a_worker_for_a_subject_leaves_its_tokens_for_other_subjects() -> None:
    stage = BrokerStage()
    stage.token("narrow", "worker", "job.assign.zpe", worker_id="w1")
    stage.token("wide", "worker", "job.assign.*", worker_id="w1")
    stage.token("other", "worker", "job.assign.other", worker_id="w1")

    answer = stage.request(stage.node(), "worker.revoke", worker_id="w1", subject="job.assign.zpe")

    assert isinstance(answer, Reply)
    assert sorted(answer.body["revoked"]) == ["narrow", "wide"]
    assert stage.store.revoked_among(["other"]) == []


def test_a_worker_that_rotates_while_it_is_revoked_is_revoked() -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    conn, admin = worker(stage, "t1", "w-e1"), stage.node()
    stage.tell(admin, Request(7, "worker.revoke", {"worker_id": "w-e1"}))
    stage.tell(conn, Request(8, "worker.rotate", {"token_id": "t2", "sha256": token_sha256("secret-t2")}))

    stage.turns()

    assert stage.store.revoked_among(["t1", "t2"]) == ["t1", "t2"]


def test_revoking_a_worker_ends_whatever_the_store_still_says_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = BrokerStage()
    register(stage, enrolling(stage))
    monkeypatch.setattr(stage.store, "revoke_token", lambda token_id, actor: False)

    answer = stage.request(stage.node(), "worker.revoke", worker_id="w-e1")

    assert isinstance(answer, Reply)
    assert answer.body == {"worker_id": "w-e1", "revoked": ["t1"]}


def test_revoking_a_worker_that_nobody_knows_is_not_found() -> None:
    stage = BrokerStage()

    answer = stage.request(stage.node(), "worker.revoke", worker_id="nobody")

    assert isinstance(answer, ErrorMessage)
    assert answer.code == "NOT_FOUND"


def test_only_an_administrator_revokes_workers() -> None:
    stage = BrokerStage()

    answer = stage.request(stage.client(), "worker.revoke", worker_id="w1")

    assert isinstance(answer, ErrorMessage)
    assert answer.code == "FORBIDDEN"


def test_an_enrol_token_must_end_soon() -> None:
    stage = BrokerStage()
    row = {"token_id": "e1", "kind": "enrol", "sha256": token_sha256("x"), "created_at": 0.0}
    longest = stage.now().wall + ENROL_TOKEN_S

    answers = [stage.request(stage.node(), "token.create", **row, expires_at=at) for at in (None, longest + 61, longest)]

    assert [type(answer) for answer in answers] == [ErrorMessage, ErrorMessage, Reply]


@pytest.mark.parametrize("at", [math.nan, math.inf, -1.0, 1e300])
def test_a_token_ends_at_a_time_or_not_at_all(at: float) -> None:
    stage = BrokerStage()

    answer = stage.request(stage.node(), "token.create", token_id="c1", kind="client", sha256=token_sha256("x"), expires_at=at)

    assert isinstance(answer, ErrorMessage)
    assert "expires_at" in answer.message


def test_the_life_of_an_enrol_token_is_counted_by_the_servers_clock() -> None:
    stage = BrokerStage()
    far = stage.now().wall + 1_000_000.0

    row = {"token_id": "e1", "kind": "enrol", "sha256": token_sha256("x"), "created_at": far, "expires_at": far + 60.0}
    answer = stage.request(stage.node(), "token.create", **row)

    assert isinstance(answer, ErrorMessage)
    assert "15 minutes" in answer.message


def test_a_worker_can_ask_for_nothing_but_its_next_token() -> None:
    stage = BrokerStage()
    conn = stage.worker()

    stage.tell(conn, Request(5, "find", {}))

    assert conn in stage.hung_up


def test_credit_that_is_taken_back_is_not_used() -> None:
    stage = BrokerStage()
    conn = stage.worker(credit=2)

    stage.ask(conn, GiveCredit(-1))
    stage.submit(stage.node(), "a", "b")

    assert len(stage.grants(conn)) == 1


def test_who_exchanges_a_token_hears_of_it_though_others_see_the_old_one_revoked() -> None:
    stage = BrokerStage()
    conn = enrolling(stage)
    stage.tell(conn, Request(9, "worker.register", {"token_id": "t1", "sha256": token_sha256("secret-t1")}))

    stage.apply(SomeRevoked(["e1"]))
    stage.turns()
    stage.apply(SomeRevoked(["e1"]))

    assert stage.last(conn, Reply).corr_id == 9
    assert conn in stage.hung_up


def test_who_wins_the_exchange_hears_of_it_though_another_request_of_its_connection_lost() -> None:
    stage = BrokerStage()
    conn = enrolling(stage)
    for number in (9, 10):
        stage.tell(conn, Request(number, "worker.register", {"token_id": f"t{number}", "sha256": token_sha256(f"s{number}")}))
    first = stage.broker.next_turn(stage.now())
    assert first is not None
    stage.apply(TurnDone(first, execute(stage.store, first)))

    stage.apply(SomeRevoked(["e1"]))  # another server saw it spent before the worker's own token is stored
    assert conn not in stage.hung_up
    stage.turns()
    stage.apply(SomeRevoked(["e1"]))

    assert stage.last(conn, Reply).corr_id == 9
    assert stage.last(conn, ErrorMessage).corr_id == 10
    assert conn in stage.hung_up
