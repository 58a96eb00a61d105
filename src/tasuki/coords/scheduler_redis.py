"""Coordination on the keys `scheduler:…` of a Redis beside a SQL store. People and programs of others may read and write them.

    scheduler:worker:id_seq              number of the last worker
    scheduler:worker:{id}                HASH, gone heartbeat_ttl after the last beat of its process: node_id, pid, grpc_host,
                                         grpc_port, role (leader, subleader, worker), last_heartbeat_ts, load, current_job_run_id,
                                         detached, degrade_leader
    scheduler:leader:lock                the id of the leader; SET NX PX
    scheduler:leader:epoch               the last epoch. No TTL
    scheduler:leader:last_seen_ts        time at which the store took the last turn of a leader
    scheduler:leader:degrade             the leader is to step down (or degrade_leader = 1 in its hash)
    scheduler:detach:{id}                1: the worker gets no more work, and comes back under another id; also if somebody else
                                         wrote it. `by NAME`: a person detached it, and it stays until it is attached
    scheduler:jobrun:lease:{id}          the worker that a run is about to be assigned to; SET NX PX, 5 s. For readers alone
    scheduler:members, :member:{id}      ZSET of live processes by their last beat, HASH of what they tell each other
    scheduler:detached                   SET of the workers of which a flag was seen

Other scopes have keys of the same form: scheduler:{scope}:lock and :epoch. Every command and script (`lua/scheduler.lua`) has one
key, as Redis Cluster wants it. So nothing here is atomic over two keys: a process may take a lock and die before it has an epoch.
The lock ends by its ttl then; and an epoch counts only after the store has registered it.

Touches the network. The clock is TIME of the server that has scheduler:members: those of a cluster have a clock each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tasuki.coords.coordination import (
    ASSIGNED_S,
    FORGET_AFTER_S,
    LEADER,
    LEADER_DETACH_S,
    ClusterMember,
    LiveMember,
    View,
    check_ttl,
)
from tasuki.coords.redis import RedisCoordination
from tasuki.core.election import LOCK_TTL_MAX_S, Busy, Locked

if TYPE_CHECKING:
    import redis

PREFIX = "scheduler"
_MEMBER = ("kind", "incarnation", "schema_version", "version")


class SchedulerCoordination(RedisCoordination):
    """Coordination on the keys above. `client` is closed with this object; `where` names the server without secrets."""

    shows_workers = True

    def __init__(self, client: redis.Redis | Any, *, where: str) -> None:
        super().__init__(client, where=where, app=PREFIX)
        self._scripts = {name: client.register_script(text) for name, text in _scripts().items()}
        self._shown: set[str] = set()
        """Workers whose hashes this process wrote."""

    def enlist(self, floor: int) -> int:
        """Return a number for a worker that no other has: above the last one, and above `floor`, the last one in the database."""
        return int(self._on("next", "worker:id_seq", floor))

    # -- members --------------------------------------------------------------------------------------------------
    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        now_s = self._now_s()
        ttl_ms = int(self.member_timeout_s * 1000)
        mine = (me.kind, me.incarnation, me.schema_version, me.version, me.info)
        self._on("tell", f"member:{me.member_id}", ttl_ms, *mine)
        self._command("ZADD", f"{PREFIX}:members", now_s, me.member_id)
        self._command("ZREMRANGEBYSCORE", f"{PREFIX}:members", "-inf", f"({now_s - FORGET_AFTER_S}")
        flags = self._flags({*self._members("detached"), *me.workers})
        degraded = self._show(me, now_s, frozenset(flags))
        if me.led_ago_s is not None:
            self._command("SET", f"{PREFIX}:leader:last_seen_ts", now_s - me.led_ago_s)
            degraded = bool(self._command("DEL", f"{PREFIX}:leader:degrade")) or degraded
        seen_s = self._led_ago_s(now_s)
        detached_by_leader = frozenset(name for name, actor in flags.items() if actor == b"1")
        degraded = degraded and me.led_ago_s is not None
        return View(tuple(self._live(now_s, seen)), frozenset(flags), degraded, seen_s, detached_by_leader)

    def _show(self, me: ClusterMember, now_s: float, detached: frozenset[str]) -> bool:
        """Write the hashes of this process's workers; return whether one of them was told not to lead."""
        degraded = False
        for worker_id, facts in me.workers.items():
            fields = {**facts, "last_heartbeat_ts": now_s, "detached": int(worker_id in detached)}
            parts = [part for item in fields.items() for part in item]
            degraded = bool(self._on("show", f"worker:{worker_id}", int(self.member_timeout_s * 1000), *parts)) or degraded
        for gone in self._shown - set(me.workers):
            self._command("DEL", f"{PREFIX}:worker:{gone}")
        self._shown = set(me.workers)
        return degraded

    def _live(self, now_s: float, seen: Mapping[str, int]) -> Iterable[LiveMember]:
        # A beat from the future was written before the clock was set back, and is no sign of life.
        span = f"({now_s - self.member_timeout_s}", f"({now_s + self.member_timeout_s}"
        beats = _scored(self._command("ZRANGEBYSCORE", f"{PREFIX}:members", *span, "WITHSCORES"))
        ids = sorted(beats)
        rows = self._together([("HMGET", f"{PREFIX}:member:{name}", *_MEMBER) for name in ids])
        told = [(name, row) for name, row in zip(ids, rows, strict=True) if None not in row]
        new = [name for name, row in told if seen.get(name) != int(row[3])]
        infos = dict(zip(new, self._together([("HGET", f"{PREFIX}:member:{name}", "info") for name in new]), strict=True))
        for name, (kind, incarnation, schema_version, version) in told:
            known = (kind.decode(), incarnation.decode(), int(schema_version), int(version), infos.get(name))
            yield LiveMember(name, *known, age_s=now_s - beats[name])

    def led_ago_s(self) -> float | None:
        """Return how long ago the store took the last turn of a leader; None: there was none yet."""
        return self._led_ago_s(self._now_s())

    def _led_ago_s(self, now_s: float) -> float | None:
        led_at = self._command("GET", f"{PREFIX}:leader:last_seen_ts")
        return None if led_at is None else now_s - float(led_at)

    def heartbeat_ages(self) -> dict[str, float]:
        return self._ages(f"{PREFIX}:members")

    def live(self) -> list[LiveMember]:
        """Return the live members, without being one."""
        return list(self._live(self._now_s(), {}))

    def leave(self, member_id: str, incarnation: str) -> None:
        if self._on("leave", f"member:{member_id}", incarnation):
            self._command("ZREM", f"{PREFIX}:members", member_id)
        for worker_id in self._shown:
            self._command("DEL", f"{PREFIX}:worker:{worker_id}")
        self._shown = set()

    # -- locks ----------------------------------------------------------------------------------------------------
    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        check_ttl(ttl_s)
        won, *found = self._on("take", f"{scope}:lock", holder, int(ttl_s * 1000), int(LOCK_TTL_MAX_S * 1000))
        if not won:
            return Busy(found[0].decode(), max(0, found[1]) / 1000)
        return Locked(int(self._on("next", f"{scope}:epoch", floor)))

    def _set_expiry(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        # Each holder that took the lock since has raised the epoch, even if it is this one.
        if int(self._command("GET", f"{PREFIX}:{scope}:epoch") or 0) != epoch:
            return False
        return bool(self._on("hold", f"{scope}:lock", holder, int(ttl_s * 1000), int(LOCK_TTL_MAX_S * 1000)))

    def degrade(self) -> None:
        self._command("SET", f"{PREFIX}:leader:degrade", "1")

    # -- workers that get no more work ----------------------------------------------------------------------------
    def note_assigned(self, worker_of: Mapping[str, str]) -> None:
        ttl_ms = str(int(ASSIGNED_S * 1000))
        self._together([("SET", f"{PREFIX}:jobrun:lease:{run}", to, "NX", "PX", ttl_ms) for run, to in worker_of.items()])

    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        """Set or delete the flag; the reason is in the log of operations, not here."""
        flag = f"{PREFIX}:detach:{worker_id}"
        if not detached:
            self._command("SREM", f"{PREFIX}:detached", worker_id)
            return bool(self._command("DEL", flag))
        self._command("SADD", f"{PREFIX}:detached", worker_id)
        value, kept_s = ("1", LEADER_DETACH_S) if actor == LEADER else (f"by {actor}", 0)
        return bool(self._on("flag", f"detach:{worker_id}", value, kept_s))

    def detached(self) -> frozenset[str]:
        return frozenset(self._flags(self._members("detached")))

    def _flags(self, worker_ids: Iterable[str]) -> dict[str, bytes]:
        """Return those of the workers that are detached with the values of their flags, and make the index say the same."""
        asked = sorted(worker_ids)
        values = self._together([("GET", f"{PREFIX}:detach:{name}") for name in asked])
        found = {name: value for name, value in zip(asked, values, strict=True) if value not in (None, b"", b"0")}
        indexed = self._members("detached") if asked else set()
        if new := found.keys() - indexed:
            self._command("SADD", f"{PREFIX}:detached", *sorted(new))
        if gone := (indexed & set(asked)) - found.keys():
            self._command("SREM", f"{PREFIX}:detached", *sorted(gone))
        return found

    def _members(self, key: str) -> set[str]:
        return {name.decode() for name in self._command("SMEMBERS", f"{PREFIX}:{key}")}

    # -- commands -------------------------------------------------------------------------------------------------
    def _now_s(self) -> float:
        seconds, microseconds = self._on("clock", "members")
        return int(seconds) + int(microseconds) / 1e6

    def _on(self, script: str, key: str, *arguments: str | bytes | float) -> Any:
        return self._ask(self._scripts[script], (f"{PREFIX}:{key}",), arguments)

    def _together(self, commands: list[tuple[str, ...]]) -> list[Any]:
        """Return the answers to commands on one key each, sent at once."""
        if not commands:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(self._ask(pipeline.execute))


def _scored(found: list[Any]) -> dict[str, float]:
    """Return members with their scores, whichever version of the protocol the answer is of."""
    pairs = found if found and isinstance(found[0], list | tuple) else list(zip(found[::2], found[1::2], strict=True))
    return {name.decode(): float(score) for name, score in pairs}


@lru_cache
def _scripts() -> dict[str, str]:
    parts = re.split(
        r"^-- name: (\w+)$", files("tasuki.coords").joinpath("lua", "scheduler.lua").read_text("utf-8"), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))
