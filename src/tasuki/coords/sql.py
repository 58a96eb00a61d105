"""Coordination in PostgreSQL, on a connection of its own: neither a long turn of the store nor a full pool delays a beat.

Touches the tables tasuki_member, tasuki_scopelease and tasuki_detached, and no Django: the models that make them are in
`tasuki/django/models.py`. The statements are in `statements/coordination.sql`. psycopg is imported when the first object is made.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tasuki.coords.coordination import (
    FORGET_AFTER_S,
    FORGET_BATCH,
    LEADER,
    LEADER_DETACH_S,
    TIMEOUT_SHARE,
    ClusterMember,
    Coordination,
    LiveMember,
    View,
    check_ttl,
)
from tasuki.core.address import with_deadlines, without_secrets
from tasuki.core.election import LOCK_TTL_MAX_S, LOCK_TTL_S, Busy, Locked
from tasuki.errors import ConfigError, TasukiError, Unavailable

if TYPE_CHECKING:
    import psycopg

CLOSE_TIMEOUT_S = 1.0

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_SESSION = b"""SELECT set_config('statement_timeout', %(ms)s, false), set_config('lock_timeout', %(ms)s, false),
set_config('idle_in_transaction_session_timeout', %(ms)s, false)"""


class SqlCoordination(Coordination):
    """Coordination in PostgreSQL. `url` is an address of libpq (`postgresql://…`); `ttl_s` is that of the locks to be taken."""

    def __init__(self, url: str, *, ttl_s: float = LOCK_TTL_S) -> None:
        self._url = url
        self._mutex = threading.Lock()
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._closed = False
        self.set_lock_ttl(ttl_s)

    def set_lock_ttl(self, ttl_s: float) -> None:
        with self._mutex:
            self._parameters = _parameters(self._url, TIMEOUT_SHARE * ttl_s)
            self._timeout_ms = str(int(TIMEOUT_SHARE * ttl_s * 1000))
            self._drop()

    # -- members --------------------------------------------------------------------------------------------------
    def beat(self, me: ClusterMember, *, seen: Mapping[str, int]) -> View:
        mine = {"member_id": me.member_id, "incarnation": me.incarnation, "version": me.version}
        if not self._change("beat_again", mine):
            self._change("beat_anew", {**mine, "kind": me.kind, "schema_version": me.schema_version, "info": me.info})
        self._change("forget", {"forget_after_s": FORGET_AFTER_S, "limit": FORGET_BATCH})
        degraded = me.led_ago_s is not None and self._change("degraded", {}) == 1
        if me.led_ago_s is not None:
            self._change("led", {"led_ago_s": me.led_ago_s})
        detached = self._rows("detached", {})
        detached_by_leader = frozenset(name for name, actor in detached if actor == LEADER)
        seen_s = next((age for (age,) in self._rows("leader_seen", {})), None)
        return View(tuple(self.live(seen)), frozenset(name for name, _ in detached), degraded, seen_s, detached_by_leader)

    def live(self, seen: Mapping[str, int] = MappingProxyType({})) -> list[LiveMember]:
        """Return the live members; by whoever is none of them, too."""
        known = {"seen_ids": list(seen), "seen_versions": list(seen.values()), "timeout_s": self.member_timeout_s}
        return [LiveMember(*row) for row in self._rows("live", known)]

    def heartbeat_ages(self) -> dict[str, float]:
        return dict(self._rows("heartbeat_ages", {}))

    def leave(self, member_id: str, incarnation: str) -> None:
        self._change("leave", {"member_id": member_id, "incarnation": incarnation})

    # -- the leader's lock ----------------------------------------------------------------------------------------
    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int) -> Locked | Busy:
        check_ttl(ttl_s)
        asked = {"scope": scope, "holder": holder, "ttl_s": ttl_s, "floor": floor, "lock_max_s": LOCK_TTL_MAX_S}
        if won := self._rows("acquire", asked):
            return Locked(won[0][0])
        # A second statement: the lock may have been given back meanwhile, and then there is no holder.
        found = self._rows("holder", {"scope": scope})
        return Busy(found[0][0], max(0.0, found[0][1])) if found else Busy("", 0.0)

    def _set_expiry(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        lock = {"scope": scope, "holder": holder, "epoch": epoch, "ttl_s": ttl_s, "lock_max_s": LOCK_TTL_MAX_S}
        return self._change("set_expiry", lock) == 1

    def degrade(self) -> None:
        self._change("degrade", {})

    # -- workers that get no more work ----------------------------------------------------------------------------
    def set_detached(self, worker_id: str, detached: bool, *, actor: str, reason: str = "") -> bool:
        row = {"worker_id": worker_id, "actor": actor, "reason": reason, "leader": LEADER}
        if detached and actor == LEADER:
            self._change("forget_detached_by_leader", {"actor": LEADER, "kept_s": LEADER_DETACH_S})
        return self._change("detach" if detached else "attach", row) == 1

    def detached(self) -> frozenset[str]:
        return frozenset(row[0] for row in self._rows("detached", {}))

    # -- the connection -------------------------------------------------------------------------------------------
    def close(self) -> None:
        self._closed = True
        # A call that hangs on a frozen database is not waited for: the connection then ends with its thread or the process.
        if self._mutex.acquire(timeout=CLOSE_TIMEOUT_S):
            try:
                self._drop()
            finally:
                self._mutex.release()

    def shared_connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return the connection, for quick reads of another thread of the same process. It may be another one after an error."""
        import psycopg

        with self._mutex:
            if self._closed:
                raise psycopg.OperationalError("this coordination was closed")
            return self._connected()

    def _rows(self, name: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        return self._execute(_statements()[name], values)[0]

    def _change(self, name: str, values: Mapping[str, object]) -> int:
        """Execute a statement and return how many rows it changed."""
        return self._execute(_statements()[name], values)[1]

    def _execute(self, statement: bytes, values: Mapping[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
        import psycopg

        with self._mutex:
            if self._closed:
                raise Unavailable("this coordination was closed; make a new one")
            try:
                with self._connected().execute(statement, values) as cursor:
                    return (cursor.fetchall() if cursor.description else []), cursor.rowcount
            except psycopg.Error as error:
                # Only the text is kept, without secrets; the cause would show them in every traceback.
                raise self._translate(error) from None

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        if self._connection is None or self._connection.closed:
            # No prepared statements: they would break behind a pooler, and at one call a second save nothing.
            self._connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
            self._connection.execute(_SESSION, {"ms": self._timeout_ms})
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        # Another thread may be reading on it; if that hangs, the connection ends with the process.
        if connection is not None and connection.lock.acquire(timeout=CLOSE_TIMEOUT_S):
            try:
                connection.close()
            finally:
                connection.lock.release()

    def _translate(self, error: psycopg.Error) -> TasukiError:
        from psycopg import errors

        if not isinstance(error, errors.QueryCanceled | errors.LockNotAvailable):
            self._drop()
        text = without_secrets(str(error), self._parameters)
        if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
            return ConfigError(f"the database lacks tasuki's tables ({text}); run: tasuki migrate")
        if isinstance(error, errors.InsufficientPrivilege):
            return ConfigError(f"the database user may not work on tasuki's tables: {text}")
        return Unavailable(f"coordination: {text or type(error).__name__}")


@lru_cache
def _statements() -> dict[str, bytes]:
    text = files("tasuki.coords").joinpath("statements", "coordination.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    return {name: block.replace("{now}", _NOW).encode() for name, block in zip(parts[::2], parts[1::2], strict=True)}


def _parameters(url: str, timeout_s: float) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return with_deadlines(conninfo_to_dict(url), timeout_s)
    except psycopg.ProgrammingError:
        # libpq's own text quotes the address, password included.
        raise ConfigError("the address of the database is not understood; use postgresql://user@host:5432/database") from None
