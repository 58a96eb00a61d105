"""PostgreSQL under the SQL store: opening, settings, transactions with their marks, reconnecting.

A writer's turn is one transaction on one connection. Before its first write it puts the number of the turn into its own row of
`TurnMark`, and so holds that row until the transaction has ended, however it ends. If the connection breaks, the next one asks
for that row: it waits until the old transaction is over, and then knows whether it was committed. Nothing of a turn whose
connection broke before the commit was stored; the turn is tried again as a whole (`batching.py`).

Time is the database's: `clock_timestamp()`, read once when a turn begins.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psycopg

from tasuki.core.address import Address, with_deadlines
from tasuki.core.election import LOCK_TTL_S
from tasuki.errors import ConfigError, InterruptCause, TurnInterrupted, Unavailable
from tasuki.stores.sql.database import NOT_KNOWN, NOTHING_STORED, InDjango
from tasuki.stores.sql.postgres_ready import ReadySession
from tasuki.stores.sql.postgres_session import PostgresSession, Translated, is_lost, name_of, translate
from tasuki.stores.store import Feature

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("tasuki.store")

FEATURES = frozenset({Feature.FIND_TEXT, Feature.DURABLE, Feature.SHARED, Feature.DEFINITIONS})
SHARDS = 64
VERSION_MIN = 130_000
TIMEOUT_S = 4.0  # of a statement, of a lock, of a pause inside a transaction
TIMEOUT_SHARE = 0.4  # of the leader lock's ttl: a frozen leader's transaction must not keep the next one from taking over
CONNECT_TIMEOUT_S = 2  # closing the store waits for no more than this
READ_TIMEOUT_S = 10.0
MARK_KEPT_S = 7 * 86_400.0  # how long the mark of a writer that is gone is kept

# All statements are look-ups by index, whatever the statistics of a table say that was empty a minute ago: so the planner is
# left no other choice, and plans once for each statement.
PLANNING = {
    "jit": "off",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}
PREPARED_MAX = 1_000  # more than there are statements: none is ever prepared twice
_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"
# Explicit, since a database may have another default, with which statements would not see what they waited for.
_BEGIN = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {_NOW}"


class DatabaseClock:
    """Both clocks of a store whose time is its database's. It is frozen in a turn, and runs on between turns."""

    def __init__(self) -> None:
        self._at = time.time()
        self._since = time.monotonic()
        self.is_frozen = False

    def set(self, at: float) -> None:
        """Set the clock to what the database answered just now."""
        self._at, self._since = at, time.monotonic()

    def lease(self) -> float:
        return self._at if self.is_frozen else self._at + time.monotonic() - self._since

    wall = lease


