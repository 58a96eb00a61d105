"""Coordination in Redis, on a connection of its own: a long turn of the store delays a beat only while Redis is busy.

Verbs that must be atomic are Lua (`lua/`, one file per verb, keys explained in `_coordination.lua`); the clock is Redis TIME.
Redis may forget everything but the highest epoch; if it forgot even that, `floor` brings it back: the epoch that the store knows,
which is SQL or this Redis itself.

Touches the network, and of Redis the keys {app}:beats, member, lock, degrade, led and detached. The caller makes the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.coords.coordination import (
    FORGET_AFTER_S,
    FORGET_BATCH,
    LEADER,
    TIMEOUT_SHARE,
    ClusterMember,
    Coordination,
    LiveMember,
    View,
    check_ttl,
)
from tasuki.core.election import LOCK_TTL_MAX_S, Busy, Locked
from tasuki.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    import redis


_REFUSED = ("NOPERM", "no permissions", "can't access", "can't run this command", "NOAUTH", "WRONGPASS")


class RedisCoordination(Coordination):
    """Coordination in Redis. `client` is closed with this object; `where` names the server without secrets.

    `app` is the prefix of the keys: servers with the same prefix belong together.
    """

    def __init__(self, client: redis.Redis, *, where: str, app: str) -> None:
        self._client: Any = client  # its commands have no types that mypy can use
        self._where = where
        self._app = app
        self._scripts: dict[str, Any] = {name: client.register_script(_script(name, app)) for name in _VERBS}
        self._closed = False

    def set_lock_ttl(self, ttl_s: float) -> None:
        pool = self._client.connection_pool
        pool.connection_kwargs["socket_timeout"] = TIMEOUT_SHARE * ttl_s
        pool.disconnect()
        pool.reset()  # a connection that was closed keeps its timeout

    # -- members --------------------------------------------------------------------------------------------------
    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        mine = (me.member_id, me.incarnation, me.version, me.kind, me.schema_version, me.info)
        known = [part for item in seen.items() for part in item]
        live, detached = self._run("beat", *mine, self.member_timeout_s, FORGET_AFTER_S, FORGET_BATCH, *known)
        members = sorted((_live(row) for row in live), key=lambda member: member.member_id)
        degraded = me.led_ago_s is not None and bool(self._command("DEL", f"{self._app}:degrade"))
        if me.led_ago_s is not None:
            self._command("SET", f"{self._app}:led", self._now_s() - me.led_ago_s)
        led_at = self._command("GET", f"{self._app}:led")
        seen_s = None if led_at is None else self._now_s() - float(led_at)
        return View(tuple(members), _names(detached), degraded, seen_s, self._detached_by_leader(detached))

    def _detached_by_leader(self, detached: list[bytes]) -> frozenset[str]:
        entries = self._command("HMGET", f"{self._app}:detached", *detached) if detached else []
        told = zip(detached, entries, strict=True)
        return _names([name for name, entry in told if entry is not None and msgspec.json.decode(entry)["actor"] == LEADER])

    def _now_s(self) -> float:
        seconds, microseconds = self._command("TIME")
        return int(seconds) + int(microseconds) / 1e6

    def heartbeat_ages(self) -> dict[str, float]:
        return self._ages(f"{self._app}:beats")

    def _ages(self, key: str) -> dict[str, float]:
        now_s = self._now_s()
        found = self._command("ZRANGE", key, 0, -1, "WITHSCORES")
        pairs = found if found and isinstance(found[0], list | tuple) else list(zip(found[::2], found[1::2], strict=True))
        return {name.decode(): now_s - float(at) for name, at in pairs}

    def leave(self, member_id: str, incarnation: str) -> None:
        self._run("leave", member_id, incarnation)

    # -- the leader's lock ----------------------------------------------------------------------------------------
    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        check_ttl(ttl_s)
        won, *answer = self._run("acquire", scope, holder, ttl_s, floor, LOCK_TTL_MAX_S)
        return Locked(int(answer[0])) if won else Busy(answer[0].decode(), float(answer[1]))

    def _set_expiry(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        return bool(self._run("set_expiry", scope, holder, epoch, ttl_s, LOCK_TTL_MAX_S))

    def degrade(self) -> None:
        self._command("SET", f"{self._app}:degrade", "1")

    # -- workers that get no more work ----------------------------------------------------------------------------
    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        if not detached:
            return bool(self._command("HDEL", f"{self._app}:detached", worker_id))
        seconds, _ = self._command("TIME")
        entry = msgspec.json.encode({"at": int(seconds), "actor": actor, "reason": reason})
        if actor != LEADER and self._detached_by_leader([worker_id.encode()]):
            return not self._command("HSET", f"{self._app}:detached", worker_id, entry)
        return bool(self._command("HSETNX", f"{self._app}:detached", worker_id, entry))

    def detached(self) -> frozenset[str]:
        return _names(self._command("HKEYS", f"{self._app}:detached"))

    # -- the connection -------------------------------------------------------------------------------------------
    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _run(self, name: str, *arguments: str | bytes | float) -> Any:
        return self._ask(self._scripts[name], (), arguments)

    def _command(self, *arguments: str | bytes | float) -> Any:
        return self._ask(self._client.execute_command, *arguments)

    def _ask(self, call: Any, *arguments: Any) -> Any:
        import redis

        if self._closed:
            raise Unavailable("this coordination was closed; make a new one")
        try:
            return call(*arguments)
        except redis.RedisError as error:
            # The server may be a replica now, or answer later, when another answer is waited for.
            self._client.connection_pool.disconnect()
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, redis.AuthenticationError) or any(word in text for word in _REFUSED):
                raise ConfigError(f"coordination: {self._where}: {text}; check user, password and rights") from None
            raise Unavailable(f"coordination: {self._where}: {text}") from None


_VERBS = ("beat", "leave", "acquire", "set_expiry")


@lru_cache
def _script(name: str, app: str) -> str:
    """Return the script of a verb: the shared part and its own."""
    folder = files("tasuki.coords").joinpath("lua")
    shared, verb = (folder.joinpath(f"{part}.lua").read_text("utf-8") for part in ("_coordination", name))
    return f"local APP = '{app}'\n{shared}\n{verb}"


def _live(row: list[Any]) -> LiveMember:
    member_id, kind, incarnation, schema_version, version, info = row
    return LiveMember(member_id.decode(), kind.decode(), incarnation.decode(), int(schema_version), int(version), info)


def _names(rows: list[bytes]) -> frozenset[str]:
    return frozenset(row.decode() for row in rows)
