"""One PostgreSQL connection under the SQL store: runs named statements, encodes their parameters, translates its errors.

Each parameter travels as the type that its statement names, in the binary format. The driver would guess types from the values
(a small number, a large one, None, an empty list: four different statements to prepare), and writes lists element by element in
Python, as text that the server parses again. Here the statement's own casts decide, once, when it is loaded; so every statement
has one form, and a column of 256 texts is one pass and one join.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, islice
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import psycopg
from psycopg import adapt, pq

from tasuki.core.address import shown_place, without_secrets
from tasuki.errors import ConfigError, DiskFull, InterruptCause, TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.sql.database import WALL, Batch, InsertedRows, Parameters, Queues, TranslatedErrors, load_statements

WALK_FIRST = 256  # rows of the first step of a `find`; each further step takes four times as many
TEXTS_MAX = 256
_OWN_COLUMNS = (0, 4, 5)  # job_id, body_hash and spec among the values of `enqueue`: other ones are often those of all jobs
LOOK_AGAIN_MAX = 4  # how often a claim looks further when other servers took the jobs it found; four times as far each time

# ---------------------------------------------------------------------------------------------------- values

Encode = Callable[[Any], bytes]

_HEAD = Struct("!iiIii").pack  # dimensions, whether there are NULLs, type of the elements, their number, first index
_LENGTH = Struct("!i").pack
_NULL = _LENGTH(-1)
_smallint, _integer, _bigint, _float8 = (Struct(code).pack for code in ("!h", "!i", "!q", "!d"))


def _text(value: str) -> bytes:
    data = value.encode()
    # PostgreSQL refuses NUL. Free texts were cleaned of it before; only a made-up name can still have one.
    return data.replace(b"\0", b"\xef\xbf\xbd") if b"\0" in data else data


_TYPES: dict[str, tuple[int, int, Encode]] = {
    # name in casts -> oid, oid of the array, encoder
    "smallint": (21, 1005, _smallint),
    "integer": (23, 1007, _integer),
    "bigint": (20, 1016, _bigint),
    "float8": (701, 1022, _float8),
    "text": (25, 1009, _text),
    "bytea": (17, 1001, bytes),
}
_INFERRED = {int: "bigint", float: "float8", str: "text", bytes: "bytea"}


class Value:
    """A parameter ready to be sent; each type has a subclass. None is NULL."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | None) -> None:
        self.data = data


class _Dumper(adapt.Dumper):
    """Passes the bytes on as they are."""

    format = pq.Format.BINARY

    def dump(self, obj: Value) -> bytes | None:
        return obj.data


class ParameterType(NamedTuple):
    """One type of parameter; called, it makes a value of that type."""

    value: type[Value]
    dumper: type[_Dumper]
    encode: Encode

    def __call__(self, value: Any) -> Value:
        return self.value(None if value is None else self.encode(value))


def _array(oid: int, encode: Encode) -> Encode:
    def encoded(values: Sequence[Any]) -> bytes:
        if not values:
            return _HEAD(0, 0, oid, 0, 0)[:12]
        first, size = values[0], len(values)
        if values.count(first) == size:  # as most columns of jobs that a loop submits
            return _HEAD(1, first is None, oid, size, 1) + (_NULL if first is None else _framed(encode(first))) * size
        if None not in values:
            data = list(map(encode, values))
            parts = chain.from_iterable(zip(map(_LENGTH, map(len, data)), data, strict=True))
            return _HEAD(1, 0, oid, size, 1) + b"".join(parts)
        return _HEAD(1, 1, oid, size, 1) + b"".join([_NULL if value is None else _framed(encode(value)) for value in values])

    return encoded


def _framed(data: bytes) -> bytes:
    return _LENGTH(len(data)) + data


def _kind(name: str, oid: int, encode: Encode) -> ParameterType:
    return ParameterType(
        type(f"Value_{name}", (Value,), {"__slots__": ()}), type(f"Dumper_{name}", (_Dumper,), {"oid": oid}), encode
    )


KINDS: dict[str, ParameterType] = {}
for _name, (_oid, _array_oid, _encode) in _TYPES.items():
    KINDS[_name] = _kind(_name, _oid, _encode)
    KINDS[f"{_name}[]"] = _kind(f"{_name}_array", _array_oid, _array(_oid, _encode))


def register(adapters: adapt.AdaptersMap) -> None:
    """Make a cursor able to send `Value`s."""
    for kind in KINDS.values():
        adapters.register_dumper(kind.value, kind.dumper)


