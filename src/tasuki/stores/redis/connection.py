"""Connections to Redis: addresses, deadlines, errors, the check of its settings, and hints between servers.

    redis://user:password@host:6379/0        rediss:// with TLS; unix:///path?db=0
    redis+sentinel://user:password@host1:26379,host2:26379/service/0
    rediss+sentinel://… with TLS, to Sentinel and Redis alike
    redis+cluster://user:password@host1:6379,host2:6379      rediss+cluster:// with TLS; for the coordination alone

Parameters of the driver may follow as a query: ?ssl_ca_certs=…, ?sentinel_username=…&sentinel_password=… . Touches the network.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from tasuki.core.address import Address, shown_place
from tasuki.errors import ConfigError, DiskFull, InternalError, InterruptCause, TasukiError, TurnInterrupted
from tasuki.stores.wakeups import TIMEOUT_S as HINT_TIMEOUT_S
from tasuki.stores.wakeups import Wakeups

logger = logging.getLogger("tasuki.store")

TIMEOUT_S = 10.0  # for an answer; a turn takes milliseconds
CONNECT_TIMEOUT_S = 5.0
SENTINEL_PORT = 26379
REDIS_PORT = 6379
OLDEST_VERSION = (6, 2)
IDLE_S = 5.0  # of silence, before the listener sends a ping; after as much again it connects anew

_REFUSED = (
    "WRONGPASS",
    "NOAUTH",
    "NOPERM",
    "no permissions",
    "can't access",  # a key, inside a script; Redis 7 uses the words above
    "can't run this command",
    "invalid username-password",
    "Authentication required",
)
_MOVED = ("READONLY", "MASTERDOWN", "NOREPLICAS", "LOADING", "UNKILLABLE")
"""This server does not write, at least not now; nothing was written. A new connection may reach another server."""
_FULL = ("OOM command not allowed", "MISCONF", "No space left")


def connect(url: str, timeout_s: float) -> redis.Redis:
    """Return a client with one connection, which is made by the first command, and again by the first one after it broke."""
    if is_cluster(url):
        raise ConfigError(f"{name_of(url)} is a cluster, whose keys are spread: it can be the coordination, not the store")
    client: redis.Redis = _client(url, timeout_s, redis.Redis, Sentinel, Retry)
    return client


def connect_coordination(url: str, timeout_s: float) -> redis.Redis | ClusterClient:
    """Return such a client for commands on one key each, which may be those of a cluster."""
    return ClusterClient(url, timeout_s) if is_cluster(url) else connect(url, timeout_s)


def connect_async(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """Return such a client for an event loop; of a cluster, whose servers pass messages on to each other, that of any server."""
    if is_cluster(url):
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        host, port = random.choice(_hosts(hosts, REDIS_PORT))  # noqa: S311 - any will do
        url = f"{parts.scheme.removesuffix('+cluster')}://{login}{at}{_bracketed(host)}:{port}/0?{parts.query}"
    client: redis.asyncio.Redis = _client(url, timeout_s, redis.asyncio.Redis, AsyncSentinel, AsyncRetry)
    return client


def _client(url: str, timeout_s: float, kind: Any, sentinels: Any, retry: Any) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        # `scripts.RedisSession` decides whether a command may be sent twice.
        "retry": retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if not url.startswith("unix:"):  # a socket file has neither
        options |= {"socket_connect_timeout": min(timeout_s, CONNECT_TIMEOUT_S), "socket_keepalive": True}
    try:
        if "+sentinel" in urlsplit(url).scheme:
            client = _behind_sentinels(url, options, sentinels)
        else:
            client = kind.from_url(url, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # connects nowhere; the driver looks at parameters only here
        return client
    except (ValueError, TypeError, redis.RedisError):
        # The driver's text may quote a part of the password.
        raise ConfigError(
            f"the address of {name_of(url)} is not understood; addresses look like redis://user:password@host:6379/0, and "
            "/ ? # @ : % in a password are written as %2F %3F %23 %40 %3A %25; parameters behind a ? are those of redis-py"
        ) from None


def is_cluster(url: str) -> bool:
    """Return whether this is the address of a Redis Cluster."""
    return urlsplit(url).scheme.endswith("+cluster")


class ClusterClient:
    """The part of `redis.Redis` that the coordination uses, on a Redis Cluster.

    The driver's own client connects when it is made. This one does so at its first command, and at the first one after an error:
    it asks the servers of the address again who has which keys.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        try:
            hosts = _hosts(parts.netloc.rpartition("@")[2], REDIS_PORT)
        except ValueError:
            hosts = []
        if not all(host for host, _ in hosts) or not hosts or parts.path.strip("/") not in ("", "0"):
            raise ConfigError(
                f"the address of {name_of(url)} is not understood; those of a cluster look like "
                "redis+cluster://user:password@host1:6379,host2:6379, without the number of a database: it has one"
            )
        self._hosts = hosts
        self.connection_kwargs: dict[str, Any] = {
            **dict(parse_qsl(parts.query)),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(timeout_s, CONNECT_TIMEOUT_S),
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if parts.scheme.startswith("rediss"):
            self.connection_kwargs["ssl"] = True
        if parts.username or parts.password:
            self.connection_kwargs["username"] = unquote(parts.username) if parts.username else None
            self.connection_kwargs["password"] = unquote(parts.password or "")
        self._where = name_of(url)
        self._driver: RedisCluster | None = None

    @property
    def connection_pool(self) -> ClusterClient:
        return self

    def execute_command(self, *arguments: Any) -> Any:
        return self._answer(lambda driver: driver.execute_command(*arguments))

    def register_script(self, text: str) -> Callable[..., Any]:
        """Return a function that runs a script on one key."""
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

        def run(keys: Sequence[str], arguments: Sequence[Any]) -> Any:
            def ask(driver: Any) -> Any:
                try:
                    return driver.evalsha(sha, len(keys), *keys, *arguments)
                except redis.exceptions.NoScriptError:  # each server has its own scripts, and a new master has none
                    return driver.eval(text, len(keys), *keys, *arguments)

            return self._answer(ask)

        return run

    def pipeline(self, transaction: bool) -> Any:
        assert not transaction, "keys of a cluster are spread"
        return _ClusterPipeline(self._answer)

    def disconnect(self) -> None:
        """Close all connections; the next command asks anew who has which keys."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    close = reset = disconnect

    def _answer(self, ask: Callable[[Any], Any]) -> Any:
        try:
            if self._driver is None:
                nodes = [ClusterNode(host, port) for host, port in self._hosts]  # type: ignore[no-untyped-call]
                self._driver = RedisCluster(startup_nodes=nodes, **self.connection_kwargs)
            return ask(self._driver)
        except redis.exceptions.RedisClusterException as error:  # which is no RedisError
            raise redis.ConnectionError(str(error)) from None
        except TypeError:  # the driver's text may quote a parameter
            raise ConfigError(f"the address of {self._where} has a parameter that redis-py does not know") from None


class _ClusterPipeline:
    """Commands on one key each that are sent at once, to the servers that have the keys."""

    def __init__(self, answer: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._answer = answer
        self._commands: list[tuple[Any, ...]] = []

    def execute_command(self, *arguments: Any) -> None:
        self._commands.append(arguments)

    def execute(self) -> list[Any]:
        def ask(driver: Any) -> list[Any]:
            with driver.pipeline() as pipeline:
                for command in self._commands:
                    pipeline.execute_command(*command)
                return list(pipeline.execute())

        return list(self._answer(ask))


def _behind_sentinels(url: str, options: dict[str, Any], sentinels: Any) -> Any:
    parts = urlsplit(url)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigError(f"{name_of(url)} names no service; addresses look like redis+sentinel://host:26379/service/0")
    given = dict(parse_qsl(parts.query))
    asked = {name.removeprefix("sentinel_"): given.pop(name) for name in list(given) if name.startswith("sentinel_")}
    hosts = _hosts(parts.netloc.rpartition("@")[2], SENTINEL_PORT)
    options = {**options, **given}
    if parts.scheme.startswith("rediss"):
        options["ssl"] = True
    if parts.username or parts.password:
        options["username"] = unquote(parts.username) if parts.username else None
        options["password"] = unquote(parts.password or "")
    kept = ("socket_timeout", "socket_connect_timeout", "ssl", *(name for name in given if name.startswith("ssl_")))
    found = sentinels(hosts, sentinel_kwargs={**{name: options[name] for name in kept if name in options}, **asked})
    return found.master_for(service, db=int(database or 0), **options)


def _hosts(places: str, port: int) -> list[tuple[str, int]]:
    """Return the hosts and ports of `a:1,[::1]:2,c`; those that name none have this port."""
    found = []
    for place in places.split(","):
        host, _, given = place.rpartition(":") if ":" in place and not place.endswith("]") else (place, "", "")
        found.append((host.strip("[]"), int(given or port)))
    return found


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def name_of(url: str) -> str:
    """Return how messages name the server: never with the password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "Redis"
    if re.search("[@=]", parts.path) or "@" in parts.query + parts.fragment:  # a / ? or # in the password: no host before it
        return "Redis"
    return f"Redis at {shown_place(parts.netloc.rpartition('@')[2] or parts.path)}"


def place_of(url: str) -> str:
    """Return address and database of a Redis, the same for all users and passwords, Sentinels in any order."""
    parts = urlsplit(url)
    hosts = ",".join(sorted(parts.netloc.rpartition("@")[2].lower().split(",")))
    return f"redis://{hosts}{parts.path if parts.path.strip('/') else '/0'}"


def translate(error: redis.RedisError, where: str, was_stored: Callable[[], bool] | None) -> TasukiError:
    """Return tasuki's error for one of the driver. `was_stored` finds out whether a turn without an answer was done."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError) or any(
        word in text for word in _REFUSED
    ):
        return ConfigError(f"{where}: {text}; check user, password and rights")
    if any(word in text for word in _FULL):
        return DiskFull(f"{where} cannot keep more: {text}; nothing was stored, try again when there is space")
    if any(word in text for word in _MOVED):
        return TurnInterrupted(f"{where} does not take writes now: {text}; nothing was stored", InterruptCause.CONNECTION)
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return TurnInterrupted(f"{where} cannot be reached: {text}", InterruptCause.CONNECTION, was_stored)
    if "BUSY" in text:
        return TurnInterrupted(f"{where} is busy: {text}; nothing was stored", InterruptCause.TIMEOUT)
    return InternalError(f"{where}: {text}")


class Settings(NamedTuple):
    """The settings of Redis that decide whether an acknowledged job is kept."""

    problems: tuple[str, ...]
    """Settings that may lose an acknowledged job, and the remedy."""
    unknown: tuple[str, ...]
    """Settings that could not be checked: managed servers forbid it."""
    is_durable: bool = True
    """False: a restart loses everything."""


def check_settings(client: redis.Redis, url: str, *, strict: bool) -> bool:
    """Check the settings that keep acknowledged jobs. Wrong: a warning, or ConfigError if `strict`. Unknown: a warning.

    Return False if a restart of Redis loses everything.
    """
    where = name_of(url)
    if problem := clear_text_problem(url):
        logger.warning("%s: %s", where, problem)
    found = look_at_settings(client, where)
    for name in found.unknown:
        logger.warning("%s: its setting %s could not be checked", where, name)
    if found.problems and strict:
        raise ConfigError(f"{where}: {'; '.join(found.problems)}")
    for problem in found.problems:
        logger.warning("%s: %s", where, problem)
    return found.is_durable


def clear_text_problem(url: str) -> str:
    """Return a warning about a connection to another host without TLS; empty if there is none."""
    parts = urlsplit(url)
    hosts = [host for host, _ in _hosts(parts.netloc.rpartition("@")[2], REDIS_PORT)]
    if parts.scheme.startswith(("rediss", "unix")) or all(not host or Address("tcp", host).loopback for host in hosts):
        return ""
    return "passwords and jobs go to another host in clear text; use rediss:// in the address"


def look_at_settings(client: redis.Redis, where: str) -> Settings:
    """Read the settings; ConfigError for a server that can never work."""
    server = _asked(lambda: client.info("server"))
    version = str(server.get("redis_version", ""))
    if version and tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        raise ConfigError(f"{where} is version {version}; tasuki needs {'.'.join(map(str, OLDEST_VERSION))} or newer")
    if server.get("redis_mode") == "cluster":
        raise ConfigError(
            f"{where} is a cluster, whose keys are spread; use a single Redis, or Sentinel (as a coordination: redis+cluster://)"
        )
    found = {
        "appendonly": _asked(lambda: client.info("persistence")).get("aof_enabled"),
        "maxmemory-policy": _asked(lambda: client.info("memory")).get("maxmemory_policy"),
        "appendfsync": _asked(lambda: client.config_get("appendfsync")).get("appendfsync"),
    }
    problems = []
    if found["appendonly"] == 0:
        problems.append("appendonly is off: a restart loses acknowledged jobs; set appendonly yes")
    if found["maxmemory-policy"] not in (None, "noeviction"):
        problems.append(f"maxmemory-policy is {found['maxmemory-policy']}: it may throw jobs away; set noeviction")
    if found["appendfsync"] == "no":
        problems.append("appendfsync is no: a power cut loses what the system had not written; set everysec, or always")
    unknown = tuple(name for name, value in found.items() if value is None)
    return Settings(tuple(problems), unknown, is_durable=found["appendonly"] != 0)


def _asked(ask: Callable[[], Any]) -> dict[str, Any]:
    """Return the server's answer about itself, nothing if it refuses: managed servers forbid CONFIG, some INFO."""
    try:
        return dict(ask())
    except redis.ResponseError:
        return {}


class RedisWakeups(Wakeups[redis.asyncio.Redis]):
    """Hints over publish and subscribe: one connection listens, another one publishes, both apart from the store's.

    The channel names app and database: unlike keys, channels are the same in all databases of a Redis. Touches no key.
    """

    piece_max_bytes = 60_000  # below DECODE_MAX_BYTES of the receiver

    def __init__(
        self, url: str, *, app: str, server_id: str, idle_s: float = IDLE_S, jitter: Callable[[], float] = random.random
    ) -> None:
        super().__init__(server_id=server_id, jitter=jitter)
        self._url = url
        self._idle_s = idle_s
        # This client is not used: an invalid address is refused here instead of being tried for ever.
        number = connect_async(url, HINT_TIMEOUT_S).connection_pool.connection_kwargs.get("db") or 0
        self._channel = f"{app}:hints:{number}"

    async def _connect(self) -> redis.asyncio.Redis:
        client = connect_async(self._url, HINT_TIMEOUT_S)
        try:
            await client.ping()
        except BaseException:
            await client.aclose()
            raise
        return client

    async def _disconnect(self, connection: redis.asyncio.Redis) -> None:
        await connection.aclose()

    async def _received(self, connection: redis.asyncio.Redis) -> AsyncGenerator[bytes | None]:
        subscription: Any = connection.pubsub()
        try:
            await subscription.subscribe(self._channel)
            was_asked = False
            while True:
                message = await subscription.get_message(timeout=self._idle_s)
                if message is not None:
                    was_asked = False
                    if message["type"] in ("subscribe", "message"):
                        yield None if message["type"] == "subscribe" else message["data"]
                elif was_asked:
                    raise redis.ConnectionError(f"no answer within {self._idle_s:g} s")
                else:
                    await subscription.ping()
                    was_asked = True
        finally:
            await subscription.aclose()

    async def _prepare_sending(self, connection: redis.asyncio.Redis) -> None:
        pass

    async def _send(self, connection: redis.asyncio.Redis, batch: Sequence[bytes]) -> None:
        async with connection.pipeline(transaction=False) as pipeline:
            pipeline.ping()  # also with nothing to send it finds out whether the connection is alive
            for piece in batch:
                pipeline.publish(self._channel, piece)
            await pipeline.execute()

    def _describe(self, error: Exception) -> str:
        """Return the error's text, which names host and port, and no password."""
        return " ".join(str(error).split())
