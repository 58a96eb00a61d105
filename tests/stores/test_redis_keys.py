"""The keys that outsiders know, read and written by raw commands alone, as redis-cli would send them."""

from __future__ import annotations

import msgspec
import pytest

from tasuki.core.apps import detail_of, template_of
from tasuki.core.job import JobSpec, OnDisconnect, Outcome, State, body_hash
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.store_messages import LeaseRequest, LeaseStatus, Report, ReportStatus, Submission, Submitted
from tasuki.errors import Conflict
from tasuki.stores.redis.store import RedisStore
from tasuki.testing.store_stage import PAST_LEASE_S, token_row
from tests.support.redis_app import PAYLOAD, RESULT_TTL_S, Zpe
from tests.support.redis_service import RedisService

# -- the way of an outsider's job ---------------------------------------------------------------------------------


def test_a_job_of_set_and_lpush_is_leased(zpe: Zpe) -> None:
    zpe.push("j1")

    [grant] = zpe.lease("w1")

    spec = msgspec.msgpack.decode(grant.spec, type=JobSpec)
    assert (spec.job_id, spec.payload, spec.subject, spec.max_retries) == ("j1", PAYLOAD, "job.assign.zpe", 2)
    assert zpe.queue() == []
    lease = zpe.raw.hgetall("zpe:lease:j1")
    expires_at = zpe.clock.lease() + grant.ttl_s + LEASE_MARGIN_S
    assert (lease["worker_id"], lease["lease_id"], float(lease["expires_at"])) == ("w1", grant.lease_id, expires_at)
    assert zpe.raw.zrange("zpe:lease:index", 0, -1, withscores=True) == [("j1", expires_at)]
    assert zpe.raw.ttl("zpe:lease:j1") == -1
    assert zpe.status("j1") == {"status": "running", "detail": "", "updated_at": repr(zpe.clock.wall()).removesuffix(".0")}


def test_a_finished_job_leaves_result_and_status_and_their_time_to_live_begins(zpe: Zpe) -> None:
    zpe.push("j1")
    [grant] = zpe.lease()
    assert zpe.raw.ttl("zpe:payload:j1") == -1

    answer = zpe.stage.finish(grant, result=b'{"zpe": 0.27}', meta={"summary_text": "0.27 eV", "freqs_csv": "1,2", "host": "n1"})

    assert answer.answer is ReportStatus.RECORDED
    assert zpe.raw.mget("zpe:result:j1", "zpe:summary:j1", "zpe:freqs:j1") == ['{"zpe": 0.27}', "0.27 eV", "1,2"]
    assert zpe.status("j1")["status"] == "finished"
    for name in ("result", "summary", "freqs", "status", "payload"):
        assert 0 < zpe.raw.ttl(f"zpe:{name}:j1") <= RESULT_TTL_S, name
    assert not zpe.raw.exists("zpe:lease:j1", "zpe:retry_count:j1")
    assert zpe.raw.zcard("zpe:lease:index") == 0
    outcome = zpe.stage.job("j1").outcome
    assert outcome == Outcome(result=b'{"zpe": 0.27}', meta={"summary_text": "0.27 eV", "freqs_csv": "1,2", "host": "n1"})


def test_a_failed_job_waits_in_delay_then_stands_in_the_queue_again(zpe: Zpe) -> None:
    zpe.push("j1")
    [grant] = zpe.lease()

    zpe.stage.fail(grant, message="pw.x exited with code 1")

    run_at = zpe.clock.wall() + 10.0
    assert zpe.raw.zrange("zpe:delay", 0, -1, withscores=True) == [("j1", run_at)]
    assert (zpe.queue(), zpe.raw.get("zpe:retry_count:j1")) == ([], "1")
    assert zpe.status("j1")["status"] == "queued"
    assert "pw.x exited with code 1" in zpe.status("j1")["detail"]
    assert not zpe.raw.exists("zpe:lease:j1")
    assert zpe.raw.ttl("zpe:payload:j1") == -1

    zpe.clock.advance(10.5)
    zpe.stage.promote()

    assert (zpe.queue(), zpe.raw.zcard("zpe:delay")) == (["j1"], 0)