# ---------------------------------------------------------------------------------------------------- statements

_NAMED = re.compile(r"(?<!:):([a-z_0-9]+)")
_TYPED = re.compile(r"\$(\d+)::(\w+(?:\[\])?)")
_NUMBER = re.compile(r"\$(\d+)")
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE)\b")


class Statement(NamedTuple):
    """A statement as PostgreSQL takes it, and the types of its parameters."""

    text: str
    names: tuple[str, ...]
    """Names of the parameters, if they are given by name."""
    kinds: tuple[ParameterType | None, ...]
    """Types of the parameters; None: inferred from the value, which is then never NULL."""
    writes: bool
    """True if it changes rows."""

    def values(self, parameters: Parameters) -> list[Value]:
        if isinstance(parameters, Mapping):
            parameters = [parameters[name] for name in self.names]
        return [(kind or KINDS[_INFERRED[type(value)]])(value) for kind, value in zip(self.kinds, parameters, strict=True)]


def statement_of(text: str) -> Statement:
    names = tuple(dict.fromkeys(_NAMED.findall(text)))
    numbers = {name: number for number, name in enumerate(names, 1)}
    text = _NAMED.sub(lambda found: f"${numbers[found[1]]}", text)
    kinds = {int(number): KINDS[name] for number, name in reversed(_TYPED.findall(text))}
    count = max(map(int, _NUMBER.findall(text)), default=0)
    return Statement(text, names, tuple(kinds.get(number) for number in range(1, count + 1)), _WRITES.search(text) is not None)


@lru_cache
def statements() -> dict[str, Statement]:
    """Return all statements of postgresql.sql that need no further conditions."""
    return {name: statement_of(text) for name, text in load_statements("postgresql").one.items() if "{and}" not in text}


@lru_cache(256)
def find_statement(name: str, conditions: str) -> Statement:
    """Return a statement of `find` with its further conditions; there are few combinations."""
    return statement_of(load_statements("postgresql").one[name].replace("{and}", conditions))


