"""Many nodes and definitions, and a node that is killed and started again every ten seconds. Real processes, real gRPC.

`tests/soak/test_many_nodes.py` has 50 nodes and 600 definitions of every minute; here are fewer, with as many runs for each node.
A watch notes each quarter of a second who leads, to whom runs are assigned, the connections to the database, how many times as
long as on an idle machine some work takes, and how late it is itself: as many seconds more may a run take for its start.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.django.test_nodes import Project
from tests.e2e.stage import Ledger, Run
from tests.support.chaos import evidence
from tests.support.chaos.rig import invariants_hold
from tests.support.postgres_service import PostgresService
from tests.support.processes import ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

MAX_CONNECTIONS = 150  # of docs/django/deployment.md for 50 nodes
SHOWN = ("I3", "I4", "I5", "I7", "I11", "liveness")
KILL_EVERY_S = 10.0
LEADER_AWAY_S = 9.0  # at most: kills are further apart
LEADER_EVERY = 3  # kills: one of so many is the leader's
ON_TIME_S = 1.0
DEATH_S = 12.0
TICK_S = 1.0
LEASE_S = 17.0  # and its margin
LOOK_S = 0.25
BEGINS_WITHIN_S = 0.05
WORK_S = 0.02
STARTED_AT_ONCE = 4
SLOW_S = 120.0  # a machine with other load


class Kill(NamedTuple):
    """One node's death."""

    at: float
    worker_id: str


class Look(NamedTuple):
    """One sight of the watch."""

    at: float
    slowness: float
    late_s: float
    epoch: int
    connections: int


class Storm(NamedTuple):
    """The events between two times."""

    since: float
    until: float
    kills: list[Kill]
    looks: list[Look]
    assigned: dict[str, str]
    """run → the worker to which it was assigned last before its time."""

    def slack_s(self, at: float, for_s: float) -> float:
        """Return how late a start may be because the machine had other work at that time, and for so long after it."""
        near = [look for look in self.looks if at - 1.0 <= look.at <= at + for_s + 1.0]
        return ON_TIME_S * max(look.slowness - 1.0 for look in near) + max(look.late_s for look in near)

    def had_leader(self, at: float) -> bool:
        """Return whether the leader of that time lived on, and had led for a tick."""
        for last, look in zip(self.looks, self.looks[1:], strict=False):
            if look.epoch != last.epoch:  # the one before may have been killed, or was deposed
                killed = [kill.at for kill in self.kills if look.at - LEADER_AWAY_S < kill.at < look.at]
                if min(killed, default=look.at - LEADER_AWAY_S) - ON_TIME_S <= at <= look.at + TICK_S:
                    return False
        return True

    def lease_s(self, at: float) -> float:
        """Return how late a run may start whose worker died with its lease: the next leader renews that, once."""
        for last, look in zip(self.looks, self.looks[1:], strict=False):
            if look.epoch != last.epoch and at < look.at < at + LEASE_S:
                return look.at - at + LEASE_S
        return LEASE_S