class PostgresDatabase:
    """One connection that Django made, connected again when it is lost; used by one thread at a time, any thread."""

    features = FEATURES

    def __init__(self, url: str, *, shard: int | None = None, lock_ttl_s: float = LOCK_TTL_S, migrates: bool = True) -> None:
        from django.db import connections

        from tasuki.django import standalone

        self._given = connection_parameters(url)
        self._timeout = f"{int(1000 * min(TIMEOUT_S, TIMEOUT_SHARE * lock_ttl_s))}ms"
        self.shard = secrets.randbelow(SHARDS) if shard is None else shard
        self.clock = DatabaseClock()
        self._writer = secrets.token_hex(16)
        self._number = 0
        self._is_marked = False
        self._session: ReadySession | None = None
        self._is_open = True
        standalone.configure()
        self._alias = standalone.register_postgresql({"target_session_attrs": "read-write", **self._given})
        self._wrapper: BaseDatabaseWrapper = connections[self._alias]
        self._wrapper.inc_thread_sharing()
        try:
            with self.translated():
                self._open(migrates)
        except BaseException:
            self.close()
            raise

    def _open(self, migrates: bool) -> None:
        from tasuki.django import standalone

        self._wrapper.ensure_connection()
        check_server(self._wrapper.connection, name_of(self._given))
        if migrates:
            standalone.migrate(self._alias)
        else:
            standalone.check_tables(self._alias)
        check_rights(self._wrapper.connection, name_of(self._given))
        self._start_session()
        self.connection.execute(
            "DELETE FROM tasuki_turnmark WHERE writer IN (SELECT writer FROM tasuki_turnmark"
            " WHERE at < extract(epoch FROM clock_timestamp()) - %s FOR UPDATE SKIP LOCKED)",
            (MARK_KEPT_S,),
        )
        self._read_mark()
        self.begin()  # sets the clock
        self.commit()

    # -- the connection -------------------------------------------------------------------------------------------
    @property
    def connection(self) -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = self._wrapper.connection
        return connection

    @property
    def session(self) -> ReadySession:
        if self._session is None:
            if not self._is_open:
                raise Unavailable("the store is closed")
            self._wrapper.connect()
            self._start_session()
            assert self._session is not None
        return self._session

    def _start_session(self) -> None:
        settings = {
            **PLANNING,
            "statement_timeout": self._timeout,
            "lock_timeout": self._timeout,
            "idle_in_transaction_session_timeout": self._timeout,
        }
        apply_settings(self.connection, settings)
        self.connection.prepared_max = PREPARED_MAX
        self._control = psycopg.RawCursor(self.connection)
        self._session = ReadySession(self.connection, before_write=self._mark)

    def rest(self) -> None:
        """Close the connection between turns; the next turn connects again."""
        self._drop_connection()

    def _drop_connection(self) -> None:
        from django.db import DatabaseError

        self._session = None
        with contextlib.suppress(psycopg.Error, DatabaseError):
            self._wrapper.close()

    # -- transactions ---------------------------------------------------------------------------------------------
    def begin(self, *, lasting: bool = True) -> None:
        _ = self.session  # connected
        self._is_marked = False
        self._control.execute(_BEGIN, prepare=False)
        self._control.nextset()
        [[now]] = self._control.fetchall()
        self.clock.set(now)
        self.clock.is_frozen = True

    def _mark(self) -> None:
        """Write the turn's number into the mark, before the first write of a turn."""
        if not self._is_marked and self.clock.is_frozen:
            self._is_marked = True
            self._number += 1
            assert self._session is not None
            self._session.change("mark", (self._writer, self._number, self.clock.wall()))

    def commit(self) -> None:
        try:
            self._control.execute("COMMIT", prepare=False)
        except psycopg.Error as error:
            if self._is_marked and is_lost(error, self.connection):
                self._drop_connection()
                number = self._number
                cause = translate(error, NOT_KNOWN, self._given, lost=True)
                raise TurnInterrupted(cause.message, InterruptCause.CONNECTION, lambda: self._was_stored(number)) from error
            raise
        if self._control.statusmessage != "COMMIT":
            raise Unavailable(f"{name_of(self._given)} rolled the turn back; {NOTHING_STORED}")
        self.clock.is_frozen = False

    def _was_stored(self, number: int) -> bool:
        """Return whether that turn was committed; waits until it is decided."""
        with self.translated(NOT_KNOWN):
            _ = self.session
            return self._read_mark() == number

    def _read_mark(self) -> int:
        """Return the number of this writer's last committed turn. Also makes the row, so that there is one to wait for."""
        assert self._session is not None
        [[number]] = self._session.rows("last_mark", (self._writer,))
        return int(number)

    def rollback(self) -> None:
        self.clock.is_frozen = False
        if self._session is None:
            return
        self._session.rolled_back()
        try:
            self._control.execute("ROLLBACK", prepare=False)
        except psycopg.Error:  # the error that broke the turn was reported already
            self._drop_connection()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        from tasuki.django import standalone

        if self._is_open:
            self._is_open = False
            if self._session is not None:
                with contextlib.suppress(psycopg.Error):  # only tidiness: old marks are deleted after a week
                    self._session.change("forget_mark", (self._writer,))
            self._drop_connection()
            standalone.forget(self._alias)

    def translated(self, fate: str = NOTHING_STORED) -> Translated:
        return Translated(self._given, fate, self._after_error)

    def _after_error(self, error: psycopg.Error) -> bool:
        """Return whether the connection is lost with it."""
        lost = self._wrapper.connection is None or is_lost(error, self.connection)
        if lost:
            self._drop_connection()
        return lost

    def reader(self) -> PostgresReadOnly:
        return PostgresReadOnly(self._given)


class PostgresInDjango(InDjango):
    """A PostgreSQL of the user's own Django project. Its session's settings are not touched, and nothing is tried again."""

    features = FEATURES
    shard = None

    def __init__(self, alias: str = "default") -> None:
        super().__init__(alias)
        self.clock = DatabaseClock()
        self._session: PostgresSession | None = None

    @property
    def session(self) -> PostgresSession:
        """The session on the calling thread's connection, which Django may have made anew."""
        return self.session_on(self.wrapper().connection)

    def session_on(self, connection: psycopg.Connection[Any]) -> PostgresSession:
        if self._session is None or self._session.connection is not connection:
            self._session = PostgresSession(connection, prepare=False)
        return self._session

    def begin(self, *, lasting: bool = True) -> None:
        super().begin()
        [[now]] = psycopg.RawCursor(self.session.connection).execute(_NOW).fetchall()
        self.clock.set(now)
        self.clock.is_frozen = True

    def commit(self) -> None:
        self.clock.is_frozen = False
        super().commit()

    def rollback(self) -> None:
        self.clock.is_frozen = False
        super().rollback()

    def translated(self, fate: str = NOTHING_STORED) -> Translated:
        return Translated(self._parameters, fate, lambda error: is_lost(error, self.wrapper().connection))

    def reader(self) -> PostgresReadOnly:
        return PostgresReadOnly(self._parameters)

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        found = self.wrapper().get_connection_params()
        kept = {name: value for name, value in found.items() if isinstance(value, str | int)}
        return with_deadlines(kept, TIMEOUT_S)


