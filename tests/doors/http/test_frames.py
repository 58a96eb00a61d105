"""/v1/frames and /v1/blobs: the wire protocol of clients in plain requests, and whatever is not it."""

from __future__ import annotations

import hashlib
import os
from concurrent import futures
from typing import Any

import httpx
import pytest

from tasuki.core.broker import state
from tasuki.core.job import BlobRef, InputFile, JobSpec, State
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    FRAMES_MAX,
    Accepted,
    BlobPut,
    CacheAck,
    CachePut,
    CancelJobs,
    Claim,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    JobsFinished,
    JobsReleased,
    Message,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Subscribe,
    Welcome,
)
from tasuki.core.store_messages import Answers, CacheEntry, Turn
from tasuki.doors.http.exchange import BodyBudget
from tasuki.doors.http.frames import DECODED_ITEM_BYTES
from tasuki.server import server as server_module
from tasuki.wire.messages import encode, encode_frame
from tests.doors.http.stage import Stage, Worker, messages_of
from tests.support.waiting import until

HELLO = HelloClient(msg_id=1, client_id="c", version=2)


def post(stage: Stage, *messages: Message, token: str = "", query: str = "") -> httpx.Response:
    body = b"".join(encode(message) for message in messages)
    return stage.call("POST", f"/v1/frames{query}", token or stage.client, content=body)


def job(job_id: str, **fields: Any) -> JobSpec:
    return JobSpec(job_id=job_id, subject=fields.pop("subject", "frames.here"), **fields)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ---------------------------------------------------------------------------------------------------- messages and answers


def test_a_hello_is_welcomed_by_the_token_of_the_request_and_not_by_its_own(stage: Stage) -> None:
    [welcome] = messages_of(post(stage, HelloClient(msg_id=7, client_id="c", token="another", version=2)))

    assert isinstance(welcome, Welcome)
    assert (welcome.corr_id, welcome.kind, welcome.version, welcome.servers) == (7, "client", 2, ())


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (HelloClient(msg_id=1, client_id="c", version=99, oldest=99), "VERSION"),
        (HelloClient(msg_id=1, client_id="not a name!"), "INVALID"),
    ],
)
def test_a_hello_that_is_refused_is_told_as_over_tcp(stage: Stage, hello: HelloClient, refusal: str) -> None:
    [error] = messages_of(post(stage, hello))

    assert isinstance(error, ErrorMessage)
    assert (error.corr_id, error.code) == (0, refusal)


def test_several_messages_have_their_answers_under_their_own_numbers(stage: Stage) -> None:
    submit = SubmitJobs(5, [job("frames-1"), job("frames-2"), job("bad id")])

    first = messages_of(post(stage, submit, Request(9, "get", {"job_ids": ["nobody"]}), Heartbeat(11), Request(12, "nothing")))
    again = messages_of(post(stage, submit, CancelJobs(6, ["frames-1"])))

    accepted, missing, beat, unknown = first
    assert isinstance(accepted, Accepted)
    assert (accepted.corr_id, accepted.count, [item.index for item in accepted.exceptions]) == (5, 3, [2])
    assert isinstance(missing, ErrorMessage)
    assert (missing.corr_id, missing.code) == (9, "NOT_FOUND")
    assert isinstance(beat, HeartbeatAnswer)
    assert beat.corr_id == 11
    assert isinstance(unknown, ErrorMessage)
    assert (unknown.corr_id, unknown.code) == (12, "NOT_FOUND")
    assert isinstance(again[0], Accepted)
    assert {item.job_id: item.state for item in again[0].exceptions} == {
        "frames-1": "PENDING",
        "frames-2": "PENDING",
        "bad id": "",
    }
    assert isinstance(again[1], Reply)
    assert again[1].body["frames-1"]["state"] == "CANCELED"


def test_answers_are_compressed_if_the_request_says_so(stage: Stage) -> None:
    post(stage, SubmitJobs(1, [job(f"wide-{n}", headers={"text": "x" * 2000}) for n in range(20)]))
    ask = Request(2, "get", {"job_ids": [f"wide-{n}" for n in range(20)]})

    plain, packed = post(stage, ask), post(stage, ask, query="?codec=zstd")

    assert messages_of(plain) == messages_of(packed)
    assert len(packed.content) < len(plain.content) / 4


