"""Reads: what they answer, how much at most, and to whom."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.events import Query
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import LeaseRequest, Report, Submission
from tasuki.errors import Forbidden, InvalidInput, NotFound
from tasuki.server.queries import GET_MAX, GET_RESULTS_MAX, PAGE_MAX, answer_query
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock

ALICE = Identity(PeerKind.CLIENT, "token:alice", (), "alice")
BOB = Identity(PeerKind.CLIENT, "token:bob", (), "bob")
EU = Identity(PeerKind.CLIENT, "token:eu", ("render.eu",), "eu")
ADMIN = Identity(PeerKind.ADMIN, "token:root", (), "root")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(FakeClock())
    store.take_over("test", 1)
    add(store, "hers", subject="render.eu", args=("--secret-free",), env={"PASSWORD": "hunter2"}, payload=b"in")
    add(store, "other", subject="render.us")
    return store


def add(store: MemoryStore, job_id: str, **fields: Any) -> None:
    spec = JobSpec(job_id=job_id, **fields)
    store.submit([Submission(spec, "token:alice", body_hash(spec))])


def finish(store: MemoryStore, job_id: str, result: bytes) -> None:
    from tasuki.core.job import Outcome

    [[grant]] = store.lease([LeaseRequest(worker_id="w1", incarnation="one", job_ids=(job_id,))])
    store.finish([Report(job_id, "w1", grant.lease_id, grant.attempt, Outcome(exit_code=0, result=result))])


def ask(store: MemoryStore, who: Identity, verb: str, **params: Any) -> Any:
    return answer_query(store, Query(1, 1, verb, params, who, []))


def test_get_describes_jobs_without_payload_result_or_environment_values(store: MemoryStore) -> None:
    finish(store, "hers", b"out")
    [view] = ask(store, ALICE, "get", job_ids=["hers"])
    assert (view["state"], view["payload_bytes"], view["env_names"], view["args"]) == (
        "SUCCEEDED",
        2,
        ["PASSWORD"],
        ["--secret-free"],
    )
    assert view["outcome"]["result_bytes"] == 3
    assert "hunter2" not in repr(view)
    assert "result" not in view["outcome"]


def test_get_gives_the_result_if_asked(store: MemoryStore) -> None:
    finish(store, "hers", b"out")
    [view] = ask(store, ALICE, "get", job_ids=["hers"], result=True)
    assert view["outcome"]["result"] == b"out"


@pytest.mark.parametrize("verb", ["get", "explain"])
@pytest.mark.parametrize(("who", "may"), [(ALICE, True), (ADMIN, True), (EU, True), (BOB, False)])
def test_who_may_read_a_job(store: MemoryStore, who: Identity, may: bool, verb: str) -> None:
    params: dict[str, Any] = {"job_ids": ["hers"]} if verb == "get" else {"job_id": "hers"}
    if may:
        assert ask(store, who, verb, **params)
    else:
        with pytest.raises(NotFound):
            ask(store, who, verb, **params)


def test_a_job_that_is_not_there_and_one_that_is_not_yours_look_the_same(store: MemoryStore) -> None:
    answers = []
    for job_id in ("hers", "gone"):
        with pytest.raises(NotFound) as refused:
            ask(store, BOB, "get", job_ids=[job_id])
        answers.append(refused.value.message.replace(job_id, "?"))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"job_ids": "hers"},
        {"job_ids": [1]},
        {"job_ids": ["hers"] * (GET_MAX + 1)},
        {"job_ids": ["hers"] * (GET_RESULTS_MAX + 1), "result": True},
    ],
)
def test_get_that_cannot_be(store: MemoryStore, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ask(store, ALICE, "get", **params)


@pytest.mark.parametrize(("who", "found"), [(ALICE, ["other", "hers"]), (ADMIN, ["other", "hers"]), (EU, ["hers"]), (BOB, [])])
def test_find_shows_only_what_one_may_see(store: MemoryStore, who: Identity, found: list[str]) -> None:
    assert [view["job_id"] for view in ask(store, who, "find")["jobs"]] == found


def test_find_cannot_be_made_to_look_as_somebody_else(store: MemoryStore) -> None:
    assert ask(store, BOB, "find", submitter="token:alice", scope=[">"])["jobs"] == []


def test_find_goes_on_from_a_cursor(store: MemoryStore) -> None:
    first = ask(store, ALICE, "find", limit=1)
    second = ask(store, ALICE, "find", limit=1, cursor=first["cursor"])
    assert [view["job_id"] for page in (first, second) for view in page["jobs"]] == ["other", "hers"]


@pytest.mark.parametrize(
    "params",
    [
        {"limit": 0},
        {"limit": PAGE_MAX + 1},
        {"limit": "many"},
        {"subject": "a..b"},
        {"states": ["ASLEEP"]},
        {"color": "red"},
        {"cursor": 7},
    ],
)
def test_find_that_cannot_be(store: MemoryStore, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ask(store, ALICE, "find", **params)


def test_counts_are_for_admins(store: MemoryStore) -> None:
    assert ask(store, ADMIN, "counts")["render"]["pending"] == 2
    with pytest.raises(Forbidden):
        ask(store, ALICE, "counts")


def test_explain_tells_the_place_in_the_line(store: MemoryStore) -> None:
    add(store, "behind", subject="render.eu")
    worker = {"worker_id": "w1", "incarnation": "1", "patterns": [">"], "credit": 0, "running": 1}
    answer = answer_query(store, Query(1, 1, "explain", {"job_id": "behind"}, ALICE, [worker]))
    assert answer["facts"]["ahead"] == 1
    with pytest.raises(InvalidInput):
        ask(store, ALICE, "explain", job_id=3)
