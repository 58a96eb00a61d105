"""`tasuki server` on Redis: what it refuses before it opens anything and with --strict, and the limits of an app's jobs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from tasuki.cli.process import server_config
from tasuki.cli.server import AppOptions, ListenOptions, ServerOptions, check
from tasuki.config import Address, DataFolder
from tasuki.errors import ConfigError
from tasuki.server.assembly import StorageLocations
from tests.cli.commands import User, running
from tests.support.redis_service import RedisService
from tests.support.waiting import until

REDIS = "redis://me:hunter2@127.0.0.1:6379/0"
POSTGRESQL = "postgresql://me:hunter2@127.0.0.1/tasuki"
HTTP = Address("http", "127.0.0.1", 0)


def options(http: Address | None = None, apps: tuple[str, ...] = (), **given: Any) -> ServerOptions:
    folder = DataFolder(Path("unused"))
    places = StorageLocations(folder, **given)
    return ServerOptions(ListenOptions(http=http, apps=AppOptions(apps)), places, server_config(folder.root))


@pytest.mark.parametrize(
    "store", [REDIS, "rediss://host/0", "unix:///run/redis.sock?db=1", "redis+sentinel://a:26379,b:26379/main/0"]
)
def test_every_form_of_address_is_a_store(store: str) -> None:
    check(options(store=store, http=HTTP, apps=("zpe",), strict=True, blobs="s3://bucket"))


def test_an_app_needs_no_http_where_it_has_keys() -> None:
    check(options(store=REDIS, apps=("zpe",)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"store": REDIS, "http": HTTP, "apps": ("zpe", "other")}, "one server for each app"),
        ({"store": "mysql://me:hunter2@host/x"}, "redis://host:6379/0"),
        ({"store": POSTGRESQL, "strict": True}, "--strict is about the settings of Redis"),
        ({"strict": True}, "--strict is about the settings of Redis"),
        ({"store": POSTGRESQL, "apps": ("zpe",)}, "give --http"),
        ({"store": REDIS, "strict": True}, "give --blobs s3://"),
        ({"store": REDIS, "coordination": REDIS}, "--coordination is for servers on PostgreSQL"),
        ({"coordination": REDIS}, "--coordination is for servers on PostgreSQL"),
        ({"store": POSTGRESQL, "coordination": POSTGRESQL}, "use redis://"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out_and_without_the_password(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(options(**given))

    assert words in raised.value.message
    assert "hunter2" not in raised.value.message


@pytest.mark.e2e
def test_strict_refuses_settings_that_lose_jobs_and_migrate_has_nothing_to_do(user: User) -> None:
    with RedisService(appendonly="no") as service:
        refused = user.run("server", "--store", service.url(), "--no-tcp", "--strict", "--blobs", "blobs")
        migrated = user.run("migrate", "--store", service.url())

    assert refused.returncode == 2
    assert "appendonly is off" in refused.stderr
    assert migrated.stdout == "Redis has no tables: already up to date\n"


@pytest.mark.e2e
def test_jobs_of_raw_commands_have_the_limits_of_the_app(user: User, redis_service: RedisService) -> None:
    url, limits = redis_service.url(), ("--app-retries", "0", "--app-backoff", "1.5", "--app-timeout", "90")
    with running(user, "server", "--store", url, "--app", "zpe", "--no-tcp", *limits):
        with closing(redis.Redis.from_url(url)) as outsider:
            outsider.set("zpe:payload:raw", "{}")
            outsider.lpush("zpe:queue", "raw")
        view = until(lambda: (user.json("list", "--json")["jobs"] or [None])[0], what="the job is known")

    assert (view["job_id"], view["max_retries"], view["timeout_s"]) == ("raw", 0, 90.0)
