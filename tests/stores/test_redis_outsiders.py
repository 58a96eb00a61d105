"""Outsiders who write keys of a wrong type, ids that are none, and entries in the wrong order: honest jobs go on beside them."""

from __future__ import annotations

import logging

import pytest

from tasuki.core.apps import detail_of
from tasuki.core.job import JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import Filter, Submission
from tasuki.testing.store_stage import PAST_LEASE_S, token_row
from tests.support.redis_app import BAD_IDS, PAYLOAD, TYPES, Zpe, make

# -- ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", BAD_IDS)
def test_an_entry_that_is_no_job_id_is_a_dead_letter_and_the_job_behind_it_is_leased(
    zpe: Zpe, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    zpe.push(entry, "good")

    assert [grant.job_id for grant in zpe.lease(limit=9)] == ["good"]

    [dead] = zpe.store.find(Filter(states=frozenset({State.FAILED}))).jobs
    assert dead.job_id.startswith("refused-")
    assert dead.outcome is not None
    assert "push it under another job_id" in dead.outcome.message
    assert zpe.raw.lrange("zpe:dlq", 0, -1) == [dead.job_id]
    assert zpe.status(entry) | {"updated_at": ""} == {"status": "failed", "detail": dead.outcome.message, "updated_at": ""}
    assert zpe.queue() == []
    assert dead.outcome.message in caplog.text


def test_a_refused_entry_keeps_its_payload_and_runs_under_its_new_id_when_it_is_retried(zpe: Zpe) -> None:
    zpe.push("mol:1")
    zpe.lease()
    [job_id] = zpe.raw.lrange("zpe:dlq", 0, -1)

    [answer] = zpe.store.requeue([job_id], actor="operator")

    [grant] = zpe.lease()
    assert (answer.done, grant.job_id, zpe.stage.job(job_id).spec.payload) == (True, job_id, PAYLOAD)
    assert not zpe.raw.exists("zpe:payload:mol:1")


def test_an_entry_of_bytes_that_are_no_text_breaks_nothing(zpe: Zpe) -> None:
    zpe.raw.set(b"zpe:payload:\xff\xfe", "{}")
    zpe.raw.lpush("zpe:queue", b"\xff\xfe")
    zpe.push("good")

    assert [grant.job_id for grant in zpe.lease(limit=9)] == ["good"]
    assert zpe.raw.llen("zpe:dlq") == 1


def test_a_refused_entry_that_is_pushed_again_is_one_dead_letter(zpe: Zpe) -> None:
    for _ in range(2):
        zpe.push("mol:1")
        zpe.stage.promote()

    assert (zpe.raw.llen("zpe:dlq"), zpe.queue()) == (1, [])


def test_a_job_called_index_leaves_the_index_of_leases_alone(zpe: Zpe) -> None:
    """Doors refuse the id; a job of another subject that has it all the same must not delete the index."""
    spec = JobSpec(job_id="index", subject="render.eu.1", payload=PAYLOAD)
    zpe.store.submit([Submission(spec, "alice", body_hash(spec))])
    zpe.push("j1")
    [leased] = zpe.lease("w1")
    [other] = zpe.stage.lease("w2", patterns=("render.>",))

    zpe.stage.fail(other, "w2", permanent=True)

    assert zpe.raw.zrange("zpe:lease:index", 0, -1) == [leased.job_id]


# -- types of a job's keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["status", "lease", "retry_count", "result", "summary", "freqs"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_job_with_a_key_of_any_type_runs_to_its_end_and_so_does_the_next(zpe: Zpe, name: str, kind: str) -> None:
    make(zpe, f"zpe:{name}:odd", kind)
    zpe.push("odd", "next")

    grants = zpe.lease(limit=2)
    for grant in grants:
        zpe.stage.finish(grant, result=b"1", meta={"summary_text": "s", "freqs_csv": "f"})

    assert [grant.job_id for grant in grants] == ["odd", "next"]
    assert [zpe.status(job_id)["status"] for job_id in ("odd", "next")] == ["finished"] * 2
    assert zpe.stage.job("odd").outcome == Outcome(result=b"1", meta={"summary_text": "s", "freqs_csv": "f"})
    assert zpe.raw.zcard("zpe:lease:index") == 0


@pytest.mark.parametrize("name", ["status", "lease", "retry_count", "result"])
def test_a_key_that_is_spoilt_while_its_job_runs_does_not_keep_it_from_being_lost_and_run_again(zpe: Zpe, name: str) -> None:
    zpe.push("j1")
    zpe.lease()
    make(zpe, f"zpe:{name}:j1", "list")

    zpe.clock.advance(PAST_LEASE_S)
    assert [reaped.job_id for reaped in zpe.stage.reap()] == ["j1"]
    zpe.clock.advance(20)
    zpe.stage.promote()

    [again] = zpe.lease()
    assert (again.job_id, again.attempt, zpe.stage.job("j1").state) == ("j1", 2, State.ASSIGNED)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "string"])
def test_a_payload_of_another_type_is_a_dead_letter_that_runs_once_it_is_mended(zpe: Zpe, kind: str) -> None:
    make(zpe, "zpe:payload:odd", kind)
    zpe.raw.lpush("zpe:queue", "odd")
    zpe.push("good")

    assert [grant.job_id for grant in zpe.lease(limit=9)] == ["good"]
    assert zpe.raw.lrange("zpe:dlq", 0, -1) == ["odd"]
    assert f"zpe:payload:odd is a {kind}" in zpe.status("odd")["detail"]

    assert not zpe.store.requeue(["odd"], actor="operator")[0].done
    zpe.raw.delete("zpe:payload:odd")
    zpe.raw.set("zpe:payload:odd", PAYLOAD)
    assert zpe.store.requeue(["odd"], actor="operator")[0].done
    assert [grant.job_id for grant in zpe.lease()] == ["odd"]