class ManyNodes:
    """A project whose definitions are due once in `period_s`, spread over it, and its nodes."""

    def __init__(self, project: Project, nodes: int, definitions: int, period_s: int) -> None:
        self.project, self.definitions, self.period_s = project, definitions, period_s
        self.nodes: list[ChildProcess] = []
        self._count = nodes
        self._chance = random.Random(7)

    def start(self) -> None:
        while len(self.nodes) < self._count:
            count = min(STARTED_AT_ONCE, self._count - len(self.nodes))
            self.nodes += self.project.start_cluster(count, "--slots", "2", node_ids=self._count)
        self.define(enabled=True)
        ahead = "SELECT count(DISTINCT assigned_worker_id) FROM tasuki_jobrun WHERE state = 'ASSIGNED'"
        until(lambda: self.project.rows(ahead)[0][0] >= self._count - 1, SLOW_S, "all but the leader have runs ahead")

    def define(self, *, enabled: bool) -> None:
        self.project.site.run(f"""
from tasuki.django.definitions import apply
entry = {{"command_name": "probe", "default_args_json": ["note", {os.fspath(self.project.folder)!r}], "enabled": {enabled},
          "schedule_type": "hourly_at_minute", "concurrency_policy": "allow"}}
apply({{f"d{{n}}": {{**entry, "schedule_value": str(n % {self.period_s})}} for n in range({self.definitions})}}, source="test")
""")

    def storm(self, seconds: float) -> Storm:
        """Kill a node every ten seconds, and start it again, for so long."""
        kills: list[Kill] = []
        since = float(int(time.time()) + 3)  # looked at before, too
        with self._watched() as (looks, assigned):
            for number in range(1, int(seconds / KILL_EVERY_S)):
                kills.append(self._kill(since + number * KILL_EVERY_S, is_leader=number % LEADER_EVERY == 0))
            ends = since + seconds
            until(lambda: time.time() >= ends, 2 * KILL_EVERY_S)
            self.define(enabled=False)
            waits = "SELECT 1 FROM tasuki_jobrun WHERE state <> 'SUCCEEDED' LIMIT 1"
            until(lambda: not self.project.rows(waits), SLOW_S, "all runs have succeeded, and those that were to come are gone")
        return Storm(since, ends, kills, looks, assigned)

    def _kill(self, at: float, *, is_leader: bool) -> Kill:
        """Kill the leader, or a node when it is just about to begin one of the runs of that time."""
        until(lambda: time.time() > at - LOOK_S, 2 * KILL_EVERY_S)
        due = self.project.rows(f"SELECT assigned_worker_id FROM tasuki_jobrun WHERE state = 'ASSIGNED' AND scheduled_for = {at}")
        node = self.project.leader() if is_leader else None
        for (worker_id,) in due:
            node = node or self.project.node_of(worker_id)
        node = node or self._chance.choice([node for node in self.nodes if worker_of(node)])
        at += BEGINS_WITHIN_S * self._chance.random()
        until(lambda: time.time() >= at, 2 * KILL_EVERY_S)
        kill = Kill(time.time(), worker_of(node))
        node.start_again()
        return kill

    @contextmanager
    def _watched(self) -> Iterator[tuple[list[Look], dict[str, str]]]:
        looks: list[Look] = []
        assigned: dict[str, str] = {}
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(looks, assigned, over))
        watch.start()
        try:
            yield looks, assigned
        finally:
            over.set()
            watch.join()

    def _watch(self, looks: list[Look], assigned: dict[str, str], over: threading.Event) -> None:
        with self.project.connect() as connection:
            began = time.monotonic()
            while not over.wait(LOOK_S):
                [(epoch, connections)] = connection.execute(
                    "SELECT (SELECT max(epoch) FROM tasuki_scopeepoch WHERE scope = 'leader'), count(*) FROM pg_stat_activity"
                    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                ).fetchall()
                assigned.update(
                    connection.execute(
                        "SELECT idempotency_key, assigned_worker_id FROM tasuki_jobrun WHERE state = 'ASSIGNED'"
                        " AND scheduled_for > extract(epoch FROM clock_timestamp())"
                    ).fetchall()
                )
                late_s = time.monotonic() - began - LOOK_S
                looks.append(Look(time.time(), slowness(), late_s, epoch, connections))
                began = time.monotonic()


def slowness() -> float:
    """Return how many times as long as on an idle machine some work takes."""
    began, used_s = time.monotonic(), time.thread_time()
    while time.thread_time() - used_s < WORK_S:
        pass
    return (time.monotonic() - began) / WORK_S


def worker_of(node: ChildProcess) -> str:
    """Return the number of a node's worker since its latest start; empty: it is not there yet."""
    _, _, rest = node.output().partition("connected to unix socket as ")
    return rest.partition("\n")[0]


