"""Several nodes of one project, on PostgreSQL alone and with Redis as coordination. Real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
SLOW_S = 40.0
TWO_TICKS_S = 2.0  # of leader_tick_seconds, by default
LOAD_S = 6.0  # what a machine with other load may add


@pytest.fixture(params=["database", "redis"])
def site(request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path) -> Iterator[DjangoSite]:
    url = postgres.empty_database()
    coordination = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    site = DjangoSite(tmp_path, postgres_url=url, SITE_TASUKI=json.dumps({"coordination": coordination}))
    site.manage("migrate", "-v0")
    yield site
    postgres.drop(url)


ASK = """
import io
from django.core.management import CommandError, call_command
from django.contrib.auth.models import Permission, User
from tasuki.django import operations
from tasuki.django.models import AdminActionLog
from tasuki.errors import TasukiError

def said(*arguments):
    out = io.StringIO()
    try:
        call_command("tasuki_ops", *arguments, stdout=out)
    except CommandError as error:
        return f"CommandError: {error}"
    return out.getvalue()
"""


def ask(site: DjangoSite, code: str) -> Any:
    return site.ask(f"{ASK}\nprint(json.dumps({code}))")


def status(site: DjangoSite) -> dict[str, Any]:
    found: dict[str, Any] = ask(site, "operations.cluster_status()")
    return found


def led_by(site: DjangoSite, count: int, *, above: int = 0) -> dict[str, Any]:
    """Wait until so many workers are there, and a leader under an epoch above that."""

    def look() -> dict[str, Any] | None:
        found = status(site)
        ready = len(found["workers"]) == count and found["leader"] and found["epoch"] > above
        return found if ready else None

    return until(look, SLOW_S, f"{count} workers and a leader above epoch {above}")


def test_nodes_have_numbers_follow_settings_and_let_another_lead(site: DjangoSite, tmp_path: Path) -> None:
    one = site.worker("--slots", "2", env={"TASUKI_NODE_ID": "n1"}, log="n1.log")
    two = site.worker("--slots", "2", env={"TASUKI_NODE_ID": "n2"}, log="n2.log")
    with one, two:
        # Given two nodes, each with a number of its own
        first = led_by(site, 2)
        assert sorted(worker["worker_id"] for worker in first["workers"]) == ["1", "2"]
        assert sorted(worker["node_id"] for worker in first["workers"]) == ["n1", "n2"]
        assert [worker["worker_id"] for worker in first["workers"] if worker["role"] == "leader"] == [first["leader"]]
        [watches] = {"1", "2"} - {first["leader"]}
        roles = {watches: "subleader", first["leader"]: "leader"}
        until(lambda: {one["worker_id"]: one["role"] for one in status(site)["workers"]} == roles, SLOW_S, "the other watches")
        assert "subleader" in ask(site, 'said("status")')
        if redis_url := json.loads(site.env["SITE_TASUKI"])["coordination"]:
            with Redis.from_url(redis_url, decode_responses=True) as client:
                shown = {worker_id: client.hget(f"scheduler:worker:{worker_id}", "role") for worker_id in roles}
            assert shown == roles

        # When settings are changed, those that cannot work are refused, and the others are in force on both
        refused, shown = ask(
            site,
            '[said("settings", "set", "heartbeat_ttl_seconds=1"), '
            'said("settings", "set", "max_jobs_per_worker=1", "leader_tick_seconds=0.5")]',
        )
        assert "heartbeat_ttl_seconds: must be more than two intervals" in refused
        assert "max_jobs_per_worker = 1\n" in shown
        logs = [tmp_path / f"n{number}.log" for number in (1, 2)]
        until(lambda: all("the settings have changed" in log.read_text() for log in logs), TWO_TICKS_S + LOAD_S, "two ticks")

        # When the leader is told to step down, the other one leads
        ask(site, 'said("degrade-leader", "--reason", "its disk is slow")')
        second = led_by(site, 2, above=first["epoch"])
        assert second["leader"] != first["leader"]

        # When the leader's worker is detached, it neither leads nor gets jobs
        ask(site, f'said("detach", "{second["leader"]}")')
        third = led_by(site, 2, above=second["epoch"])
        assert third["leader"] == first["leader"]
        until(lambda: [one["worker_id"] for one in status(site)["workers"] if one["detached"]] == [second["leader"]], SLOW_S)
        [ran_by] = ask(site, "[finished(add.enqueue(1)).worker_ids[-1]]")
        assert ran_by == first["leader"]

        # Then the log of operations has each of them, and nobody does anything without the permission
        log, refusals = site.ask(
            ASK
            + f"""
def try_attach(user):
    try:
        return operations.set_detached("{second["leader"]}", False, actor=user)
    except TasukiError as error:
        return error.message

log = list(AdminActionLog.objects.order_by("id").values_list("action", "target", "detail"))
guest, root = User.objects.create(username="guest"), User.objects.create(username="root", is_superuser=True)
print(json.dumps([log, [try_attach(guest), try_attach(root)]]))
"""
        )
        assert log == [
            ["settings.change", "scheduler", "max_jobs_per_worker=1, leader_tick_seconds=0.5"],
            ["leader.degrade", first["leader"], "its disk is slow"],
            ["worker.detach", second["leader"], ""],
        ]
        assert refusals == ["'guest' may not do this; it needs the permission tasuki.change_member", True]


def test_a_node_with_another_coordination_does_not_start(site: DjangoSite, redis_url: str) -> None:
    with site.worker(log="first.log"):
        led_by(site, 1)
    mine = json.loads(site.env["SITE_TASUKI"])["coordination"]
    other = {"SITE_TASUKI": json.dumps({"coordination": "" if mine else redis_url})}

    refused = site.manage("tasuki_worker", check=False, env=other)

    assert refused.returncode == 1
    assert "all need the same coordination" in refused.stderr
