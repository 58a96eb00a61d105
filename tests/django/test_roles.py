"""A leader that is killed, frozen or cut off: who leads then, and how soon. Real processes, whose network the tests cut."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.django.test_node_door import ProtoClient
from tests.support.django_nodes import NodeRig, RigNode
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
LOAD_S = 6.0  # what a machine with other load may add
KNOWS_S = 30.0
SLOTS = 16  # for the runs of many times at once: nobody gives one back for want of a slot
QUICK = {
    "heartbeat_interval_seconds": 0.4,
    "heartbeat_ttl_seconds": 2,
    "leader_tick_seconds": 0.5,
    "leader_stale_seconds": 2,
    "leader_lock_ttl_seconds": 2,
    "subleader_check_seconds": 0.3,
    "assign_ahead_seconds": 2,
}
EVERY_S = 2.0
DEFINE = """
from tasuki.django.definitions import apply
entry = {"command_name": "probe", "default_args_json": ["say"], "schedule_type": "every_n_minutes",
         "schedule_value": "2", "concurrency_policy": "allow"}
apply({f"often-{n}": entry for n in range(3)}, source="test")
"""
NOTE_WRITES = """
CREATE TABLE late_writes (job_id text, epoch bigint);
CREATE TABLE starts (job_id text);
CREATE FUNCTION note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.leader_epoch > 0 AND NEW.leader_epoch IS DISTINCT FROM OLD.leader_epoch
        AND NEW.leader_epoch < (SELECT epoch FROM tasuki_scopeepoch WHERE scope = 'leader')
    THEN INSERT INTO late_writes VALUES (NEW.idempotency_key, NEW.leader_epoch); END IF;
    IF OLD.state = 'ASSIGNED' AND NEW.state NOT IN ('ASSIGNED', 'PENDING', 'ORPHANED')
    THEN INSERT INTO starts VALUES (NEW.idempotency_key); END IF;
    RETURN NEW; END $$;