# -- types of the app's own keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["queue", "lease:index", "delay", "dlq", "revoked_tokens"])
def test_a_shared_key_of_another_type_is_moved_aside_before_anything_is_written(
    zpe: Zpe, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    zpe.push("waits")
    zpe.stage.promote()
    queue = zpe.queue() if name != "queue" else []
    make(zpe, f"zpe:{name}", "hash")
    zpe.push("j1") if name != "queue" else zpe.stage.add("j1", subject="job.assign.zpe", priority=9)

    zpe.stage.fail(zpe.stage.take("j1"), permanent=True)
    zpe.stage.reap()
    zpe.store.add_token(token_row("t"))
    zpe.store.revoke_token("t", actor="admin")

    assert zpe.raw.hgetall(f"zpe:misplaced:{name}") == {"x": "1"}
    assert zpe.raw.lrange("zpe:dlq", 0, -1) == ["j1"]
    assert zpe.queue() == queue
    assert f"zpe:{name} is a hash" in caplog.text


def test_a_token_of_another_type_is_no_token_and_hides_no_other(zpe: Zpe) -> None:
    for token_id in ("a", "b"):
        zpe.store.add_token(token_row(token_id))
    make(zpe, f"zpe:token:{'a' * 64}", "list")

    assert [row.token_id for row in zpe.store.tokens()] == ["b"]
    assert zpe.store.token("a" * 64) is None
    assert zpe.store.revoked_among(["a", "b"]) == ["a"]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "set"])
def test_requests_are_let_in_beside_a_set_of_revoked_tokens_that_is_none(zpe: Zpe, kind: str) -> None:
    for token_id in ("a", "b"):
        zpe.store.add_token(token_row(token_id))
    zpe.store.revoke_token("b", actor="admin")
    make(zpe, "zpe:revoked_tokens", kind)

    good, revoked = zpe.store.token("a" * 64), zpe.store.token("b" * 64)

    assert good is not None
    assert revoked is not None
    assert good.revoked_at is None
    assert revoked.revoked_at == zpe.clock.wall()


def test_a_hash_among_the_revoked_ones_is_that_of_a_revoked_token_for_all_who_ask(zpe: Zpe) -> None:
    for token_id in ("a", "b"):
        zpe.store.add_token(token_row(token_id))
    zpe.raw.sadd("zpe:revoked_tokens", "a" * 64)

    listed = {row.token_id: row.revoked_at is not None for row in zpe.store.tokens()}
    asked_for = zpe.store.token("a" * 64)

    assert listed == {"a": True, "b": False}
    assert asked_for is not None
    assert asked_for.revoked_at is not None
    assert zpe.store.revoked_among(["a", "b"]) == ["a"], "connections that are open end"


# -- order ---------------------------------------------------------------------------------------------------------


def test_an_id_that_is_pushed_before_its_payload_waits_for_it(zpe: Zpe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    zpe.raw.lpush("zpe:queue", "early")
    zpe.push("good")

    assert [grant.job_id for grant in zpe.lease(limit=9)] == ["good"]
    assert "zpe:payload:early" in zpe.status("early")["detail"]
    assert zpe.stage.job("early").state is State.PENDING
    assert detail_of(State.PENDING, zpe.store.incidents("early"), "", "") == zpe.status("early")["detail"]
    assert "zpe:payload:early" in caplog.text

    zpe.raw.set("zpe:payload:early", PAYLOAD)
    zpe.clock.advance(1.5)
    zpe.stage.promote()

    [grant] = zpe.lease()
    assert (grant.job_id, zpe.status("early")["detail"]) == ("early", "")
    assert zpe.stage.job("early").spec.payload == PAYLOAD


def test_an_id_whose_payload_never_comes_is_looked_for_ever_more_seldom_and_can_be_canceled(zpe: Zpe) -> None:
    zpe.raw.lpush("zpe:queue", "early")
    zpe.stage.promote()
    waits = []
    for _ in range(12):
        [(_, due)] = zpe.raw.zrange("zpe:delay", 0, -1, withscores=True)
        waits.append(due - zpe.clock.wall())
        zpe.clock.advance(waits[-1])
        zpe.stage.promote()

    assert (waits[0], waits[1], waits[-1]) == (1.0, 1.0, 300.0)
    assert zpe.store.cancel(["early"], actor="operator")[0].state is State.CANCELED
    assert zpe.raw.zcard("zpe:delay") == 0


@pytest.mark.parametrize("state", ["leased", "waiting", "ended", "unknown"])
def test_an_entry_of_delay_that_does_not_wait_there_is_removed(zpe: Zpe, state: str) -> None:
    zpe.push("j1")
    if state != "waiting":
        [grant] = zpe.lease()
        if state == "ended":
            zpe.stage.finish(grant)
    zpe.raw.zadd("zpe:delay", {"other" if state == "unknown" else "j1": 0.0})
    version = zpe.stage.job("j1").version

    zpe.stage.promote()

    assert (zpe.raw.zcard("zpe:delay"), zpe.stage.job("j1").version) == (0, version)


def test_a_job_that_somebody_took_out_of_the_list_is_no_error_to_ask_about(zpe: Zpe) -> None:
    zpe.push("j1")
    zpe.stage.promote()
    zpe.raw.delete("zpe:queue")

    assert zpe.store.ready_ahead("j1") is None