class PostgresReadOnly:
    """A connection that is only read from, for the calling thread; connected again when it was lost.

    `shared` returns a connection that others use too, and close; without it there is one that cannot write.
    """

    def __init__(self, given: dict[str, Any], shared: Callable[[], psycopg.Connection[Any]] | None = None) -> None:
        self._given = given
        self._shared = shared
        self._connection: psycopg.Connection[Any] | None = None
        self._session: PostgresSession | None = None
        with self.translated():
            _ = self.session

    @property
    def session(self) -> PostgresSession:
        if self._session is None:
            self.close()
            self._connection = connection = self._connect()
            self._session = PostgresSession(connection, prepare=True)
        return self._session

    def _connect(self) -> psycopg.Connection[Any]:
        if self._shared is not None:
            connection = self._shared()
            apply_settings(connection, PLANNING)
            return connection
        connection = psycopg.connect(**self._given, autocommit=True)
        connection.prepared_max = PREPARED_MAX
        own = {"statement_timeout": f"{READ_TIMEOUT_S}s", "default_transaction_read_only": "on"}
        apply_settings(connection, {**PLANNING, **own})
        return connection

    def translated(self) -> Translated:
        return Translated(self._given, NOTHING_STORED, self._after_error)

    def _after_error(self, error: psycopg.Error) -> bool:
        lost = is_lost(error, self._connection)
        if lost:
            self.close()
        return lost

    def close(self) -> None:
        self._session = None
        if self._connection is not None:
            if self._shared is None:
                self._connection.close()
            self._connection = None


# ---------------------------------------------------------------------------------------------------- opening


def connection_parameters(url: str) -> dict[str, Any]:
    """Return libpq's parameters of an address that names a database, with those that make a dead peer known soon."""
    given = parse_address(url)
    if not all(port.isdecimal() for port in str(given.get("port") or 0).split(",") if port):  # the driver's words would quote it
        raise ConfigError(f"{name_of(given)}: the port is no number; write postgresql://user:password@host:5432/database")
    if not given.get("dbname") and not given.get("service"):
        raise ConfigError(f"{name_of(given)}: name the database, as in postgresql://user@host:5432/database")
    return with_deadlines({"connect_timeout": CONNECT_TIMEOUT_S, **given}, TIMEOUT_S)


def parse_address(url: str) -> dict[str, Any]:
    """Return libpq's parameters of an address."""
    try:
        return psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # The driver's words may quote the address, with its password.
        raise ConfigError("the address of the store is not one of PostgreSQL: postgresql://user@host:5432/database") from None


def apply_settings(connection: psycopg.Connection[Any], settings: dict[str, str]) -> None:
    """Set parameters for the whole session, in one round trip."""
    wanted = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())
    psycopg.RawCursor(connection).execute(f"SELECT {wanted}", prepare=False)


def check_server(connection: psycopg.Connection[Any], where: str) -> None:
    """ConfigError for a server that cannot work; a warning for settings that may lose acknowledged jobs."""
    info = connection.info
    if info.server_version < VERSION_MIN:
        raise ConfigError(f"{where} is version {info.server_version / 10_000:g}; tasuki needs {VERSION_MIN // 10_000} or newer")
    if (encoding := info.parameter_status("server_encoding")) != "UTF8":
        raise ConfigError(
            f"{where} is encoded in {encoding}; make one with: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if problem := clear_text_problem(info.host, info.get_parameters().get("sslmode", "prefer")):
        logger.warning("%s: %s", where, problem)
    names = ("fsync", "synchronous_commit")
    asked = ", ".join(f"current_setting('{name}')" for name in names)
    found = psycopg.RawCursor(connection).execute(f"SELECT {asked}").fetchone()
    for name, value in zip(names, found or (), strict=True):
        if value == "off":
            logger.warning("%s has %s off: a crash of its machine can lose jobs that were acknowledged", where, name)


def clear_text_problem(host: str, sslmode: str) -> str:
    """Return a warning about a connection to another host that may be without TLS; empty if there is none."""
    if not host or host.startswith(("/", "@")) or Address("tcp", host).loopback or sslmode not in ("disable", "allow", "prefer"):
        return ""
    return f"sslmode={sslmode} lets passwords and jobs go to another host in clear text; add ?sslmode=verify-full to the address"


def check_rights(connection: psycopg.Connection[Any], where: str) -> None:
    """ConfigError unless the user may read and write the tables."""
    rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
    asked = ", ".join(f"has_table_privilege('tasuki_jobrun', '{right}')" for right in rights)
    found = psycopg.RawCursor(connection).execute(f"SELECT {asked}").fetchone()
    missing = [right for right, has in zip(rights, found or (), strict=True) if not has]
    if missing:
        raise ConfigError(
            f"{where}: user {connection.info.user!r} may not {', '.join(missing)} in tasuki's tables; "
            f"GRANT it, or use the user that owns them"
        )
