"""Reads: what they answer, how much at most, and to whom."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.events import Query
from tasuki.core.job import InputFile, JobSpec, body_hash
from tasuki.core.store_messages import LeaseRequest, Report, Submission
from tasuki.errors import Forbidden, InvalidInput, NotFound, TooLarge
from tasuki.server.queries import (
    GET_MAX,
    GET_RESULTS_MAX,
    GROUPS_SHOWN,
    PAGE_BYTES,
    PAGE_MAX,
    UNREAD_MAX_BYTES,
    UnreadAnswers,
    answer_query,
    query_bytes,
)
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock
from tests.server.peers import FakeConnection

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


def test_find_knows_the_subjects_below_job_submit(store: MemoryStore) -> None:
    add(store, "book", subject="job.assign.books.close")
    scoped = Identity(PeerKind.CLIENT, "token:clerk", ("job.submit.books.>",), "clerk")

    assert [view["job_id"] for view in ask(store, scoped, "find", subject="job.submit.books.*")["jobs"]] == ["book"]
    assert [view["job_id"] for view in ask(store, ADMIN, "find", subject="job.assign.books.*")["jobs"]] == ["book"]


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


def test_of_very_many_groups_the_largest_are_counted_one_by_one_and_the_others_as_one(store: MemoryStore) -> None:
    for number in range(GROUPS_SHOWN + 5):
        add(store, f"job-{number}", subject=f"g{number}.x")

    groups = ask(store, ADMIN, "counts")
    few = ask(store, ADMIN, "counts", limit=1)

    assert len(groups) == GROUPS_SHOWN + 1
    assert (groups["render"]["pending"], groups["(other)"]["pending"]) == (2, 6)
    assert (few["render"]["pending"], few["(other)"]["pending"]) == (2, GROUPS_SHOWN + 5)
    for limit in (0, 50_001, "all"):
        with pytest.raises(InvalidInput, match="limit must be 1 to 50000"):
            ask(store, ADMIN, "counts", limit=limit)


def test_lists_show_names_and_counts_and_never_whole_headers_or_file_names(store: MemoryStore) -> None:
    headers = {f"{number}{'n' * 5000}": "\x1b" * 8000 for number in range(60)}
    files = tuple(InputFile(name=f"{number}/{'f' * 190}", data=b"") for number in range(1000))
    for number in range(200):
        add(store, f"wide-{number}", subject="wide", headers=headers, files=files, env={"SECRET": "x"})

    page = ask(store, ADMIN, "find", limit=200, subject="wide")
    assert len(msgspec.json.encode(page)) < 8 * 1024 * 1024
    view = page["jobs"][0]
    assert (view["files_count"], view["env_count"], len(view["header_names"])) == (1000, 1, 60)
    assert not {"headers", "files", "env_names"} & view.keys()
    assert max(map(len, view["header_names"])) == 64
    several = ask(store, ADMIN, "get", job_ids=["wide-1", "wide-2"])
    assert "headers" not in several[0]
    [alone] = ask(store, ADMIN, "get", job_ids=["wide-1"])
    assert (alone["headers"], len(alone["files"]), alone["env_names"]) == (headers, 1000, ["SECRET"])


def test_a_page_ends_at_its_bytes_and_its_cursor_goes_on(store: MemoryStore) -> None:
    for number in range(300):
        add(
            store,
            f"long-{number:03}",
            subject="long",
            exec="x",
            args=("a" * 200,) * 20,
            headers={"h" * 60 + str(n): "" for n in range(60)},
        )
    found: list[str] = []
    pages, cursor = 0, None
    while pages == 0 or cursor is not None:
        page = ask(store, ADMIN, "find", limit=1000, subject="long", cursor=cursor)
        assert len(msgspec.msgpack.encode(page)) < 2 * PAGE_BYTES
        found += [view["job_id"] for view in page["jobs"]]
        pages, cursor = pages + 1, page["cursor"]
    assert found == [f"long-{number:03}" for number in reversed(range(300))]
    assert pages > 1


def test_a_get_of_too_much_is_refused_before_all_of_it_is_read(store: MemoryStore) -> None:
    add(store, "large", exec="x", args=("\U0001f600" * 200,) * 20)
    with pytest.raises(TooLarge, match="ask for fewer at once"):
        ask(store, ADMIN, "get", job_ids=["large"] * 1000)


def test_queries_that_wait_are_counted_by_their_size() -> None:
    assert query_bytes(Query(1, 1, "get", {"job_ids": ["x"] * 1000}, ADMIN, [])) == 64_000
    assert query_bytes(Query(1, 1, "find", {"text": "x" * 1000, "limit": 5, "cursor": None}, ADMIN, [])) == 1000


def test_of_connections_with_too_many_unread_answers_of_one_owner_the_oldest_are_aborted() -> None:
    async def work() -> list[bool]:
        unread, links = UnreadAnswers(), [FakeConnection() for _ in range(6)]
        for link in links:
            link.unread_bytes = UNREAD_MAX_BYTES // 4
            unread.note("other" if link is links[0] else "greedy", link)
        links[4].unread_bytes = 0  # its peer has read
        unread.note("greedy", links[5])
        unread.note("greedy", links[4])
        return [link.closed != "" for link in links]

    assert asyncio.run(work()) == [False, True, False, False, False, False]
