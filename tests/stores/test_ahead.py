"""Runs that are stored ahead of their times: assigned, taken back, judged at their time, fetched by their workers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tasuki.core.job import OnDisconnect, State
from tasuki.core.scheduler.leader import WorkerLoad, plan
from tasuki.core.store_messages import AheadRun, Assignment, FiredRuns, Grant, LeaseHolder
from tasuki.errors import StaleEpoch
from tasuki.stores.sql.postgres_session import PostgresSession
from tests.stores.test_fire import MINUTELY, T0, Firing, d
from tests.stores.test_fire import firing as firing  # the fixture

AHEAD_S, REASSIGN_S = 30.0, 20.0
FORBID = replace(MINUTELY, concurrency_policy="forbid")


def look(firing: Firing, seconds: float | None = None) -> FiredRuns:
    """Let the clock show T0 + seconds, and fire as a leader does that assigns."""
    if seconds is not None:
        firing.clock.advance(T0 + seconds - firing.clock.wall())
    return firing.store.fire(epoch=firing.epoch, ahead_s=AHEAD_S, reassign_after_s=REASSIGN_S)  # type: ignore[no-any-return]


def assign(firing: Firing, job_id: str, worker_id: str = "w1") -> Grant | None:
    to = Assignment(job_id=job_id, worker_id=worker_id, incarnation=f"{worker_id}/1" if worker_id else "", ttl_s=10.0)
    [grant] = firing.store.assign([to], epoch=firing.epoch)
    return grant  # type: ignore[no-any-return]


def fetch(firing: Firing, worker_id: str = "w1") -> list[Grant]:
    [grants] = firing.store.held([(worker_id, f"{worker_id}/1", "")])
    return grants  # type: ignore[no-any-return]


def facts(run: AheadRun) -> tuple[str, bool, str, int]:
    return run.job_id, run.is_due, run.worker_id, run.attempt


def state(firing: Firing, job_id: str) -> Any:
    [job] = firing.store.get([job_id])
    return None if job is None else job.state


def test_the_next_run_is_stored_ahead_and_belongs_to_nobody_until_it_is_assigned(firing: Firing) -> None:
    firing.define(replace(MINUTELY, changed_at=T0))
    early, near = look(firing, 29), look(firing, 31)

    assert (early.runs, early.ahead) == ((), ())
    assert near.runs == ()
    assert [facts(run) for run in near.ahead] == [(d(60), False, "", 0)]
    assert state(firing, d(60)) is State.PENDING
    assert firing.lease(limit=5) == []  # not ready
    grant = assign(firing, d(60))
    assert grant is not None
    assert grant.attempt == 1
    assert [facts(run) for run in look(firing).ahead] == [(d(60), False, "w1", 1)]
    assert state(firing, d(60)) is State.ASSIGNED
    assert fetch(firing) == []  # its time has not come


def test_at_its_time_its_worker_fetches_it_and_the_lease_begins(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    assign(firing, d(0))

    fired = look(firing, 0.01)
    assert [run.job_id for run in fired.runs] == [d(0)]
    assert [facts(run) for run in fired.ahead][:1] == [(d(0), True, "w1", 1)]
    assert firing.lease(limit=5) == []
    assert fetch(firing, "w2") == []
    [grant] = fetch(firing)
    assert (grant.job_id, grant.attempt, grant.ttl_s) == (d(0), 1, pytest.approx(10.0))
    assert d(0) not in [run.job_id for run in look(firing).ahead]
    assert assign(firing, d(0), "") is None  # what was fetched is not taken back
    assert state(firing, d(0)) is State.ASSIGNED
    assert fetch(firing) == [grant]  # as after a broken connection
    assert firing.start(grant, "w1") == "go_on"


def test_it_may_go_to_another_worker_or_to_nobody_until_it_was_fetched(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    first, second = assign(firing, d(0)), assign(firing, d(0), "w2")
    assert first is not None
    assert second is not None
    assert (first.attempt, second.attempt) == (1, 2)
    assign(firing, d(0), "")
    assert [facts(run)[2] for run in look(firing).ahead] == [""]
    assign(firing, d(0), "w3")

    look(firing, 0.01)
    assert assign(firing, d(0), "w4") is None  # only to nobody, since its time has come
    assign(firing, d(0), "")

    assert fetch(firing, "w3") == []
    assert state(firing, d(0)) is State.PENDING
    [grant] = firing.lease(limit=5)
    assert (grant.job_id, grant.attempt) == (d(0), 4)


def test_one_that_nobody_was_assigned_to_is_ready_at_its_time(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    look(firing, 0.01)

    assert [grant.job_id for grant in firing.lease(limit=5)] == [d(0)]


def test_one_that_its_worker_does_not_fetch_in_time_is_an_orphan_for_everybody(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    to = Assignment(job_id=d(0), worker_id="w1", incarnation="w1/1", ttl_s=10.0, on_disconnect=OnDisconnect.KEEP)
    firing.store.assign([to], epoch=firing.epoch)
    look(firing, 0.01)
    firing.clock.advance(REASSIGN_S - 1)
    assert firing.store.reap(epoch=firing.epoch) == []

    firing.clock.advance(1.5)
    [reaped] = firing.store.reap(epoch=firing.epoch)

    assert (reaped.job_id, reaped.state) == (d(0), State.ORPHANED)
    assert fetch(firing) == []
    [grant] = firing.lease(limit=1)
    assert (grant.job_id, grant.attempt) == (d(0), 2)


def test_no_lease_ends_before_its_run_was_judged_however_long_no_leader_is_there(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    assign(firing, d(0))
    firing.clock.advance(200)
    firing.store.take_over("another", firing.epoch + 1)
    firing.epoch += 1

    assert firing.store.reap(epoch=firing.epoch) == []
    assert fetch(firing) == []
    assert d(0) in [run.job_id for run in look(firing).runs]
    assert [grant.job_id for grant in fetch(firing)] == [d(0)]


@pytest.mark.parametrize("change", ["schedule", "disabled", "deleted", "arguments"])
def test_a_changed_definition_withdraws_the_run_that_was_stored_for_it(firing: Firing, change: str) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    assign(firing, d(0))
    changed = {
        "schedule": replace(MINUTELY, schedule_value="2", changed_at=T0 - 3),
        "disabled": replace(MINUTELY, enabled=False),
        "arguments": replace(MINUTELY, default_args_json=["--days=7"]),
    }
    if change == "deleted":
        firing.undefine(1)
    else:
        firing.define(changed[change])

    at_once, fired = look(firing, -2), look(firing, 0.01)

    if change == "arguments":  # noticed at its time
        assert [run.job_id for run in fired.runs] == [d(0)]
        [job] = firing.store.get([d(0)])
        assert job.spec.args == ("tick", "--days=7")
        assert (job.state, job.attempt) == (State.PENDING, 0)
    else:
        kept = change == "schedule"  # T0 is a time of the new one, too
        assert [facts(run)[0] for run in at_once.ahead] == ([d(0)] if kept else [])
        assert [grant.job_id for grant in fetch(firing)] == ([d(0)] if kept else [])
    assert firing.store.counts()["default"].active == (change == "schedule") if firing.store.counts() else True


def test_at_its_time_it_is_skipped_while_the_last_run_goes_on(firing: Firing) -> None:
    firing.define(FORBID)
    firing.at(0.01)
    firing.run(d(0))
    look(firing, 35)
    assign(firing, d(60))

    look(firing, 60.01)

    assert state(firing, d(60)) is State.SKIPPED
    assert fetch(firing) == []
    counts = firing.store.counts()["default"]
    assert (counts.active, counts.skipped, counts.pending) == (1, 1, 0)


def test_a_leader_that_does_not_assign_lets_everybody_take_what_another_had_assigned(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    assign(firing, d(0))

    firing.at(0.01)

    assert fetch(firing) == []
    assert [grant.job_id for grant in firing.lease(limit=5)] == [d(0)]


def test_a_cancel_and_the_end_of_a_workers_leases_free_it_at_once(firing: Firing) -> None:
    firing.define(MINUTELY, replace(MINUTELY, id=3, name="other"))
    look(firing, -4)
    assign(firing, d(0))
    assign(firing, d(0, 3))

    [canceled] = firing.store.cancel([d(0)], actor="ops")
    firing.store.end_leases([LeaseHolder(worker_id="w1")])

    assert (canceled.state, canceled.requested) == (State.CANCELED, False)
    assert [facts(run)[:3] for run in look(firing).ahead] == [(d(0, 3), False, "")]
    assert firing.lease(limit=5) == []
    assert [run.job_id for run in look(firing, 0.01).runs] == [d(0, 3)]


def test_assignments_of_an_old_leader_are_refused(firing: Firing) -> None:
    firing.define(MINUTELY)
    look(firing, -4)
    firing.store.take_over("another", firing.epoch + 1)

    with pytest.raises(StaleEpoch):
        assign(firing, d(0))


@pytest.mark.parametrize("firing", ["postgresql"], indirect=True)
def test_a_tick_of_the_leader_is_as_many_statements_for_many_definitions_as_for_few(
    firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    run = PostgresSession._run

    def counted(session: PostgresSession, *arguments: Any) -> Any:
        seen.append(arguments)
        return run(session, *arguments)

    monkeypatch.setattr(PostgresSession, "_run", counted)
    workers = [WorkerLoad(worker_id=f"w{n}", incarnation="1", patterns=(">",), slots=8) for n in range(50)]

    def tick(seconds: float) -> list[int]:
        """Return the statements of a look that finds runs to assign, of assigning them, and of a look that finds nothing."""
        counts = []
        seen.clear()
        found = look(firing, seconds)
        counts.append(len(seen))
        for step in (lambda: firing.store.assign(plan(found.ahead, workers).assign, epoch=firing.epoch), lambda: look(firing)):
            seen.clear()
            step()
            counts.append(len(seen))
        return counts

    names = [replace(MINUTELY, id=number, name=f"n{number}", changed_at=T0) for number in range(1, 101)]
    firing.define(*names[:5])
    look(firing, 1)
    few, few_due = tick(35), tick(60.01)
    firing.define(*(replace(one, changed_at=T0 + 61) for one in names))
    look(firing, 62)
    many, many_due = tick(95), tick(120.01)

    assert many == few
    assert many_due == few_due
    assert max(*few, *few_due) <= 20
