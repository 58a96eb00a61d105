"""Opening the Redis store: addresses, users, Sentinel, settings that keep no promise, and errors that name the way out."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis

from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import Submission
from tasuki.errors import ConfigError, DiskFull, InternalError, InterruptCause, TurnInterrupted
from tasuki.stores.redis import connection
from tasuki.stores.redis.connection import connect, name_of, translate
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.store import Feature
from tests.support.redis_service import RedisService

SECRET = "tasuki-test-secret"


def works(url: str) -> bool:
    spec = JobSpec(job_id="a", subject="x.y")
    store = RedisStore.open(url)
    try:
        store.submit([Submission(spec, "alice", body_hash(spec))])
        return store.get(["a"]) != [None]
    finally:
        store.close()


# -- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://user:hunter2@host:6379/0", "Redis at host:6379"),
        ("rediss://:hunter2@host", "Redis at host"),
        ("unix:///run/redis.sock?db=1", "Redis at /run/redis.sock"),
        ("redis+sentinel://u:hunter2@a:1,b:2/main/0", "Redis at a:1,b:2"),
        ("redis://user:hunt/er2@host:6379/0", "Redis"),
        ("redis://user:hunt?er2@host:6379/0", "Redis"),
        ("redis://[user:hunter2@host", "Redis"),
        ("redis://user:hunter2", "Redis at user:…"),
    ],
)
def test_a_name_never_has_the_password(url: str, name: str) -> None:
    assert name_of(url) == name


def test_rediss_is_tls(tmp_path: Path) -> None:
    client = connect(f"rediss://user:{SECRET}@host:6380/2?ssl_ca_certs={tmp_path}/ca.pem", 3.0)

    options = client.connection_pool.connection_kwargs
    assert issubclass(client.connection_pool.connection_class, redis.SSLConnection)
    assert (options["username"], options["password"], options["db"]) == ("user", SECRET, 2)
    assert options["ssl_ca_certs"] == f"{tmp_path}/ca.pem"
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (3.0, 3.0)


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis://host?bogus=1",
        "redis+sentinel://host/s?bogus=1",
        "unix:///s?bogus=1",
        "redis+sentinel://host:26379",
        "redis+sentinel://host:26379/",
    ],
)
def test_an_address_that_cannot_work_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match="addresses look like"):
        connect(url, 1.0)


@pytest.mark.parametrize("url", ["redis://user:hunt/er2@host:6379/0", "redis://user:hunter2@host:x/0"])
def test_an_address_that_is_not_understood_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="%2F") as raised:
        connect(url, 1.0)

    assert "hunt" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("app", ["", "a:b", "a b", "*"])
def test_an_app_that_would_spoil_its_keys_is_refused(redis_url: str, app: str) -> None:
    with pytest.raises(ConfigError, match="prefix of its keys"):
        RedisStore.open(redis_url, app=app)


def test_sentinel_addresses_take_users_and_tls_for_both_sides() -> None:
    client: Any = connect(f"rediss+sentinel://u:{SECRET}@a:1,[::1]:2,c/main/3?sentinel_password=other&ssl_ca_certs=/ca.pem", 3.0)

    pool = client.connection_pool
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(options["host"], options["port"]) for options in asked] == [("a", 1), ("::1", 2), ("c", 26379)]
    assert {(options["password"], options["ssl_ca_certs"]) for options in asked} == {("other", "/ca.pem")}
    assert (pool.service_name, pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == ("main", 3, SECRET)


# -- real ones -----------------------------------------------------------------------------------------------------


def test_the_master_behind_a_sentinel_is_found(redis_service: RedisService, tmp_path: Path) -> None:
    number = int(urlsplit(redis_service.url()).path.strip("/"))
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {redis_service.port} 1\n")

    with RedisService(str(config), "--sentinel", only={"bind": "127.0.0.1"}) as sentinel:
        assert works(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/{number}")


@pytest.fixture
def acl(redis_service: RedisService) -> Iterator[Any]:
    client: Any = redis_service.client()
    yield client
    client.acl_deluser("keeper", "narrow")


def test_an_acl_user_with_the_apps_keys_alone_is_enough(redis_service: RedisService, acl: Any) -> None:
    acl.execute_command("ACL", "SETUSER", "keeper", "on", f">{SECRET}", "~tasuki:*", "+@all", "-@admin", "-@dangerous", "+info")
    url = redis_service.url().replace("redis://", f"redis://keeper:{SECRET}@")

    assert works(url)


def test_a_wrong_password_is_told_without_the_password(redis_service: RedisService, acl: Any) -> None:
    acl.execute_command("ACL", "SETUSER", "keeper", "on", ">right", "~*", "+@all")
    url = redis_service.url().replace("redis://", f"redis://keeper:{SECRET}@")

    with pytest.raises(ConfigError, match="check user, password and rights") as raised:
        RedisStore.open(url)

    assert SECRET not in str(raised.value)


def test_a_user_without_the_rights_is_told(redis_service: RedisService, acl: Any) -> None:
    acl.execute_command("ACL", "SETUSER", "narrow", "on", f">{SECRET}", "~tasuki:*", "+@read", "+time", "+info", "+client")
    url = redis_service.url().replace("redis://", f"redis://narrow:{SECRET}@")

    with pytest.raises(ConfigError, match="rights"):
        works(url)


def test_nobody_there_is_an_interruption() -> None:
    with RedisService() as service:
        url = service.url()

    with pytest.raises(TurnInterrupted, match="cannot be reached") as raised:
        RedisStore.open(url, timeout_s=1.0)
    assert raised.value.why is InterruptCause.CONNECTION


# -- settings ------------------------------------------------------------------------------------------------------


def test_good_settings_are_not_spoken_of(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tasuki.store"):
        RedisStore.open(redis_url, strict=True).close()

    assert not caplog.records


def test_bad_settings_are_warned_of_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with RedisService(appendonly="no", maxmemory_policy="allkeys-lru", appendfsync="no") as service:
        with caplog.at_level(logging.WARNING, "tasuki.store"):
            store = RedisStore.open(service.url())
        store.close()
        with pytest.raises(ConfigError) as raised:
            RedisStore.open(service.url(), strict=True)

    assert Feature.DURABLE not in store.features
    for word in ("appendonly", "allkeys-lru", "appendfsync"):
        assert word in caplog.text
        assert word in str(raised.value)


def test_settings_that_cannot_be_checked_are_a_warning_even_if_strict(
    redis_service: RedisService, acl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    acl.execute_command("ACL", "SETUSER", "keeper", "on", f">{SECRET}", "~tasuki:*", "+@all", "-info", "-config")
    url = redis_service.url().replace("redis://", f"redis://keeper:{SECRET}@")

    with caplog.at_level(logging.WARNING, "tasuki.store"):
        RedisStore.open(url, strict=True).close()

    assert "could not be checked" in caplog.text


@pytest.mark.parametrize(
    ("url", "is_clear"),
    [
        ("redis://127.0.0.1:6379/0", False),
        ("redis://:pw@localhost/0", False),
        ("redis:///0", False),
        ("unix:///run/redis.sock?db=0", False),
        ("rediss://cache/0", False),
        ("rediss+sentinel://one,two/main/0", False),
        ("redis://cache:6379/0", True),
        ("redis://user:pw@10.0.0.7/0", True),
        ("redis+sentinel://127.0.0.1,two:26379/main/0", True),
    ],
)
def test_jobs_that_go_to_another_host_in_clear_text_are_warned_of(url: str, is_clear: bool) -> None:
    assert ("rediss://" in connection.clear_text_problem(url)) is is_clear


def test_the_warning_is_given_at_the_opening(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "clear_text_problem", lambda url: "a problem")

    RedisStore.open(redis_url).close()

    assert any("a problem" in record.getMessage() for record in caplog.records)


def test_jobs_of_another_version_are_refused_with_the_way_out(redis_url: str) -> None:
    assert works(redis_url)
    RedisStore.open(redis_url).close()
    parts = urlsplit(redis_url)
    raw = redis.Redis(port=parts.port or 0, db=int(parts.path.strip("/")))
    fields = msgspec.msgpack.decode(raw.get("tasuki:job:a"))
    raw.set("tasuki:job:a", msgspec.msgpack.encode(fields[:-1]))

    with pytest.raises(ConfigError, match=r"written by another version of tasuki.*use another database or --app"):
        RedisStore.open(redis_url)


def test_an_old_redis_and_a_cluster_are_refused(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    for told, words in (({"redis_version": "5.0.14"}, "6.2 or newer"), ({"redis_mode": "cluster"}, "Sentinel")):
        monkeypatch.setattr(connection, "_asked", lambda ask, told=told: told)
        with pytest.raises(ConfigError, match=words):
            RedisStore.open(redis_url)


def test_a_redis_that_is_full_says_so_and_keeps_nothing_half() -> None:
    with RedisService(maxmemory="6mb") as service:
        store = RedisStore.open(service.url())
        specs = iter([JobSpec(job_id=f"job-{number}", subject="x.y", payload=b"x" * 60_000) for number in range(400)])

        def fill() -> None:
            for spec in specs:
                store.submit([Submission(spec, "alice", body_hash(spec))])

        with pytest.raises(DiskFull, match="nothing was stored"):
            fill()
        refused = int(next(specs).job_id.removeprefix("job-")) - 1
        counted = store.counts()["x"].pending
        jobs = store.get([f"job-{number}" for number in range(refused + 1)])
        store.close()

    assert counted == refused > 10
    assert [job is not None for job in jobs] == [True] * refused + [False]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("READONLY You can't write against a read only replica.", TurnInterrupted),
        ("LOADING Redis is loading the dataset in memory", TurnInterrupted),
        ("BUSY Redis is busy running a script.", TurnInterrupted),
        ("MISCONF Errors writing to the AOF file: No space left on device", DiskFull),
        ("ERR Error running script: user_script:1: attempt to index a nil value", InternalError),
    ],
)
def test_what_redis_says_becomes_an_error_of_ours(said: str, kind: type[Exception]) -> None:
    error = translate(redis.ResponseError(said), "Redis at x", lambda: True)

    assert type(error) is kind
    if isinstance(error, TurnInterrupted):
        assert error.was_stored is None