def judge(many: ManyNodes, storm: Storm) -> str:
    """Check what became of all runs whose times were in the storm; return the figures."""
    project, folder = many.project, many.project.folder
    inside = f"scheduled_for >= {storm.since} AND scheduled_for < {storm.until}"
    rows = project.rows(
        "SELECT idempotency_key, name, scheduled_for, attempt, losses FROM tasuki_jobrun run"
        f" JOIN tasuki_jobdefinition definition ON definition.id = job_definition_id WHERE {inside}"
    )
    # Each nominal time of each definition has one run.
    seconds = range(int(storm.since), int(storm.until))
    wanted = [(f"d{n}", at) for n in range(many.definitions) for at in seconds if at % many.period_s == n % many.period_s]
    assert sorted((name, int(at)) for _, name, at, *_ in rows) == sorted(wanted)
    # The invariants hold: attempts count up by one and begin once, each loss is noted, epochs rise.
    stored, ledger = evidence.read_store(project.rows), Ledger(folder / "ledger").runs()
    invariants_hold(history_of(project, stored, ledger, storm), SHOWN)
    # Only workers that were killed have lost runs.
    dead = {kill.worker_id for kill in storm.kills}
    lost_by = {one.job_id: one.worker_id for one in stored.incidents if one.kind in ("lost", "orphaned")}
    assert set(lost_by.values()) <= dead
    assert {job_id for job_id, *_, losses in rows if losses} <= lost_by.keys()
    # Each run starts in time.
    first: dict[str, float] = {}
    for run in ledger:
        first[run.job_id] = min(run.at, first.get(run.job_id, run.at))
    late: dict[float, list[float]] = {ON_TIME_S: [], DEATH_S: [], LEASE_S: []}
    too_late: list[str] = []
    for job_id, _, at, *_ in rows:
        late_s = first[job_id] - at
        has_lived = storm.assigned.get(job_id) not in dead and storm.had_leader(at)
        kind_s = LEASE_S if job_id in lost_by else ON_TIME_S if has_lived else DEATH_S
        late[kind_s].append(late_s)
        limit_s = storm.lease_s(at) if job_id in lost_by else kind_s
        if late_s > limit_s + storm.slack_s(at, late_s):
            too_late.append(f"{job_id}: {late_s:.2f} s late, limit {limit_s:g} s + {storm.slack_s(at, late_s):.2f} s")
    assert not too_late, too_late
    assert len(late[ON_TIME_S]) > len(rows) / 3
    connections = [look.connections for look in storm.looks]
    shown = "; ".join(f"{len(found)} runs, limit {limit_s:g} s: {_figures(found)}" for limit_s, found in late.items() if found)
    slower = sorted(look.slowness for look in storm.looks)
    return (
        f"{len(many.nodes)} nodes, {len(rows)} runs in {storm.until - storm.since:g} s, {len(storm.kills)} nodes killed, "
        f"{storm.looks[-1].epoch} leaderships, {len(lost_by)} runs lost by a worker; first line behind its time: {shown}; "
        f"{sum(connections) / len(connections):.0f} connections on average, {max(connections)} at most; "
        f"work took {slower[len(slower) // 2]:.1f} times as long as on an idle machine, at most {slower[-1]:.1f} times"
    )


def history_of(project: Project, stored: evidence.StoreEvidence, ledger: list[Run], storm: Storm) -> list[evidence.AnyLine]:
    leader, now = until(project.leader, SLOW_S, "a node leads"), time.time()
    return evidence.history(
        evidence.store_lines(stored),
        moved_ahead(stored, {(run.job_id, run.attempt) for run in ledger}),
        evidence.began_lines(ledger),
        evidence.leading_lines(project.led(), [leader.log.stem], now),
        stored=stored,
        healed_at=storm.until,
        ended_at=now,
        watched=("began", "leading"),
    )


def moved_ahead(stored: evidence.StoreEvidence, began: set[tuple[str, int]]) -> Iterator[evidence.AnyLine]:
    """Yield the ends of attempts that never began and have no incident: before its time a run was assigned to another worker."""
    noted = {(incident.job_id, incident.attempt): incident.at for incident in stored.incidents}
    for job in stored.jobs:
        at = job.created_at
        for attempt in range(1, job.attempt):
            is_noted, at = (job.job_id, attempt) in noted, noted.get((job.job_id, attempt), at)
            if not is_noted and (job.job_id, attempt) not in began:
                ids = {"job_id": job.job_id, "attempt": attempt, "lease_id": "", "worker_id": "", "incarnation": ""}
                yield evidence.ShownEvent(at=at, verb="release", held=True, **ids)


def _figures(found: list[float]) -> str:
    found = sorted(found)
    return f"median {found[len(found) // 2]:.2f}, 99 % {found[int(0.99 * len(found))]:.2f}, most {found[-1]:.2f} s"


@contextmanager
def many_nodes(folder: Path, nodes: int, definitions: int, period_s: int) -> Iterator[ManyNodes]:
    """Start them on a PostgreSQL of their own."""
    with PostgresService(max_connections=str(MAX_CONNECTIONS)) as postgres:
        project = Project(folder, postgres, postgres.empty_database(), SITE_SECONDS=str(period_s))
        try:
            project.site.manage("migrate", "-v0")
            many = ManyNodes(project, nodes, definitions, period_s)
            many.start()
            yield many
        finally:
            project.close()
        log = postgres.log.read_text()
        assert "too many clients" not in log
        assert "connection slots" not in log


def test_runs_start_in_time_while_one_of_twelve_nodes_is_killed_every_ten_seconds(tmp_path: Path) -> None:
    with many_nodes(tmp_path, nodes=12, definitions=48, period_s=20) as many:
        print(judge(many, many.storm(40.0)))
