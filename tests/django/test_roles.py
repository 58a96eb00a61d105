"""A leader that is killed, frozen or cut off: who leads then, and how soon. Real processes, whose network the tests cut."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.django_nodes import NodeRig, RigNode
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
LOAD_S = 6.0  # what a machine with other load may add
KNOWS_S = 30.0
QUICK = {
    "heartbeat_interval_seconds": 0.4,
    "heartbeat_ttl_seconds": 2,
    "leader_tick_seconds": 0.5,
    "leader_stale_seconds": 2,
    "leader_lock_ttl_seconds": 2,
    "subleader_check_seconds": 0.3,
}


def kill(rig: NodeRig, leader: RigNode) -> None:
    leader.process.kill()


def freeze(rig: NodeRig, leader: RigNode) -> None:
    leader.process.signal(signal.SIGSTOP)


def cut_sql(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "sql")


def cut_coordination(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "redis" if rig.coordination else "sql")


def cut_all(rig: NodeRig, leader: RigNode) -> None:
    rig.cut(leader, "all")


FAULTS: dict[str, Callable[[NodeRig, RigNode], None]] = {
    "killed": kill,
    "cut from the database": cut_sql,
    "frozen": freeze,
    "cut from the coordination": cut_coordination,
    "cut from all": cut_all,
}


def end_leaders(rig: NodeRig, faults: Sequence[str], stale_s: float) -> None:
    """Start five processes on three nodes, end the leader in one way after the other, and check who follows it."""
    for name in ("n1a", "n1b", "n2a", "n2b", "n3a"):
        rig.start(name, name[:2])
    for what in faults:
        leader = rig.settled()
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
    assert [epoch for epoch, _ in rig.led()] == sorted({epoch for epoch, _ in rig.led()}), "no epoch had two leaders"


def test_another_node_leads_soon_after_a_leader_that_was_killed_or_cut_off(
    postgres: PostgresService, redis_url: str, tmp_path: Path
) -> None:
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        rig.settings(**QUICK)
        end_leaders(rig, ["killed", "cut from the database", "cut from all"], QUICK["leader_stale_seconds"])


@pytest.mark.soak
@pytest.mark.parametrize("coordination", ["database", "redis"])
def test_another_node_leads_soon_whatever_ends_the_leader_with_the_default_settings(
    request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path, coordination: str
) -> None:
    redis_url = request.getfixturevalue("redis_url") if coordination == "redis" else ""
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        end_leaders(rig, list(FAULTS), 5.0)


@pytest.mark.soak
def test_a_leader_and_a_sub_leader_that_cannot_call_each_other_change_nothing(
    postgres: PostgresService, redis_url: str, tmp_path: Path
) -> None:
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