def test_a_list_of_jobs_with_large_headers_shows_their_names_and_fits_a_frame(stage: Stage) -> None:
    notes = {f"k{n}": "x" * 6000 for n in range(2)}
    specs = [job(f"huge-{n}", subject="huge.here", headers=notes) for n in range(600)]
    post(stage, SubmitJobs(1, specs[:300]))
    post(stage, SubmitJobs(2, specs[300:]))

    [page] = messages_of(post(stage, Request(3, "find", {"subject": "huge.here", "limit": 600})))
    post(stage, CancelJobs(4, [spec.job_id for spec in specs]))

    assert isinstance(page, Reply)
    assert [view["header_names"] for view in page.body["jobs"]] == [["k0", "k1"]] * 600


# ---------------------------------------------------------------------------------------------------- the ends of jobs


def test_a_watch_waits_for_the_first_end_and_tells_it(stage: Stage, worker: Worker) -> None:
    job_ids = [stage.submit() for _ in range(2)]
    watch = Request(4, "watch", {"job_ids": job_ids})
    before = messages_of(post(stage, watch))
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, stage, watch, query="?wait=20")
        worker.finish(worker.take(job_ids[0]))
        answer = messages_of(waiting.result(30.0))
    after = messages_of(post(stage, watch, query="?wait=20"))

    assert before == [Reply(4, {"states": dict.fromkeys(job_ids, "PENDING")})]
    for told in (answer, after):
        [results] = [message for message in told if isinstance(message, Results)]
        assert [(item.job_id, item.state) for item in results.items] == [(job_ids[0], State.SUCCEEDED)]


def test_a_watch_of_a_job_that_nobody_knows_is_refused_at_once_beside_one_that_waits(stage: Stage) -> None:
    good, bad = Request(4, "watch", {"job_ids": [stage.submit()]}), Request(5, "watch", {"job_ids": ["nobody"]})

    answers = {message.corr_id: message for message in messages_of(post(stage, good, bad, query="?wait=30"))}  # type: ignore[union-attr]

    assert isinstance(answers[4], Reply)
    assert isinstance(answers[5], ErrorMessage)
    assert answers[5].code == "NOT_FOUND"


def test_a_watch_of_somebody_elses_job_is_refused_though_it_is_watched_by_its_owner(stage: Stage) -> None:
    job_id = stage.submit()
    watch = Request(4, "watch", {"job_ids": [job_id]})
    messages_of(post(stage, watch))

    [error] = messages_of(post(stage, watch, token=stage.create_token("client"), query="?wait=1"))

    assert isinstance(error, ErrorMessage)
    assert error.code == "NOT_FOUND"


def test_jobs_that_are_watched_already_cost_the_store_nothing_when_they_are_named_again(stage: Stage) -> None:
    job_ids = [stage.submit() for _ in range(3)]
    watch = Request(4, "watch", {"job_ids": job_ids})
    messages_of(post(stage, watch))

    [reply] = messages_of(post(stage, watch))

    assert reply == Reply(4, {"states": {}})


def test_ends_between_two_polls_are_told_by_the_next_one(stage: Stage) -> None:
    job_id = stage.submit()
    watch = Request(4, "watch", {"job_ids": [job_id]})
    messages_of(post(stage, watch))
    post(stage, CancelJobs(5, [job_id]))

    answer = messages_of(post(stage, watch, query="?wait=20"))

    [results] = [message for message in answer if isinstance(message, Results)]
    assert [(item.job_id, item.state) for item in results.items] == [(job_id, State.CANCELED)]


def test_more_results_than_one_answer_takes_come_in_several(stage: Stage, worker: Worker) -> None:
    job_ids = [stage.submit() for _ in range(90)]
    text = "x" * 60_000
    leased = worker.lease(max_jobs=90).json()["jobs"]
    results = [
        {"job_id": one["job_id"], "lease_id": one["lease_id"], "result": {}, "summary_text": text, "freqs_csv": ""}
        for one in leased
    ]
    for start in range(0, 90, 30):
        assert worker.post("/jobs/result", {"results": results[start : start + 30]}).status_code == 200
    ended: set[str] = set()
    answers = 0
    while len(ended) < 90:
        left = [job_id for job_id in job_ids if job_id not in ended]
        answer = post(stage, Request(4, "watch", {"job_ids": left}), query="?wait=20")
        assert len(answer.content) < 6 * 1024 * 1024
        ended |= {item.job_id for message in messages_of(answer) if isinstance(message, Results) for item in message.items}
        answers += 1

    assert answers == 2