CREATE TRIGGER note_write BEFORE INSERT OR UPDATE ON tasuki_jobrun FOR EACH ROW EXECUTE FUNCTION note_write()
"""
"""Notes each start, and what leaders write under epochs that others have followed; a leader writes all the time."""


def kill(rig: NodeRig, leader: RigNode) -> None:
    leader.process.kill()


def freeze(rig: NodeRig, leader: RigNode) -> None:
    leader.process.signal(signal.SIGSTOP)


def cut_sql(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "sql")


def cut_coordination(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "redis" if rig.coordination else "sql")


def hang(rig: NodeRig, leader: RigNode) -> None:
    rig.cut_store(leader)


def cut_all(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "all")


FAULTS: dict[str, Callable[[NodeRig, RigNode], None]] = {
    "killed": kill,
    "cut from the database": cut_sql,
    "frozen": freeze,
    "cut from the coordination": cut_coordination,
    "cut from all": cut_all,
    "hung": hang,  # with Redis the same as cut from the database
}


def end_leaders(rig: NodeRig, faults: Sequence[str], stale_s: float) -> None:
    """Start five processes on three nodes, end the leader in one way after the other, and check who follows it."""
    rig.rows(NOTE_WRITES)
    for name in ("n1a", "n1b", "n2a", "n2b", "n3a"):
        rig.start(name, name[:2])
    rig.settled()
    rig.site.run(DEFINE)  # now that everybody is there: a leader that was alone gives runs of its own back
    for what in faults:
        leader = rig.settled()
        ran(rig)
        epoch, _ = rig.term()

        FAULTS[what](rig, leader)
        following, took_s = rig.time_of_takeover(epoch, stale_s + 2.0 + LOAD_S)

        print(f"{what}: {leader.name} -> {following.name} in {took_s:.2f} s")
        assert following.node_id != leader.node_id, what
        rig.network.heal()
        if what == "killed":
            rig.start_again(leader)
            continue
        os.kill(leader.pid, signal.SIGCONT)
        until(lambda old=leader: not old.leads, KNOWS_S, f"{leader.name} knows that it leads no more: {what}")  # type: ignore[misc]
        caller = {"nodeId": leader.node_id, "workerId": leader.worker_id}
        with ProtoClient(rig.folder / "made", following.address) as client:
            order = {"leaderEpoch": epoch, "workerId": following.worker_id, "runs": [{"jobRunId": "d1-0", "attempt": 1}]}
            assert client.call("StartJob", caller=caller, **order)["statuses"] == ["ORDER_STATUS_STALE_EPOCH"], what
    assert [epoch for epoch, _ in rig.led()] == sorted({epoch for epoch, _ in rig.led()}), "no epoch had two leaders"
    assert rig.rows("SELECT * FROM late_writes") == [], "whoever led before writes nothing"

    # And each definition had one run for each of its times, which was started once. (One that was assigned to a worker and not
    # started there has another attempt.)
    last = ran(rig)
    runs = rig.rows(
        "SELECT job_definition_id, scheduled_for, state, losses, (SELECT count(*) FROM starts WHERE job_id = idempotency_key)"
        f" FROM tasuki_jobrun WHERE job_definition_id IS NOT NULL AND scheduled_for <= {last} ORDER BY 1, 2"
    )
    assert {tuple(facts) for _, _, *facts in runs} == {("SUCCEEDED", 0, 1)}, rig.rows("SELECT * FROM tasuki_incident")
    for number in {run[0] for run in runs}:
        times = [at for definition, at, *_ in runs if definition == number]
        assert times == [times[0] + EVERY_S * place for place in range(len(times))]
        assert times[-1] == last


def ran(rig: NodeRig) -> float:
    """Wait until all definitions have run at a time that is to come, and return that time."""
    [(now,)] = rig.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
    at = math.ceil(now / EVERY_S) * EVERY_S
    done = f"SELECT count(*) FROM tasuki_jobrun WHERE scheduled_for = {at} AND state = 'SUCCEEDED'"
    until(lambda: rig.rows(done) == [(3,)], KNOWS_S, "the definitions have run")
    return at


def test_another_node_leads_soon_after_a_leader_that_was_killed_or_cut_off(
    postgres: PostgresService, redis_url: str, tmp_path: Path
) -> None:
    with NodeRig(tmp_path, postgres, redis_url, slots=SLOTS, SITE_SECONDS="1") as rig:
        rig.settings(**QUICK)
        end_leaders(rig, ["killed", "cut from the database", "cut from all"], QUICK["leader_stale_seconds"])


@pytest.mark.soak
@pytest.mark.parametrize("coordination", ["database", "redis"])
def test_another_node_leads_soon_whatever_ends_the_leader_with_the_default_settings(
    request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path, coordination: str
) -> None:
    redis_url = request.getfixturevalue("redis_url") if coordination == "redis" else ""
    faults = [what for what in FAULTS if coordination == "database" or what != "hung"]
    with NodeRig(tmp_path, postgres, redis_url, slots=SLOTS, SITE_SECONDS="1") as rig:
        end_leaders(rig, faults, 5.0)


@pytest.mark.soak
@pytest.mark.parametrize("coordination", ["database", "redis"])
def test_a_leader_and_a_sub_leader_that_cannot_call_each_other_change_nothing(
    request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path, coordination: str
) -> None:
    redis_url = request.getfixturevalue("redis_url") if coordination == "redis" else ""
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        rig.settings(**QUICK)
        for name in ("n1", "n2", "n3"):
            rig.start(name)
        leader = rig.settled()
        before = rig.term()

        for other in rig.nodes.values():
            rig.network.cut(other.pid, *(name for name in rig.nodes if name != other.name))
        job_id = rig.enqueue("say")
        until(lambda: rig.run_state(job_id)[0] == "SUCCEEDED", KNOWS_S, "a run ends")
        seen = rig.led_at()
        until(lambda: rig.led_at() > seen + 3 * QUICK["leader_stale_seconds"], KNOWS_S, "the leader works for long")

        assert rig.term() == before
        assert leader.leads