def test_a_lease_that_ends_costs_a_loss_and_a_delay_and_the_index_is_clean(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.lease()
    zpe.clock.advance(PAST_LEASE_S)

    zpe.stage.reap()

    assert (zpe.queue(), zpe.raw.get("zpe:retry_count:j1"), zpe.raw.zcard("zpe:lease:index")) == ([], "1", 0)
    assert zpe.raw.zrange("zpe:delay", 0, -1, withscores=True) == [("j1", zpe.clock.wall() + 10.0)]
    assert not zpe.raw.exists("zpe:lease:j1")


def test_losses_wait_as_the_seed_says(zpe: Zpe) -> None:
    """delay = min(300, 10 * 2^retry), the first loss too."""
    spec = msgspec.structs.replace(template_of("zpe"), job_id="j1", payload=PAYLOAD, max_losses=9)
    zpe.store.submit([Submission(spec, "alice", body_hash(spec))])
    delays = []
    for _ in range(4):
        zpe.lease()
        zpe.clock.advance(PAST_LEASE_S)
        zpe.stage.reap()
        due = zpe.raw.zrange("zpe:delay", 0, -1, withscores=True)
        delays.append(due[0][1] - zpe.clock.wall() if due else 0.0)
        zpe.clock.advance(delays[-1])
        zpe.stage.promote()

    assert delays == [10.0, 20.0, 40.0, 80.0]


def test_past_its_retries_a_job_is_a_dead_letter(zpe: Zpe) -> None:
    zpe.push("j1", "ok")
    for _ in range(3):
        [grant] = zpe.lease()
        zpe.stage.fail(grant, message="no licence")
        zpe.clock.advance(100)
        zpe.stage.promote()

    assert zpe.raw.lrange("zpe:dlq", 0, -1) == ["j1"]
    assert zpe.status("j1")["status"] == "failed"
    assert "no licence" in zpe.status("j1")["detail"]
    assert (zpe.raw.get("zpe:retry_count:j1"), zpe.queue()) == ("3", ["ok"])
    assert zpe.raw.ttl("zpe:payload:j1") > 0


def test_a_dead_letter_that_is_set_going_again_leaves_the_list_and_expires_no_more(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.fail(zpe.lease()[0], permanent=True)

    zpe.store.requeue(["j1"], actor="operator")

    assert (zpe.raw.llen("zpe:dlq"), zpe.queue(), zpe.raw.exists("zpe:retry_count:j1")) == (0, ["j1"], 0)
    assert [zpe.raw.ttl(f"zpe:{name}:j1") for name in ("payload", "status")] == [-1, -1]
    assert zpe.lease()[0].attempt == 2


def test_a_job_whose_payload_has_expired_cannot_be_set_going_again(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.finish(zpe.lease()[0])
    zpe.raw.delete("zpe:payload:j1")

    [answer] = zpe.store.requeue(["j1"], actor="operator")

    assert (answer.done, answer.state) == (False, State.SUCCEEDED)


def test_the_detail_of_a_status_is_the_one_that_is_told_over_http_all_along_a_life(zpe: Zpe) -> None:
    told = []

    def look() -> None:
        job, incidents = zpe.stage.job("j1"), zpe.store.incidents("j1")
        asked = "".join(incident.reason for incident in incidents if incident.kind == "cancel_requested" and job.cancel_requested)
        detail = detail_of(job.state, incidents, job.outcome.message if job.outcome else "", asked)
        assert zpe.status("j1")["detail"] == detail
        told.append(detail)

    zpe.stage.add("j1", subject="job.assign.zpe", max_losses=9)
    look()
    [grant] = zpe.stage.lease(on_disconnect=OnDisconnect.KEEP)
    look()
    zpe.clock.advance(PAST_LEASE_S)
    zpe.stage.reap()
    look()
    zpe.stage.renew(grant)
    look()
    zpe.clock.advance(PAST_LEASE_S)
    zpe.stage.reap()
    [again] = zpe.lease()
    look()
    zpe.stage.release(again)
    look()
    zpe.stage.fail(zpe.lease()[0], message="no licence", permanent=True)
    look()
    zpe.store.requeue(["j1"], actor="operator")
    look()
    [last] = zpe.lease()
    zpe.store.cancel(["j1"], actor="operator", reason="a typing error")
    look()
    zpe.stage.fail(last, error_code="CANCELED", message="stopped")
    look()
    zpe.store.requeue(["j1"], actor="operator")
    zpe.store.cancel(["j1"], actor="operator")
    look()

    lost = "worker w1 was lost (loss 1 of 9); kept until the next grant"
    ends = ["a typing error", "a typing error; stopped", "canceled by operator"]
    assert told == ["", "", lost, "", "", "draining", "no licence; permanent", "", *ends]


# -- order and disorder in the list --------------------------------------------------------------------------------


@pytest.mark.parametrize("not_after", [None, 1e12])
def test_the_list_is_first_in_first_out_between_outsiders_and_submits(zpe: Zpe, not_after: float | None) -> None:
    zpe.push("j1")
    spec = JobSpec(job_id="j2", subject="job.assign.zpe", payload=PAYLOAD, not_after=not_after)
    zpe.store.submit([Submission(spec, "alice", body_hash(spec))])
    zpe.push("j3")

    assert zpe.queue() == ["j3", "j2", "j1"]
    assert [grant.job_id for grant in zpe.lease(limit=5)] == ["j1", "j2", "j3"]


def test_a_job_that_comes_back_finds_its_place_by_age(zpe: Zpe) -> None:
    zpe.push(*(f"j{number}" for number in range(6)))
    grants = {grant.job_id: grant for grant in zpe.lease(limit=4)}

    for job_id in ("j2", "j0", "j3", "j1"):
        zpe.stage.release(grants[job_id])

    assert zpe.queue() == ["j5", "j4", "j3", "j2", "j1", "j0"]


def test_an_entry_that_is_there_twice_is_one_job(zpe: Zpe) -> None:
    zpe.push("j1", "j1", "j2")

    assert [grant.job_id for grant in zpe.lease(limit=9)] == ["j1", "j2"]
    zpe.lease("w2")

    assert zpe.queue() == []


def test_an_outsider_who_pushes_a_finished_job_again_changes_nothing(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.finish(zpe.lease()[0], result=b"1")

    zpe.raw.lpush("zpe:queue", "j1")

    assert (zpe.lease(), zpe.queue()) == ([], [])
    assert zpe.stage.job("j1").state is State.SUCCEEDED


# -- an outsider's job before anybody leased it --------------------------------------------------------------------


def test_it_can_be_asked_for(zpe: Zpe) -> None:
    zpe.push("j1")

    job = zpe.stage.job("j1")

    assert (job.state, job.spec.payload, job.submitter, job.created_at) == (State.PENDING, PAYLOAD, "app:zpe", zpe.clock.wall())
    assert zpe.queue() == ["j1"]


def test_it_can_be_canceled(zpe: Zpe) -> None:
    zpe.push("j1")

    [canceled] = zpe.store.cancel(["j1"], actor="alice")

    assert (canceled.state, zpe.queue(), zpe.status("j1")["status"]) == (State.CANCELED, [], "canceled")


def test_it_is_counted_after_the_leaders_next_look(zpe: Zpe) -> None:
    zpe.push("j1", "j2", "j3")

    promoted = zpe.store.promote(epoch=zpe.stage.epoch)

    assert promoted == 3
    assert zpe.store.counts()["zpe"].pending == 3
    assert zpe.stage.found() == ["j3", "j2", "j1"]


def test_it_is_counted_though_a_job_of_a_server_stands_before_it(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.add("j2", subject="job.assign.zpe")

    assert (zpe.stage.promote(), zpe.stage.promote()) == (1, 0)

    assert zpe.store.counts()["zpe"].pending == 2


def test_more_than_one_look_takes_are_all_counted(zpe: Zpe) -> None:
    limit, many = 10, 57
    zpe.push(*(f"j{number}" for number in range(many)))
    met = []

    while not met or met[-1] == limit:
        met.append(zpe.store.promote(epoch=zpe.stage.epoch, limit=limit))

    assert sum(met) == zpe.store.counts()["zpe"].pending == many
    # and: looks go on, and a job that is pushed between known ones later is met too
    zpe.raw.set("zpe:payload:late", PAYLOAD)
    zpe.raw.linsert("zpe:queue", "AFTER", "j30", "late")
    assert sum(zpe.store.promote(epoch=zpe.stage.epoch, limit=limit) for _ in range(8)) == 1


def test_a_submit_of_its_id_meets_it(zpe: Zpe) -> None:
    zpe.push("j1")
    same = JobSpec(job_id="j1", subject="job.assign.zpe", payload=PAYLOAD, max_retries=2, max_losses=1)
    other = msgspec.structs.replace(same, payload=b"{}")

    one, two = zpe.store.submit([Submission(spec, "alice", body_hash(spec)) for spec in (same, other)])

    assert isinstance(one, Submitted)
    assert not one.created
    assert isinstance(two, Conflict)
    assert zpe.raw.get("zpe:payload:j1") == PAYLOAD.decode()


# -- the rest of the contract --------------------------------------------------------------------------------------


def test_a_submitted_job_has_the_keys_that_an_outsider_would_write(zpe: Zpe) -> None:
    spec = JobSpec(job_id="j1", subject="job.assign.zpe", payload=PAYLOAD)

    zpe.store.submit([Submission(spec, "alice", body_hash(spec))])

    assert (zpe.raw.get("zpe:payload:j1"), zpe.queue()) == (PAYLOAD.decode(), ["j1"])
    assert zpe.status("j1")["status"] == "queued"


def test_other_priorities_and_subjects_wait_beside_the_list(zpe: Zpe) -> None:
    zpe.stage.add("urgent", subject="job.assign.zpe", priority=9)
    zpe.stage.add("other", subject="render.eu.1")

    assert zpe.queue() == []
    assert sorted(zpe.raw.keys("zpe:queue:*")) == ["zpe:queue:5:render:1:render.eu.1", "zpe:queue:9:zpe:1:job.assign.zpe"]
    assert zpe.raw.zrange("zpe:queue:9:zpe:1:job.assign.zpe", 0, -1) == ["urgent"]


def test_an_index_entry_without_a_lease_is_dropped(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.finish(zpe.lease()[0])
    zpe.raw.zadd("zpe:lease:index", {"j1": 1.0, "unknown": 1.0})

    assert zpe.stage.reap() == []
    assert zpe.raw.zcard("zpe:lease:index") == 0


def test_a_lease_whose_key_was_deleted_is_reaped_all_the_same(zpe: Zpe) -> None:
    zpe.push("j1")
    [grant] = zpe.lease()
    zpe.raw.delete("zpe:lease:j1")
    zpe.clock.advance(PAST_LEASE_S)

    assert [reaped.job_id for reaped in zpe.stage.reap()] == ["j1"]
    assert zpe.stage.renew(grant) is LeaseStatus.LOST


def test_tokens_are_kept_by_their_hash_and_revoked_ones_are_listed(zpe: Zpe) -> None:
    zpe.store.add_token(token_row("t", kind="worker", label="rack 7", expires_at=5.5))
    token = zpe.raw.hgetall(f"zpe:token:{'t' * 64}")
    zpe.store.revoke_token("t", actor="admin")

    assert (token["kind"], token["label"], token["expires_at"]) == ("worker", "rack 7", "5.5")
    assert zpe.raw.smembers("zpe:revoked_tokens") == {"t" * 64}
    assert float(zpe.raw.hget(f"zpe:token:{'t' * 64}", "revoked_at")) == zpe.clock.wall()


def test_pruning_leaves_no_key_of_the_job(zpe: Zpe) -> None:
    zpe.push("j1", "j2")
    empty = {key for key in zpe.raw.keys("*") if not key.endswith((":j1", ":j2"))}
    grants = zpe.lease(limit=2)
    zpe.stage.finish(grants[0], result=b"1", meta={"summary_text": "s", "freqs_csv": "f"})
    zpe.stage.fail(grants[1], permanent=True)

    assert zpe.store.prune(before=zpe.clock.wall() + 1, epoch=zpe.stage.epoch) == 2

    left = {key for key in zpe.raw.keys("*") if not key.startswith("zpe:turn:")}
    assert left - empty == {"zpe:sequence", "zpe:served"}


def test_two_apps_share_a_database_and_nothing_else(redis_url: str) -> None:
    one, two = (RedisStore.open(redis_url, app=app) for app in ("one", "two"))
    spec = JobSpec(job_id="a", subject="x.y")
    try:
        one.submit([Submission(spec, "alice", body_hash(spec))])

        request = LeaseRequest(worker_id="w", incarnation="1", patterns=(">",))
        assert two.get(["a"]) == [None]
        assert two.lease([request]) == [[]]
        assert [grant.job_id for grant in one.lease([request])[0]] == ["a"]
    finally:
        one.close()
        two.close()


def test_the_clock_is_that_of_redis(redis_url: str, redis_service: RedisService) -> None:
    store = RedisStore.open(redis_url)
    spec = JobSpec(job_id="a", subject="x.y")
    try:
        before = store.clock.wall()
        store.submit([Submission(spec, "alice", body_hash(spec))])
        [[grant]] = store.lease([LeaseRequest(worker_id="w", incarnation="1", patterns=(">",))])
        store.finish([Report("a", "w", grant.lease_id, 1, Outcome())])
        after = store.clock.wall()

        [job] = store.get(["a"])
        assert job is not None
        assert job.finished_at is not None
        assert before <= job.created_at <= job.finished_at <= after
    finally:
        store.close()
