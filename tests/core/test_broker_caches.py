"""A broker's caches: who may put, see, use and remove them, which workers are asked, and what the client is told of each."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.caches import ANSWER_WITHIN_S, PUTS_PER_CLIENT
from tasuki.core.broker.events import ClusterView, Query
from tasuki.core.job import InputFile
from tasuki.core.protocol import (
    LOG_WAIT_MAX_S,
    NUMBER_MAX,
    Accepted,
    CacheAck,
    CachePut,
    CacheStatus,
    ErrorMessage,
    HelloClient,
    Reply,
    Request,
    WorkerCache,
)
from tasuki.core.store_messages import BlobClaim, CacheEntry, CacheOrder
from tasuki.errors import TasukiError
from tasuki.server.queries import answer_query
from tests.core.broker_stage import TCP, UNIX, BrokerStage

AB, CD = "ab" * 32, "cd" * 32
WAIT_S = 2.0
MSG_ID = 1000
RENDER, EU, OTHER = "render.>", "render.eu.>", "other.>"


@pytest.fixture
def stage() -> BrokerStage:
    """A broker whose store has two blobs."""
    stage = BrokerStage()
    stage.store.blobs_stored(stage.store.place_blobs([BlobClaim(AB, 100), BlobClaim(CD, 50)]))
    return stage


def entries(sha256: str = AB, name: str = "a", size_bytes: int = 100) -> list[CacheEntry]:
    return [CacheEntry(name, sha256, size_bytes)]


def put(stage: BrokerStage, conn: int, msg_id: int = MSG_ID, **fields: Any) -> None:
    stage.ask(
        conn, CachePut(**{"msg_id": msg_id, "cache_id": "c", "target": RENDER, "entries": entries(), "wait_s": WAIT_S, **fields})
    )


def refused(stage: BrokerStage, conn: int, msg_id: int = MSG_ID) -> str:
    return next((error.code for error in stage.all(conn, ErrorMessage) if error.corr_id == msg_id), "")


def renderer(stage: BrokerStage, name: str, **fields: Any) -> int:
    return stage.worker(name, **{"patterns": (RENDER,), "caches": True, **fields})


def acknowledge(
    stage: BrokerStage, worker: int, status: CacheStatus = CacheStatus.OK, *, as_: str = "w1", message: str = "", done: int = 100
) -> None:
    """Answer the last question of a worker."""
    asked = stage.last(worker, CachePut)
    stage.ask(worker, CacheAck(asked.msg_id, asked.cache_id, [WorkerCache(as_, status, message, done)]))


def told(stage: BrokerStage, conn: int) -> dict[str, CacheStatus]:
    [ack] = stage.all(conn, CacheAck)
    return {one.worker_id: one.status for one in ack.workers}


# ---------------------------------------------------------------------------------------------------- rights


ADMIN, SCOPED, UNSCOPED, ELSEWHERE = ("admin",), ("client", RENDER), ("client",), ("client", OTHER)


def caller(stage: BrokerStage, kind: str, *scope: str) -> int:
    return stage.client(kind, "caller", *scope)


@pytest.mark.parametrize(
    ("who", "target", "code"),
    [
        (ADMIN, ">", ""),
        (SCOPED, RENDER, ""),
        (SCOPED, EU, ""),
        (SCOPED, ">", "FORBIDDEN"),
        (SCOPED, OTHER, "FORBIDDEN"),
        (UNSCOPED, RENDER, "FORBIDDEN"),
    ],
)
def test_who_may_put_and_remove_a_cache(stage: BrokerStage, who: tuple[str, ...], target: str, code: str) -> None:
    conn = caller(stage, *who)

    put(stage, conn, target=target)
    assert refused(stage, conn) == code
    assert len(stage.store.caches()) == (not code)

    stage.store.put_cache([CacheOrder("c", target, "uid:1000", tuple(entries()))])
    answer = stage.request(conn, "cache.remove", cache_id="c", target=target)
    assert (answer.code if isinstance(answer, ErrorMessage) else "") == code
    assert len(stage.store.caches()) == bool(code)


@pytest.mark.parametrize(
    ("who", "may"),
    [
        (ADMIN, True),
        (SCOPED, True),
        (("client", "render.eu.1"), True),
        (ELSEWHERE, False),
        (UNSCOPED, False),
    ],
)
def test_who_is_shown_a_cache(stage: BrokerStage, who: tuple[str, ...], may: bool) -> None:
    stage.store.put_cache([CacheOrder("c", RENDER, "uid:1000", tuple(entries()))])
    conn = caller(stage, *who)

    def answer(verb: str, **params: Any) -> Any:
        stage.ask(conn, Request(MSG_ID, verb, params))
        query = stage.others.pop()
        assert isinstance(query, Query)
        try:
            return answer_query(stage.store, query)
        except TasukiError as error:
            return error.code

    assert [one["cache_id"] for one in answer("cache.list")["caches"]] == (["c"] if may else [])
    shown = answer("cache.show", cache_id="c")
    assert (shown if isinstance(shown, str) else [one["name"] for one in shown["files"]]) == (["a"] if may else "NOT_FOUND")


@pytest.mark.parametrize(
    ("who", "subject", "code"),
    [
        (ADMIN, "render.eu", None),
        (SCOPED, "render.eu", None),
        (ELSEWHERE, "other.eu", "NOT_FOUND"),
        (UNSCOPED, "render.eu", "NOT_FOUND"),
    ],
)
def test_who_may_give_a_file_of_a_cache_to_a_job(
    stage: BrokerStage, who: tuple[str, ...], subject: str, code: str | None
) -> None:
    stage.store.put_cache([CacheOrder("c", RENDER, "uid:1000", tuple(entries()))])
    conn = caller(stage, *who)

    stage.submit(conn, "job", subject=subject, exec="x", files=(InputFile("a", cache_id="c"),))

    codes = (
        [one.code for one in stage.last(conn, Accepted).exceptions] if stage.all(conn, Accepted) else [refused(stage, conn, 2)]
    )
    assert codes == ([] if code is None else [code])
    stored = stage.job("job")
    assert (stored is None) is (code is not None)
    assert stored is None or (stored.spec.files[0].sha256, stored.spec.files[0].size_bytes) == (AB, 100)


def test_who_has_put_a_cache_may_use_it_without_a_scope(stage: BrokerStage) -> None:
    stage.store.put_cache([CacheOrder("c", RENDER, "token:caller", tuple(entries()))])
    conn = caller(stage, *UNSCOPED)

    stage.submit(conn, "job", subject="render.eu", exec="x", files=(InputFile("a", cache_id="c"),))

    assert stage.job("job") is not None


def test_the_token_of_a_worker_neither_puts_nor_sees_nor_removes_a_cache(stage: BrokerStage) -> None:
    stage.store.put_cache([CacheOrder("c", RENDER, "uid:1000", tuple(entries()))])
    token = stage.token("w", "worker")
    for message in (
        CachePut(MSG_ID, "c", RENDER, entries(CD, "b", 50)),
        *(Request(MSG_ID, verb, {"cache_id": "c", "target": RENDER}) for verb in ("cache.list", "cache.show", "cache.remove")),
    ):
        as_client = stage.open()
        stage.ask(as_client, HelloClient(msg_id=1, client_id="c", token=token))
        assert getattr(stage.hung_up[as_client], "code", "") == "UNAUTHORIZED"
        conn = stage.worker("w1", peer=TCP, token=token, patterns=(RENDER,))
        stage.ask(conn, message)
        assert refused(stage, conn) or conn in stage.hung_up
    [cache] = stage.store.caches()
    assert (cache.cache_id, cache.files) == ("c", 1)
    assert stage.others == []


@pytest.mark.parametrize(("scope", "may"), [((), True), ((EU,), True), (("render.eu.1",), True), ((OTHER,), False)])
def test_a_worker_reads_the_caches_that_its_scope_can_match(scope: tuple[str, ...], may: bool) -> None:
    assert Identity(PeerKind.WORKER, "token:w", scope, "w").may_read_cache("token:alice", RENDER) is may


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_id": ""},
        {"cache_id": "../c"},
        {"cache_id": "a/b"},
        {"target": "render..x"},
        {"target": ""},
        {"entries": []},
        {"entries": entries(name="../a")},
        {"entries": entries(name="/etc/passwd")},
        {"entries": entries(name="a\0b")},
        {"entries": entries(name="a") + entries(name="a/b")},
        {"entries": entries(sha256="AB" * 32)},
        {"entries": entries(sha256="../../x")},
        {"entries": entries(size_bytes=-1)},
        {"entries": entries(size_bytes=NUMBER_MAX + 1)},
        {"wait_s": -1.0},
        {"wait_s": LOG_WAIT_MAX_S + 1.0},
    ],
    ids=str,
)
def test_names_hashes_sizes_and_times_that_cannot_be_are_refused(stage: BrokerStage, fields: dict[str, Any]) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")

    put(stage, conn, **fields)

    assert refused(stage, conn) == "INVALID"
    assert stage.store.caches() == []
    assert stage.all(worker, CachePut) == []


def test_blobs_that_are_not_here_are_named(stage: BrokerStage) -> None:
    conn = stage.node()

    put(stage, conn, entries=entries("ef" * 32))

    assert stage.last(conn, ErrorMessage).details == {"blobs": ["ef" * 32]}


def test_other_bytes_for_a_name_are_a_conflict_of_all_workers_that_are_meant(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")
    renderer(stage, "w2")
    renderer(stage, "w3", patterns=(OTHER,))
    put(stage, conn, wait_s=0.0)

    put(stage, conn, MSG_ID + 1, entries=entries(CD, size_bytes=50))

    error = stage.last(conn, ErrorMessage)
    assert (error.corr_id, error.code, error.details["workers"]) == (MSG_ID + 1, "CACHE_CONFLICT", ["w1", "w2"])
    assert len(stage.all(worker, CachePut)) == 1


def test_a_client_has_eight_puts_under_way_and_not_nine(stage: BrokerStage) -> None:
    conn, other, worker = stage.node(), stage.client("admin"), renderer(stage, "w1")
    for number in range(PUTS_PER_CLIENT + 1):
        put(stage, conn, MSG_ID + number)

    assert [refused(stage, conn, MSG_ID + number) for number in range(PUTS_PER_CLIENT + 1)] == [""] * PUTS_PER_CLIENT + [
        "OVERLOADED"
    ]
    put(stage, other)
    assert refused(stage, other) == ""
    acknowledge(stage, worker)  # the question of the other client
    stage.pass_time(WAIT_S + ANSWER_WITHIN_S)
    put(stage, conn, MSG_ID + 100)
    assert refused(stage, conn, MSG_ID + 100) == ""


# ---------------------------------------------------------------------------------------------------- workers are asked


def test_workers_that_are_meant_are_asked_and_only_the_sender_is_answered_when_all_have(stage: BrokerStage) -> None:
    conn, other = stage.node(), stage.node()
    first, second, strange = renderer(stage, "w1"), renderer(stage, "w2"), renderer(stage, "w3", patterns=(OTHER,))

    put(stage, conn)
    assert [len(stage.all(worker, CachePut)) for worker in (first, second, strange)] == [1, 1, 0]
    acknowledge(stage, first)
    assert stage.all(conn, CacheAck) == []
    acknowledge(stage, second, CacheStatus.FAILED, as_="w2", message="DISK_FULL: no room", done=7)

    [ack] = stage.all(conn, CacheAck)
    assert (ack.corr_id, ack.cache_id, ack.elsewhere) == (MSG_ID, "c", ())
    assert ack.workers == [
        WorkerCache("w1", CacheStatus.OK, "", 100),
        WorkerCache("w2", CacheStatus.FAILED, "DISK_FULL: no room", 7),
    ]
    assert stage.all(other, CacheAck) == []


def test_a_put_uses_no_credit(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1", credit=0)

    put(stage, conn)
    acknowledge(stage, worker)

    assert told(stage, conn) == {"w1": CacheStatus.OK}


def test_a_worker_that_is_late_is_away_at_its_deadline_and_its_answer_is_dropped(stage: BrokerStage) -> None:
    conn, prompt, late = stage.node(), renderer(stage, "w1"), renderer(stage, "w2")
    put(stage, conn)
    acknowledge(stage, prompt)

    stage.pass_time(WAIT_S + ANSWER_WITHIN_S - 0.1)
    assert stage.all(conn, CacheAck) == []
    stage.pass_time(0.1)
    assert told(stage, conn) == {"w1": CacheStatus.OK, "w2": CacheStatus.AWAY}
    acknowledge(stage, late, as_="w2")
    assert len(stage.all(conn, CacheAck)) == 1


def test_a_worker_that_leaves_is_away_at_once(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")
    put(stage, conn)

    stage.close(worker)
    stage.pass_time(0.1)

    assert told(stage, conn) == {"w1": CacheStatus.AWAY}


def test_a_client_that_leaves_is_forgotten_with_its_put(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")
    put(stage, conn)

    stage.close(conn)
    stage.pass_time(0.1)
    acknowledge(stage, worker)

    assert stage.all(conn, CacheAck) == []


def test_answers_of_others_and_second_answers_are_dropped(stage: BrokerStage) -> None:
    conn, first, second, strange = (
        stage.node(),
        *(renderer(stage, f"w{number}") for number in (1, 2)),
        stage.worker("w9", patterns=(OTHER,)),
    )
    put(stage, conn)
    asked = stage.last(first, CachePut)

    for ack in (
        CacheAck(asked.msg_id, "c", [WorkerCache("w1", CacheStatus.FAILED)]),
        CacheAck(asked.msg_id + 1, "c", [WorkerCache("w1", CacheStatus.OK)]),
    ):
        stage.ask(strange, ack)
    stage.ask(first, CacheAck(asked.msg_id, "c", [WorkerCache("w2", CacheStatus.SKIPPED)]))  # its own name counts
    stage.ask(first, CacheAck(asked.msg_id, "c", [WorkerCache("w1", CacheStatus.FAILED)]))
    assert stage.all(conn, CacheAck) == []
    acknowledge(stage, second, as_="w2")

    assert told(stage, conn) == {"w1": CacheStatus.SKIPPED, "w2": CacheStatus.OK}


def test_away_is_no_word_of_a_worker_and_its_numbers_are_bounded(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")
    put(stage, conn)

    acknowledge(stage, worker, CacheStatus.AWAY, message="x" * 5000, done=-3)

    [[one]] = [ack.workers for ack in stage.all(conn, CacheAck)]
    assert (one.status, len(one.message), one.done_bytes) == (CacheStatus.FAILED, 1000, 0)


def test_a_worker_that_keeps_no_caches_has_failed_and_is_not_asked(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "old", caches=False)

    put(stage, conn)

    [[one]] = [ack.workers for ack in stage.all(conn, CacheAck)]
    assert (one.worker_id, one.status) == ("old", CacheStatus.FAILED)
    assert "upgrade" in one.message
    assert stage.all(worker, CachePut) == []


def test_who_does_not_wait_is_answered_at_once_and_the_workers_are_asked_all_the_same(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1")

    put(stage, conn, wait_s=0.0)

    assert told(stage, conn) == {"w1": CacheStatus.AWAY}
    assert stage.last(worker, CachePut).entries == entries()


@pytest.mark.parametrize(
    ("address", "peer", "elsewhere"),
    [
        ("tcp://b:7000", TCP, ("tcp://b:7000",)),
        ("tcp://b:7000", UNIX, ()),
        ("tcp://127.0.0.1:7000", TCP, ()),
    ],
    ids=["reachable", "for no client on a unix socket", "unreachable"],
)
def test_workers_of_another_server_are_away_here_and_to_be_asked_there_if_the_client_can(
    stage: BrokerStage, address: str, peer: Any, elsewhere: tuple[str, ...]
) -> None:
    beside = BrokerStage(beside=stage, shared=True, server_id="b", host="two")
    beside.broker.addresses = (address,)
    renderer(beside, "w2")
    renderer(beside, "w3", patterns=(OTHER,))
    stage.apply(ClusterView((stage.broker.info, beside.broker.info)))
    conn, here = stage.node() if peer is UNIX else stage.client("admin"), renderer(stage, "w1")

    put(stage, conn)
    acknowledge(stage, here)

    [ack] = stage.all(conn, CacheAck)
    assert ack.elsewhere == elsewhere
    assert told(stage, conn) == {"w1": CacheStatus.OK, "w2": CacheStatus.AWAY}


# ---------------------------------------------------------------------------------------------------- remove


def test_workers_are_told_of_a_removed_cache(stage: BrokerStage) -> None:
    conn, worker, strange = stage.node(), renderer(stage, "w1"), renderer(stage, "w2", patterns=(OTHER,))
    put(stage, conn, wait_s=0.0)

    unknown = stage.request(conn, "cache.remove", cache_id="c", target=OTHER)
    assert isinstance(unknown, ErrorMessage)
    assert unknown.code == "NOT_FOUND"
    removed = stage.request(conn, "cache.remove", cache_id="c", target=RENDER)

    assert isinstance(removed, Reply)
    assert removed.body == {"cache_id": "c", "files": 1}
    assert [put.entries for put in stage.all(worker, CachePut)] == [entries(), []]
    assert stage.all(strange, CachePut) == []


def test_a_cache_for_workers_below_job_submit_is_one_for_those_below_job_assign(stage: BrokerStage) -> None:
    conn, worker = stage.node(), renderer(stage, "w1", patterns=("job.assign.books.>",))

    put(stage, conn, target="job.submit.books.>", wait_s=0.0)
    removed = stage.request(conn, "cache.remove", cache_id="c", target="job.assign.books.>")

    assert isinstance(removed, Reply)
    assert [put.target for put in stage.all(worker, CachePut)] == ["job.assign.books.>"] * 2
