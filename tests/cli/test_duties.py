"""`tasuki duties --once`: a leader's duties from cron, on Redis, PostgreSQL and a data folder; raw keys asserted."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tasuki.config import DataFolder
from tasuki.coords.redis import RedisCoordination
from tasuki.core.apps import template_of
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import Submission
from tasuki.stores.redis.connection import connect
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.cli.commands import Running, User
from tests.cli.inside import Inside, inside

__all__ = ["inside"]

pytestmark = pytest.mark.e2e

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@contextmanager
def zpe_ago(url: str, seconds: float) -> Iterator[Stage]:
    """The app's store as it was so long ago; `clock.advance` comes nearer to the present."""
    past = time.time() - seconds
    clock = FakeClock(lease=past, wall=past)
    with closing(RedisStore.open(url, app="zpe", template=template_of("zpe"), clock=clock)) as store:
        yield Stage(store, clock)


def add(stage: Stage, job_id: str) -> None:
    spec = JobSpec(job_id=job_id, subject="job.assign.zpe", payload=b"{}", delay_first_loss=True)
    stage.store.submit([Submission(spec, "alice", body_hash(spec))])


def raw(url: str) -> Any:
    parts = urlsplit(url)
    return redis.Redis(port=parts.port or 0, db=int(parts.path.strip("/")), decode_responses=True)


def once(inside: Inside, url: str, *more: str) -> dict[str, Any]:
    told: dict[str, Any] = inside("duties", "--once", "--store", url, "--app", "zpe", "--json", *more).json
    return told


def test_a_lease_that_an_earlier_leader_waited_for_is_ended_and_its_job_delayed(inside: Inside, redis_url: str) -> None:
    with zpe_ago(redis_url, HOUR_S) as stage:
        add(stage, "lost")
        stage.lease("w1", patterns=("job.assign.zpe",))
        stage.clock.advance(HOUR_S / 2)
        stage.lead("a run before this one")

    told = once(inside, redis_url)

    keys = raw(redis_url)
    assert (told["led"], told["reaped"], told["promoted"]) == (True, 1, 0)
    assert (keys.zcard("zpe:lease:index"), keys.exists("zpe:lease:lost"), keys.get("zpe:retry_count:lost")) == (0, 0, "1")
    assert 0 < keys.zscore("zpe:delay", "lost") - time.time() <= 10


def test_a_lease_that_nobody_waited_for_gets_its_time_once_more(inside: Inside, redis_url: str) -> None:
    with zpe_ago(redis_url, HOUR_S) as stage:
        add(stage, "silent")
        stage.lease("w1", patterns=("job.assign.zpe",))

    first = once(inside, redis_url)
    over_at = raw(redis_url).zscore("zpe:lease:index", "silent")
    second = once(inside, redis_url)

    assert [told["reaped"] for told in (first, second)] == [0, 0]
    assert over_at > time.time()
    assert raw(redis_url).zscore("zpe:lease:index", "silent") == over_at
    assert second["epoch"] == first["epoch"] + 1, "the lock was given back"


def test_what_was_delayed_is_ready_when_its_time_has_come(inside: Inside, redis_url: str) -> None:
    with zpe_ago(redis_url, HOUR_S) as stage:
        add(stage, "again")
        stage.fail(stage.lease("w1", patterns=("job.assign.zpe",))[0])

    told = once(inside, redis_url)

    keys = raw(redis_url)
    assert told["promoted"] == 1
    assert (keys.zcard("zpe:delay"), keys.lrange("zpe:queue", 0, -1)) == (0, ["again"])


def test_all_that_is_due_is_done_however_much_it_is(inside: Inside, redis_url: str) -> None:
    with zpe_ago(redis_url, 40 * DAY_S) as stage:
        for number in range(300):  # more than one batch of pruning and of reaping
            add(stage, f"old-{number}")
            add(stage, f"lost-{number}")
        stage.store.cancel([f"old-{number}" for number in range(300)], actor="test")
        stage.lease("w1", limit=300, patterns=("job.assign.zpe",))
        stage.clock.advance(DAY_S)
        stage.lead("a run before this one")

    told = once(inside, redis_url)

    assert (told["pruned"], told["reaped"]) == (300, 300)


def test_while_another_leads_nothing_is_done(inside: Inside, redis_url: str) -> None:
    with zpe_ago(redis_url, HOUR_S) as stage:
        add(stage, "again")
        stage.fail(stage.lease("w1", patterns=("job.assign.zpe",))[0])
    with closing(RedisCoordination(connect(redis_url, 5.0), where="test", app="zpe")) as coordination:
        coordination.acquire("leader", "control-plane-1", 60.0, 0)

        told = once(inside, redis_url)
        text = inside("duties", "--once", "--store", redis_url, "--app", "zpe")

    assert told == {"led": False, "leader": "control-plane-1"}
    assert (text.stdout, text.returncode) == ("nothing done: control-plane-1 leads\n", 0)
    assert raw(redis_url).zcard("zpe:delay") == 1


def test_postgresql_is_led_for_a_moment(inside: Inside, postgres_url: str) -> None:
    first, second = (inside("duties", "--once", "--store", postgres_url, "--json").json for _ in range(2))

    assert (first["led"], second["led"], second["epoch"] - first["epoch"]) == (True, True, 1)


def test_a_data_folder_is_led_by_its_owner(served: tuple[User, Running], inside: Inside) -> None:
    user, server = served

    told = inside("duties", "--once", "--json", "--data", str(user.data)).json

    assert told["led"] is False
    assert f"pid {server.process.pid}" in told["leader"]


def test_a_data_folder_without_a_server_is_led(inside: Inside, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    with closing(SqlStore.open_sqlite(folder.database)) as store:
        before, _ = store.epoch()

    told = inside("duties", "--once", "--json", "--data", str(tmp_path)).json

    assert (told["led"], told["epoch"]) == (True, before + 1)


@pytest.mark.parametrize(
    ("words", "needle"),
    [(("duties",), "--once"), (("duties", "--once"), "--store"), (("duties", "--once", "--store", "mysql://x"), "redis://")],
)
def test_what_cannot_be_done_says_what_can(inside: Inside, tmp_path: Path, words: tuple[str, ...], needle: str) -> None:
    done = inside(*words, "--json", "--data", str(tmp_path))

    assert done.returncode == 2
    assert needle in json.loads(done.stderr)["error"]["message"]
