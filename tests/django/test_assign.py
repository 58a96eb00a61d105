"""Runs that the leader assigns ahead of their times, on PostgreSQL alone and with Redis as coordination. Real processes.

The site's minutes are seconds here: a definition has a run every ten seconds, and it is assigned some seconds before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.django.test_nodes import Project
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

NODES = 5
DEFINITIONS = 6
STEP_S = 10
AHEAD_S = 8.0
SLOW_S = 60.0  # a machine with other load
ON_TIME_S = 3.0  # the same; 0.1 s otherwise
DEATH_S = 12.0  # a heartbeat's ttl, a tick of the leader, and the time until somebody is free

DEFINE = f"""
from tasuki.django.definitions import apply
entry = {{"command_name": "probe", "default_args_json": ["say"], "schedule_type": "every_n_minutes",
          "schedule_value": "{STEP_S}", "concurrency_policy": "allow", "queue": QUEUE}}
apply({{f"{{QUEUE}}-{{n}}": entry for n in range(COUNT)}}, source=QUEUE)
"""


@pytest.fixture(params=["database", "redis"])
def project(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresService) -> Iterator[Project]:
    url = postgres.empty_database()
    coordination = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    project = Project(tmp_path, postgres, url, SITE_SECONDS="1", SITE_TASUKI=json.dumps({"coordination": coordination}))
    project.site.manage("migrate", "-v0")
    yield project
    project.close()
    postgres.drop(url)


def define(project: Project, count: int, queue: str = "default") -> None:
    project.site.run(f"COUNT, QUEUE = {count}, {queue!r}\n{DEFINE}")


def settings(project: Project, **values: float) -> None:
    project.site.manage("tasuki_ops", "settings", "set", *(f"{name}={value}" for name, value in values.items()))


def ahead(project: Project, count: int = DEFINITIONS, *, least_s: float = 2.0) -> tuple[float, dict[str, str]]:
    """Wait until the runs of the next time are assigned, at least so long before it; return it, and run → worker."""

    def look() -> tuple[float, dict[str, str]] | None:
        found = project.rows(
            "SELECT scheduled_for, idempotency_key, assigned_worker_id FROM tasuki_jobrun WHERE state = 'ASSIGNED' "
            f"AND scheduled_for > extract(epoch FROM clock_timestamp()) + {least_s}"
        )
        times = sorted({at for at, *_ in found})
        runs = {job_id: worker_id for at, job_id, worker_id in found if times and at == times[0]}
        return (times[0], runs) if len(runs) == count else None

    return until(look, SLOW_S, f"{count} runs are assigned ahead")


def ended(project: Project, at: float, count: int = DEFINITIONS) -> dict[str, tuple[str, int, float]]:
    """Wait until the runs of that time have succeeded; return run → worker, attempt, and the delay of its start."""

    def look() -> dict[str, tuple[str, int, float]] | None:
        found = project.rows(
            "SELECT idempotency_key, assigned_worker_id, attempt, started_at - scheduled_for FROM tasuki_jobrun "
            f"WHERE scheduled_for = {at} AND state = 'SUCCEEDED'"
        )
        return (
            {job_id: (worker_id, attempt, late_s) for job_id, worker_id, attempt, late_s in found}
            if len(found) == count
            else None
        )

    return until(look, SLOW_S, f"the runs of {at} have succeeded")


def leading_worker(project: Project) -> str:
    [(holder,)] = project.rows("SELECT holder FROM tasuki_scopeepoch WHERE scope = 'leader'")
    return str(holder)


def test_runs_start_on_the_workers_that_were_chosen_before_and_leave_those_that_are_detached_or_die(project: Project) -> None:
    project.start_cluster(NODES, "--slots", "4")
    settings(project, assign_ahead_seconds=AHEAD_S, reassign_after_seconds=30)
    define(project, DEFINITIONS)

    # Given runs that are assigned before their time, to all workers but the leader's, once the leader has heard all of them
    def spread() -> tuple[float, dict[str, str]] | None:
        at, chosen = ahead(project)
        return (at, chosen) if len(set(chosen.values())) == NODES - 1 else None

    at, chosen = until(spread, SLOW_S, "runs are assigned to all workers but the leader's")
    leader = leading_worker(project)
    assert leader not in chosen.values()
    # Then each starts there, at its time
    done = ended(project, at)
    assert {job_id: worker_id for job_id, (worker_id, *_) in done.items()} == chosen
    assert {attempt for _, attempt, _ in done.values()} == {1}
    assert max(late_s for *_, late_s in done.values()) < ON_TIME_S

    # When a worker is detached, its runs go to others before their time
    at, chosen = ahead(project, least_s=4.0)
    gone = next(worker_id for worker_id in chosen.values() if worker_id != leader)
    project.site.manage("tasuki_ops", "detach", gone)
    until(lambda: gone not in ahead(project, least_s=0.0)[1].values(), SLOW_S, "its runs are assigned to others")
    done = ended(project, at)
    assert gone not in {worker_id for worker_id, *_ in done.values()}

    # When a node dies with runs that are assigned to it, others run them
    at, chosen = ahead(project)
    dying = next(worker_id for worker_id in chosen.values() if worker_id != leader)
    node = project.node_of(dying)
    assert node is not None
    node.kill()
    done = ended(project, at)
    assert dying not in {worker_id for worker_id, *_ in done.values()}
    assert max(late_s for *_, late_s in done.values()) < DEATH_S + ON_TIME_S

    # When the leader is killed between assignment and start, the next one lets every run start once
    at, chosen = ahead(project)
    leading = project.leader()
    assert leading is not None
    leading.kill()
    assert time.time() < at
    done = ended(project, at)
    assert {job_id: worker_id for job_id, (worker_id, *_) in done.items()} == chosen
    assert {attempt for _, attempt, _ in done.values()} == {1}
    losses = "SELECT idempotency_key FROM tasuki_jobrun WHERE losses > 0"
    assert project.rows(losses) == []
