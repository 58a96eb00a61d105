"""What PostgreSQL's errors mean to us. Pure: reads only the error, and the parameters of the connection to name it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psycopg

from tasuki.core.conninfo import without_secrets
from tasuki.errors import ConfigError, DiskFull, InterruptCause, TasukiError, TurnInterrupted, Unavailable

CONFLICTS = frozenset({"40001", "40P01"})  # serialization failure, deadlock
TIMEOUTS = frozenset({"57014", "55P03"})  # statement_timeout, lock_timeout
LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300"})
"""The server shuts down, crashed, starts up or ended our session; it is a standby now; it has no connection left for us."""
STALE_PLANS = frozenset({"0A000", "26000"})
"""A statement that was prepared before another server changed the tables; with a new connection it is prepared anew."""
REFUSED = frozenset({"28000", "28P01", "3D000", "42501"})
_REFUSALS = ("password", "authentication failed", "pg_hba.conf", "does not exist", "permission denied", "no password supplied")
"""While connecting the driver has no code for us, only the server's words."""


def name_of(given: Mapping[str, object]) -> str:
    """The database as people know it: never the password."""
    host = given.get("host") or given.get("hostaddr") or given.get("service") or "the local socket"
    port = given.get("port")
    return f"PostgreSQL at {host}{f':{port}' if port else ''}, database {str(given.get('dbname') or '')!r}"


def driver_error(error: BaseException) -> psycopg.Error | None:
    """The driver's own error; Django wraps some of them in classes of its own."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, psycopg.Error):
            return candidate
    return None


def is_lost(error: psycopg.Error, connection: psycopg.Connection[object] | None) -> bool:
    """The connection cannot be used any more."""
    code = error.sqlstate or ""
    return connection is None or connection.closed or code in LOST or code in STALE_PLANS or code.startswith("08")


def translate(error: psycopg.Error, fate: str, given: Mapping[str, object], *, lost: bool) -> TasukiError:
    """Ours for theirs. `lost`: the connection is gone with it."""
    where = name_of(given)
    code = error.sqlstate or ""
    said = without_secrets(str(error), given) or type(error).__name__
    if code in REFUSED or (not code and any(word in said for word in _REFUSALS)):
        return ConfigError(f"{where}: {said}; check user, password, database and rights")
    if code == "53100":
        return DiskFull(f"the disk of {where} is full; {fate}, try again when there is space")
    if code in CONFLICTS:
        return TurnInterrupted(f"{where}: {said}; {fate}", InterruptCause.CONFLICT)
    if code in TIMEOUTS:
        return TurnInterrupted(f"{where} took too long: {said}; {fate}", InterruptCause.TIMEOUT)
    if lost:
        return TurnInterrupted(f"{where} cannot be reached: {said}; {fate}", InterruptCause.CONNECTION)
    return Unavailable(f"{where} cannot be used: {said}; {fate}")


class Translated:
    """`with …translated():` turns errors of the driver into ours. `after_error` says whether the connection is lost with one."""

    def __init__(self, given: Mapping[str, object], fate: str, after_error: Callable[[psycopg.Error], bool]) -> None:
        self._given = given
        self._fate = fate
        self._after_error = after_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, TasukiError):
            return
        if (theirs := driver_error(error)) is not None:
            raise translate(theirs, self._fate, self._given, lost=self._after_error(theirs)) from error