def columns(batch: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the columns of a batch of rows."""
    return list(zip(*batch, strict=True))


# ---------------------------------------------------------------------------------------------------- the session


class PostgresSession:
    """Statements of `statements/postgresql.sql` on one connection. See `database.SqlSession` for what each call promises."""

    def __init__(
        self, connection: psycopg.Connection[Any], *, prepare: bool, before_write: Callable[[], None] | None = None
    ) -> None:
        self.connection = connection
        self._statements = statements()
        self._cursor: psycopg.RawCursor[Any] = psycopg.RawCursor(connection)
        register(self._cursor.adapters)
        self._texts: dict[tuple[Any, ...], str] = {}
        """The statement for one job, by the values that other jobs have as well."""
        self._prepare = prepare
        self._before_write = before_write

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._run(self._statements[name], parameters).fetchall()

    def change(self, name: str, parameters: Parameters = ()) -> int:
        return self._run(self._statements[name], parameters).rowcount

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        return self.change(name, (*shared, *columns(batch))) if batch else 0

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        # By row id: all servers lock rows in this order, so that two never wait for each other in a circle.
        return self.rows(name, (*shared, *columns(sorted(batch, key=itemgetter(0))))) if batch else []

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        """Read in steps, so that a page of fifty does not bring twenty thousand rows over the network."""
        statement = find_statement(name, conditions)
        left, step, high = values["most"], WALK_FIRST, values["high"]
        while left > 0:
            asked = min(left, step)
            found = self._run(statement, {**values, "high": high, "most": asked}).fetchall()
            yield from found
            if len(found) < asked:
                return
            left, step, high = left - asked, step * 4, found[-1][0]

    def _run(self, statement: Statement, parameters: Parameters) -> psycopg.RawCursor[Any]:
        if statement.writes and self._before_write is not None:
            self._before_write()
        return self._cursor.execute(statement.text, statement.values(parameters), prepare=self._prepare or None, binary=True)

    def _enqueue_one(self, job: Sequence[Any]) -> list[Any]:
        """Insert a job by the function, with its values as literals in the text: one message to the server. Where nothing is
        prepared, to parse, bind and describe parameters costs more than the function itself."""
        own = [job[place] for place in _OWN_COLUMNS]
        alike = tuple(value for place, value in enumerate(job) if place not in _OWN_COLUMNS)
        if alike not in self._texts:  # what the jobs of a task have in common is written once
            if len(self._texts) >= TEXTS_MAX:
                self._texts.clear()
            literals = ["%s" if place in _OWN_COLUMNS else self._literal(value) for place, value in enumerate(job)]
            self._texts[alike] = _NUMBER.sub(lambda found: literals[int(found[1]) - 1], self._statements["enqueue_one"].text)
        return self._client_cursor.execute(self._texts[alike], own).fetchall()

    def _literal(self, value: Any) -> str:
        return self._client_cursor.mogrify("%s", (value,)).replace("%", "%%")

    @cached_property
    def _client_cursor(self) -> psycopg.ClientCursor[Any]:
        return psycopg.ClientCursor(self.connection)

    # -- lists as parameters --------------------------------------------------------------------------------------
    def listed(self, values: Sequence[Any]) -> Sequence[Any]:
        return values

    def holders(self, holders: list[tuple[str, str, str]]) -> tuple[list[str], ...]:
        return tuple([holder[place] for holder in holders] for place in range(3))

    def contains(self, column: str) -> str:
        return f"strpos({column}, :text) > 0"

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[InsertedRows]:
        fresh = {row_id for (row_id,) in self.rows(name, (wall, *columns(batch)))}
        yield InsertedRows(len(batch), len(fresh), fresh)

    def enqueue(self, batch: Batch) -> set[int]:
        """Insert the jobs whose ids are new in one statement, and count them in rows that no other transaction changes; return
        their row ids."""
        if len(batch) == 1 and self._has_enqueue_function:
            return {row_id for (row_id,) in self._enqueue_one(batch[0]) if row_id is not None}
        given = columns(batch)
        if all(values.count(values[0]) == len(values) for place, values in enumerate(given) if place not in _OWN_COLUMNS):
            alike = [values if place in _OWN_COLUMNS else values[0] for place, values in enumerate(given)]
            return {row_id for (row_id,) in self.rows("enqueue_alike", alike)}
        return {row_id for (row_id,) in self.rows("enqueue", given)}

    @cached_property
    def _has_enqueue_function(self) -> bool:
        """Return whether migration 0014 was applied: not in a test suite that runs without migrations."""
        [[found]] = self.rows("has_enqueue_function")
        return bool(found)

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        if len(queues.members) == 1:
            place = (queues.priority, queues.group, *queues.members[0], self._floor(queues, 0))
            rows = self.rows("claim_of_queue", (*terms, *place, queues.limit))
            rows.sort(key=itemgetter(0))
            read = {0: [row[0] for row in rows]}
        else:
            read = {}
            rows = self._claim_merged(queues, terms, read)
            rows.sort(key=itemgetter(0))
        if rows:
            for number, ids in read.items():
                self._was_taken(queues, number, ids, rows[-1][0])
        return rows

    def _floor(self, queues: Queues, place: int) -> int:
        """Return the row id up to which nothing is ready in one of the queues."""
        return 0

    def _was_taken(self, queues: Queues, place: int, ids: list[int], highest: int) -> None:
        """Note that the jobs of a queue with these ids are leased, up to `highest`: by this session, or others hold them."""

    def came_back(self, row_id: int) -> None:
        pass

    def _claim_merged(self, queues: Queues, terms: tuple[Any, ...], read: dict[int, list[int]]) -> list[Any]:
        """Claim from several queues; `read` gets the ids that were read from each."""
        oldest = self._oldest_of(queues, terms[WALL], read)
        claimed: list[Any] = []
        for look in range(LOOK_AGAIN_MAX):
            missing = queues.limit - len(claimed)
            # Rows that others are about to lease are skipped, which leaves too few unless there were more to choose from.
            wanted = missing * 4**look
            found = list(islice(oldest, wanted))
            if found:
                claimed += self.rows("claim_of_rows", (*terms, found, missing))
            if len(claimed) == queues.limit or len(found) < wanted:
                break
        return claimed

    def _oldest_of(self, queues: Queues, wall: float, read: dict[int, list[int]]) -> Iterator[int]:
        """Yield the ids of the ready jobs in these queues, oldest first: a merge that reads each queue only as far as it must.

        Each step reads the next few of every queue that may hold the next oldest, and yields the ids that are older than the end
        of all that was read. However the jobs are spread, about limit + (number of queues) entries are read for `limit` yielded.
        """
        seen = [self._floor(queues, place) for place in range(len(queues.members))]
        is_open = [True] * len(queues.members)
        waiting: list[int] = []
        step = max(1, -(-queues.limit // len(queues.members)), min(queues.limit, 2048 // len(queues.members)))
        while True:
            behind = [place for place, more in enumerate(is_open) if more and (not waiting or seen[place] <= waiting[0])]
            for place, ids in self._next_of(queues, behind, seen, step, wall):
                is_open[place] = len(ids) == step
                waiting += ids
                read.setdefault(place, []).extend(ids)
                seen[place] = ids[-1] if ids else seen[place]
            waiting.sort()
            end = min((seen[place] for place, more in enumerate(is_open) if more), default=None)
            oldest = waiting if end is None else [row_id for row_id in waiting if row_id <= end]
            waiting = waiting[len(oldest) :]
            yield from oldest
            if end is None:
                return

    def _next_of(self, queues: Queues, places: list[int], seen: list[int], step: int, wall: float) -> list[tuple[int, list[int]]]:
        found: list[list[int]] = [[] for _ in places]
        behind = columns((*queues.members[place], seen[place]) for place in places)
        parameters = (queues.priority, queues.group, *(behind or [()] * 4), step, wall)
        for number, row_id in self.rows("next_of_queues", parameters):
            found[number - 1].append(row_id)
        return list(zip(places, found, strict=True))

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        return self.returned("finish_plain", (wall,), plain) + self.returned("finish_full", (wall,), full)


# ---------------------------------------------------------------------------------------------------- errors

CONFLICTS = frozenset({"40001", "40P01"})  # serialization failure, deadlock
TIMEOUTS = frozenset({"57014", "55P03"})  # statement_timeout, lock_timeout
LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300"})
"""The server shuts down, crashed, starts up or ended the session; it is a standby now; it has no connection left."""
STALE_PLANS = frozenset({"0A000", "26000"})
"""A statement was prepared before another server changed the tables; a new connection prepares it anew."""
REFUSED = frozenset({"28000", "28P01", "3D000", "42501"})
_REFUSALS = ("password", "authentication failed", "pg_hba.conf", "does not exist", "permission denied", "no password supplied")
"""Words of the server that mean a refusal: while connecting, the driver gives no code."""


def name_of(given: Mapping[str, object]) -> str:
    """Return how messages name the database: never with the password."""
    host = given.get("host") or given.get("hostaddr") or given.get("service") or "the local socket"
    port = given.get("port")
    return f"PostgreSQL at {shown_place(f'{host}:{port}' if port else str(host))}, database {str(given.get('dbname') or '')!r}"


def is_lost(error: psycopg.Error, connection: psycopg.Connection[object] | None) -> bool:
    """Return whether the connection cannot be used any more."""
    code = error.sqlstate or ""
    return connection is None or connection.closed or code in LOST or code in STALE_PLANS or code.startswith("08")


def translate(error: psycopg.Error, fate: str, given: Mapping[str, object], *, lost: bool) -> TasukiError:
    """Return tasuki's error for one of the driver. `lost`: the connection is gone with it."""
    where = name_of(given)
    code = error.sqlstate or ""
    text = without_secrets(str(error), given) or type(error).__name__
    if code in REFUSED or (not code and any(word in text for word in _REFUSALS)):
        return ConfigError(f"{where}: {text}; check user, password, database and rights")
    if code == "53100":
        return DiskFull(f"the disk of {where} is full; {fate}, try again when there is space")
    if code in CONFLICTS:
        return TurnInterrupted(f"{where}: {text}; {fate}", InterruptCause.CONFLICT)
    if code in TIMEOUTS:
        return TurnInterrupted(f"{where} took too long: {text}; {fate}", InterruptCause.TIMEOUT)
    if lost:
        return TurnInterrupted(f"{where} cannot be reached: {text}; {fate}", InterruptCause.CONNECTION)
    return Unavailable(f"{where} cannot be used: {text}; {fate}")


class Translated(TranslatedErrors):
    """Context that turns errors of PostgreSQL into tasuki's. `after_error` says whether an error lost the connection."""

    def __init__(self, given: Mapping[str, object], fate: str, after_error: Callable[[psycopg.Error], bool]) -> None:
        self._given = given
        self._fate = fate
        self._after_error = after_error

    def replacement(self, error: BaseException) -> TasukiError | None:
        cause = error if isinstance(error, psycopg.Error) else error.__cause__
        if not isinstance(cause, psycopg.Error):
            return None
        return translate(cause, self._fate, self._given, lost=self._after_error(cause))