def test_a_poll_whose_asker_has_left_is_over(stage: Stage) -> None:
    watch = encode(Request(4, "watch", {"job_ids": [stage.submit()]}))

    with pytest.raises(httpx.ReadTimeout):
        stage.call("POST", "/v1/frames?wait=60", stage.client, content=watch, timeout=httpx.Timeout(10, read=0.3))

    until(lambda: stage.door._under_way == 0, what="the request has ended")


# ---------------------------------------------------------------------------------------------------- what is not the protocol


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "0 frames"),
        (b"\x04\x00\x00\x00\x01\x00\xff\x00", "announces"),
        (encode(HELLO)[:-1], "not whole"),
        (encode(HELLO) + b"\x05", "not whole"),
        (encode(Heartbeat(1)) * (FRAMES_MAX + 1), f"send 1 to {FRAMES_MAX}"),
        (encode(Heartbeat(0)), "msg_id"),
        (encode(Request(1, "watch", {"job_ids": "all"})), "job_ids"),
        (encode_frame(1, b"\xc1", b""), ""),
        (encode(HelloWorker(msg_id=1, worker_id="w", incarnation="i")), "HelloWorker"),
        (encode(GiveCredit(4)), "GiveCredit"),
        (encode(Subscribe(1, ("a.*",))), "Subscribe"),
        (encode(JobsFinished([])), "JobsFinished"),
        (encode(JobsReleased([Claim("j", "l", 1)])), "JobsReleased"),
        (encode(BlobPut(1, "0" * 64, 5)), "/v1/blobs"),
        (encode(Welcome(corr_id=1, version=2, server_id="s", identity="i", kind="admin")), "WELCOME"),
        (encode(Results([])), "RESULT"),
    ],
    ids=lambda part: "body" if isinstance(part, bytes) else part,
)
def test_what_a_client_may_not_send_is_400_and_nothing_of_the_body_is_done(stage: Stage, body: bytes, words: str) -> None:
    before = SubmitJobs(3, [job("never-stored")])

    answer = stage.call("POST", "/v1/frames", stage.client, content=encode(before) + body if body else body)

    assert code(answer) == (400, "INVALID_PAYLOAD")
    assert words in answer.json()["error"]["message"]
    assert stage.get("/v1/jobs/never-stored").status_code == 404


def test_a_frame_that_announces_more_than_the_limit_is_413(stage: Stage) -> None:
    bomb = (FRAME_MAX_BYTES + 1).to_bytes(4, "little") + b"\x01\x00\x00\x00"

    assert code(stage.call("POST", "/v1/frames", stage.client, content=bomb)) == (413, "TOO_LARGE")


def test_a_frame_that_unpacks_to_more_than_the_limit_is_refused(stage: Stage) -> None:
    bomb = encode(Request(1, "get", {"job_ids": ["x" * 100] * 200_000}), "zstd")

    assert len(bomb) < 100_000
    assert code(stage.call("POST", "/v1/frames", stage.client, content=bomb)) == (413, "TOO_LARGE")


def test_jobs_of_requests_that_wait_are_counted_in_the_memory_of_their_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.door, "_bodies", BodyBudget(max_bytes=2 * 1000 * DECODED_ITEM_BYTES))
    submits = [SubmitJobs(number, [job(f"many-{number}-{n}") for n in range(500)]) for number in (1, 2, 3)]
    many_args = SubmitJobs(4, [job(f"args-{n}", args=("ab",) * 2500) for n in range(2)])

    assert code(post(stage, *submits)) == (429, "TOO_MANY_REQUESTS")
    assert code(post(stage, many_args)) == (429, "TOO_MANY_REQUESTS")
    assert len(messages_of(post(stage, submits[0]))) == 1


def test_messages_that_wait_for_the_store_follow_it_some_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all would wake up at once, and the next turn would have all of them, however many they are."""
    for module in (server_module, state):
        monkeypatch.setattr(module, "OWNER_PER_TURN", 10)
    longest = 0

    def note(turn: Turn, answers: Answers) -> None:
        nonlocal longest
        longest = max(longest, len(turn.submit))

    monkeypatch.setattr(stage.server, "on_turn", note)
    submits = [SubmitJobs(number, [job(f"burst-{number}-{n}") for n in range(5)]) for number in range(1, 61)]

    assert len(messages_of(post(stage, *submits))) == 60
    assert longest <= 20


def test_a_request_that_is_newer_than_the_server_has_an_answer_and_the_others_too(stage: Stage) -> None:
    newer = encode_frame(200, b"\x81\xa6msg_id\x08", b"")

    answers = messages_of(stage.call("POST", "/v1/frames", stage.client, content=newer + encode(Heartbeat(9))))

    assert [message.corr_id for message in answers] == [8, 9]  # type: ignore[union-attr]
    assert isinstance(answers[0], ErrorMessage)
    assert answers[0].code == "UNKNOWN_FRAME"


def test_a_request_that_cannot_be_read_fails_alone(stage: Stage) -> None:
    unreadable = encode(Request(8, "watch", {"job_ids": [1]}))

    answers = messages_of(stage.call("POST", "/v1/frames", stage.client, content=unreadable + encode(Heartbeat(9))))

    assert [message.corr_id for message in answers] == [8, 9]  # type: ignore[union-attr]
    assert isinstance(answers[0], ErrorMessage)
    assert (answers[0].code, "parameters" in answers[0].message) == ("INVALID", True)


@pytest.mark.parametrize("query", ["?codec=rot13", "?wait=-1", "?wait=100"])
def test_a_query_that_makes_no_sense_is_400(stage: Stage, query: str) -> None:
    assert code(post(stage, Heartbeat(1), query=query)) == (400, "INVALID_PAYLOAD")


def test_a_client_is_not_told_what_is_wrong_behind_the_server_and_an_admin_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.server, "_look_at_disk", lambda: None)  # it would see that there is room
    monkeypatch.setattr(stage.server.broker, "disk_problem", "/srv/secret has 5 bytes free")

    [told] = messages_of(post(stage, SubmitJobs(1, [job("full-1")])))
    [told_admin] = messages_of(post(stage, SubmitJobs(1, [job("full-1")]), token=stage.admin))

    assert isinstance(told, ErrorMessage)
    assert isinstance(told_admin, ErrorMessage)
    assert (told.code, told_admin.code) == ("DISK_FULL", "DISK_FULL")
    assert "/srv/secret" not in told.message
    assert "/srv/secret" in told_admin.message


def test_a_client_token_may_not_give_an_admins_orders(stage: Stage) -> None:
    [error] = messages_of(post(stage, Request(1, "token.list")))

    assert isinstance(error, ErrorMessage)
    assert error.code == "FORBIDDEN"


def test_a_token_that_is_revoked_while_it_waits_is_told_so(stage: Stage) -> None:
    token_id, secret = stage.create_named_token("client")
    messages_of(post(stage, SubmitJobs(1, [job("revoked-1")]), token=secret))
    watch = Request(4, "watch", {"job_ids": ["revoked-1"]})
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, stage, watch, token=secret, query="?wait=20")
        until(lambda: stage.server.broker.watchers.get("revoked-1"), what="the job is watched")
        stage.revoke_token(token_id)

        assert code(waiting.result(30.0)) == (403, "TOKEN_REVOKED")


# ---------------------------------------------------------------------------------------------------- blobs


def put(stage: Stage, data: bytes, sha256: str = "", **options: Any) -> httpx.Response:
    path = f"/v1/blobs/{sha256 or hashlib.sha256(data).hexdigest()}"
    return stage.call("PUT", path, stage.client, content=data, **options)


@pytest.fixture(scope="module")
def blob(stage: Stage) -> tuple[str, BlobRef, bytes]:
    """A job with a large input: (job_id, the blob, its bytes)."""
    data = os.urandom(1_000_000)
    ref = BlobRef(hashlib.sha256(data).hexdigest(), len(data))
    assert put(stage, data).json() == {"sha256": ref.sha256, "size_bytes": ref.size_bytes}
    file = InputFile("in.bin", sha256=ref.sha256, size_bytes=ref.size_bytes)
    [accepted] = messages_of(post(stage, SubmitJobs(1, [job("with-blob", files=(file,))])))
    assert isinstance(accepted, Accepted)
    assert not accepted.exceptions
    return "with-blob", ref, data


@pytest.mark.parametrize("size_bytes", [0, 1, 256 * 1024, 20 * 1024 * 1024])
def test_a_blob_is_offered_sent_and_had(stage: Stage, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"

    offers = [stage.post(path, {"size_bytes": size_bytes}).json()]
    sent = put(stage, data)
    offers.append(stage.post(path, {"size_bytes": size_bytes}).json())

    assert sent.status_code == 200, sent.text
    assert offers == [{"have": False, "offset": 0}, {"have": True, "offset": size_bytes}]
    assert put(stage, data).status_code == 200


def test_bytes_of_another_hash_are_refused_and_not_kept(stage: Stage) -> None:
    answer = put(stage, b"other bytes", "1" * 64)

    assert code(answer) == (400, "CORRUPT")
    assert stage.post(f"/v1/blobs/{'1' * 64}", {"size_bytes": 11}).json() == {"have": False, "offset": 0}


def test_a_blob_without_a_size_is_refused(stage: Stage) -> None:
    answer = put(stage, iter([b"some"]), "2" * 64)  # type: ignore[arg-type]

    assert code(answer) == (400, "INVALID_PAYLOAD")
    assert "Content-Length" in answer.json()["error"]["message"]


@pytest.mark.parametrize("sha256", ["x", "A" * 64, "..%2F..%2Fetc"])
def test_what_is_no_hash_is_refused(stage: Stage, sha256: str) -> None:
    answers = [put(stage, b"x", sha256), stage.post(f"/v1/blobs/{sha256}", {"size_bytes": 1})]
    answers.append(stage.get(f"/v1/blobs/{sha256}?job_id=with-blob"))

    assert {answer.status_code for answer in answers} <= {400, 404}


def test_a_blob_that_is_left_in_the_middle_leaves_nothing_under_way(stage: Stage) -> None:
    with pytest.raises(httpx.HTTPError):
        put(stage, _broken_off(), "3" * 64, headers={"Content-Length": "100000"})  # type: ignore[arg-type]

    until(lambda: not stage.server._transfers.under_way(), what="the upload is dropped")


def _broken_off() -> Any:
    yield b"x" * 10_000
    raise httpx.WriteError("the sender dies")


def test_no_blob_is_taken_over_the_budget(stage: Stage) -> None:
    stage.server.broker.over_budget = "100 bytes are kept, the budget is 10"
    try:
        answers = [put(stage, b"one more"), stage.post(f"/v1/blobs/{'4' * 64}", {"size_bytes": 5})]
    finally:
        stage.server.broker.over_budget = ""

    assert [code(answer) for answer in answers] == [(503, "DISK_FULL")] * 2


@pytest.mark.parametrize(
    ("wanted", "first", "stop", "status"),
    [
        ("", 0, 1_000_000, 200),
        ("bytes=0-", 0, 1_000_000, 200),
        ("bytes=300000-", 300_000, 1_000_000, 206),
        ("bytes=999999-", 999_999, 1_000_000, 206),
        ("bytes=10-19", 10, 20, 206),
        ("bytes=0-0", 0, 1, 206),
        ("bytes=500000-9999999", 500_000, 1_000_000, 206),
        ("bytes=-5", 0, 1_000_000, 200),
        ("lines=1-2", 0, 1_000_000, 200),
    ],
)
def test_a_blob_is_read_whole_or_from_where_it_is_wanted(
    stage: Stage, blob: tuple[str, BlobRef, bytes], wanted: str, first: int, stop: int, status: int
) -> None:
    job_id, ref, data = blob

    answer = stage.get(f"/v1/blobs/{ref.sha256}?job_id={job_id}", headers={"Range": wanted} if wanted else {})

    assert answer.status_code == status
    assert answer.content == data[first:stop]
    if status == 206:
        assert answer.headers["content-range"] == f"bytes {first}-{stop - 1}/1000000"


def test_a_range_behind_the_end_is_refused(stage: Stage, blob: tuple[str, BlobRef, bytes]) -> None:
    job_id, ref, _ = blob
    answers = [
        stage.get(f"/v1/blobs/{ref.sha256}?job_id={job_id}", headers={"Range": f"bytes={first}-"})
        for first in (1_000_000, 10**14)
    ]

    assert [code(answer) for answer in answers] == [(400, "INVALID_PAYLOAD")] * 2


def test_a_blob_is_for_those_who_may_see_its_job(stage: Stage, blob: tuple[str, BlobRef, bytes]) -> None:
    job_id, ref, data = blob
    path = f"/v1/blobs/{ref.sha256}"
    stranger = stage.create_token("client")

    answers = [stage.get(f"{path}?job_id={job_id}", stranger), stage.get(f"{path}?job_id=nobody"), stage.get(path)]

    assert [answer.status_code for answer in answers] == [404, 404, 400]
    assert stage.get(f"{path}?job_id={job_id}", stage.admin).content == data


# ---------------------------------------------------------------------------------------------------- caches


def test_caches_are_for_tokens_whose_scope_says_so(stage: Stage, blob: tuple[str, BlobRef, bytes]) -> None:
    _, ref, _ = blob
    mine, other = (stage.create_token("client", scope=[scope]) for scope in ("frames.>", "other.>"))
    putting = CachePut(1, "scene", "frames.>", [CacheEntry("a.bin", ref.sha256, ref.size_bytes)])
    listing, showing = Request(2, "cache.list"), Request(3, "cache.show", {"cache_id": "scene"})
    removing = Request(4, "cache.remove", {"cache_id": "scene", "target": "frames.>"})
    body = {"job_id": "with-cache", "subject": "frames.here", "exec": "x", "files": [{"name": "in", "cache": ["scene", "a.bin"]}]}

    for token in (stage.client, other):
        for message in (putting, removing):
            [error] = messages_of(post(stage, message, token=token))
            assert isinstance(error, ErrorMessage)
            assert error.code == "FORBIDDEN"
    assert post(stage, putting, token=stage.create_token("worker")).status_code == 403
    [stored] = messages_of(post(stage, putting, token=mine))
    assert stored == CacheAck(1, "scene", [])
    for token in (stage.client, other):
        listed, shown = messages_of(post(stage, listing, showing, token=token))
        assert isinstance(listed, Reply)
        assert listed.body["caches"] == []
        assert isinstance(shown, ErrorMessage)
        assert shown.code == "NOT_FOUND"
    assert code(stage.post("/v1/jobs", body, stage.client)) == (404, "NOT_FOUND")
    assert stage.get(f"/v1/blobs/{ref.sha256}?job_id=cache:scene/a.bin", other).status_code == 404

    listed, shown = messages_of(post(stage, listing, showing, token=mine))
    assert isinstance(listed, Reply)
    assert [one["cache_id"] for one in listed.body["caches"]] == ["scene"]
    assert isinstance(shown, Reply)
    assert [one["name"] for one in shown.body["files"]] == ["a.bin"]
    assert stage.post("/v1/jobs", body, mine).json()["created"]
    assert stage.get("/v1/jobs/with-cache", mine).json()["file_hashes"] == {"in": ref.sha256}
    [removed] = messages_of(post(stage, removing, token=mine))
    assert isinstance(removed, Reply)
    assert removed.body["files"] == 1


@pytest.mark.parametrize(
    "file",
    [
        {},
        {"cache": ["scene", "a"], "data_base64": "eA=="},
        {"cache": ["scene"]},
        {"cache": ["../scene", "a"]},
        {"cache": ["scene", "../a"]},
    ],
    ids=str,
)
def test_a_file_of_a_json_job_is_inline_or_of_a_cache(stage: Stage, file: dict[str, Any]) -> None:
    answer = stage.post("/v1/jobs", {"subject": "frames.here", "exec": "x", "files": [{"name": "in", **file}]})

    assert code(answer) == (400, "INVALID_PAYLOAD")


def test_a_subscription_needs_a_connection_and_the_refusal_says_how_messages_are_read(stage: Stage) -> None:
    [refusal] = messages_of(post(stage, Request(7, "subscribe", {"pattern": "a.>", "queue": ""})))
    assert isinstance(refusal, ErrorMessage)
    assert (refusal.code, "GET /v1/messages?pattern=" in refusal.message) == ("INVALID", True)
