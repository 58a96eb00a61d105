"""The one script of the Redis store, made of the files in `lua/`, and the session that runs it: a turn is one call of the script.

Before the files come the values that must not be written twice: the transition table and the numbers of `core.lifecycle`, the
fields of a job, the app's prefix, and the spec of outsiders' jobs (docs/decisions/0032-redis-store.md).

Verbs that are called one by one inside `with store.turn():` need their answers before the turn is over. Each time, the script
does the whole turn so far and rolls it back (`try`); at the end the turn is done for good if the answers are still those that
were given out (`commit`), else it is a conflict, to be tried again from the start. Whole turns, which are the rule, are done at
once (`run`).

Every turn has a number, which the script stores with the answers. If the connection breaks before the answer has come, `recall`
finds out by it whether the turn was done, and if not, makes sure that it never will be: the lost call may still be on its way to
Redis.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Generic, NamedTuple, TypeVar

import redis

from tasuki.core.apps import WORDS
from tasuki.core.job import (
    JOB_ID_MAX_CHARS,
    JOB_ID_RULE,
    LEASED,
    PRIORITY_MAX,
    READY,
    RESERVED_JOB_ID,
    TERMINAL,
    JobSpec,
    State,
)
from tasuki.core.lifecycle import LEASE_MARGIN_S, RESUMED, RETRY_DELAY_MAX_S, TAKEOVER_TIE_S, TRANSITIONS
from tasuki.core.pauses import PAUSES_MAX
from tasuki.core.statistics import COUNTED, ROLLUP_DAYS
from tasuki.core.store_messages import JobKind
from tasuki.errors import ConfigError, InterruptCause, StaleEpoch, TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.common import GENERATIONS_BEGIN_AT, REMEMBERED_GROUPS_MAX
from tasuki.stores.redis.codec import RARE, SHARED_TYPES, Argument, JobRecord, Reply, SpecFacts, read_fields, template_value
from tasuki.stores.redis.connection import translate
from tasuki.stores.store import Clock

logger = logging.getLogger("tasuki.store")

T = TypeVar("T")

_FIELDS_AT_ONCE = 15  # and the id
_LIST_HEAD_BYTES = 3  # of a msgpack list of 16 elements or more

MARK_TTL_S = 86_400  # how long the last turn of a closed store is remembered; a lost answer is asked for within seconds

SHARED = ("keys", "rules", "turn")
"""Files of `lua/` that the others use, in this order; each may use those before it."""

PARTS = (
    "blobs",
    "caches",
    "queues",
    "walks",
    "jobs",
    "attempts",
    "outsiders",
    "submit",
    "lease",
    "report",
    "leader",
    "reads",
    "tokens",
)
"""Files that fill the tables declared in turn.lua, each in a block of its own: Lua allows 200 locals in one block."""

Literal = str | bytes | int | float | Mapping[str, "Literal"]


@lru_cache
def _lua(name: str) -> str:
    return files("tasuki.stores.redis").joinpath("lua", f"{name}.lua").read_text("utf-8")


def rules_script(body: str) -> str:
    """Return a script of the rules alone with a body that uses them, for tests."""
    return f"{_constants()}\n{_lua('rules')}\n{body}"


def script(app: str, template: JobSpec, result_ttl_s: int) -> str:
    """Return the whole script of one app. Jobs that outsiders make are as the template, but for job_id and payload."""
    spec, (priority, group, kind, subject) = template_value(template, f"app:{app}")
    own: Literal = {"spec": spec, "subject": subject, "group": group, "kind": kind, "priority": priority}
    head = f"local APP, RESULT_TTL_S = {_literal(app)}, {result_ttl_s}\nlocal OWN = {_literal(own)}"
    parts = [f"do\n{_lua(name)}end" for name in PARTS]
    return "\n".join([_constants(), _records(), head, *map(_lua, SHARED), *parts, _lua("main")])


def _constants() -> str:
    tables: dict[str, Literal] = {
        "TRANSITIONS": {
            state.value: {event.value: target.value for (source, event), target in TRANSITIONS.items() if source is state}
            for state in State
        },
        "READY": _set(READY),
        "LEASED": _set(LEASED),
        "TERMINAL": _set(TERMINAL),
        "COUNTED": {state.value: name for state, name in COUNTED.items()},
        "WORDS": {str(state): word for state, word in WORDS.items()},
        "RESUMED": RESUMED,
        "LEASE_MARGIN_S": LEASE_MARGIN_S,
        "TAKEOVER_TIE_S": TAKEOVER_TIE_S,
        "RETRY_DELAY_MAX_S": RETRY_DELAY_MAX_S,
        "PRIORITY_MAX": PRIORITY_MAX,
        "LOCAL_COMMAND": str(JobKind.LOCAL_COMMAND.value),
        "REMEMBERED_GROUPS_MAX": REMEMBERED_GROUPS_MAX,
        "GENERATIONS_BEGIN_AT": GENERATIONS_BEGIN_AT,
        "MARK_TTL_S": MARK_TTL_S,
        "ROLLUPS_KEPT_S": ROLLUP_DAYS * 86_400,
        "PAUSES_MAX": PAUSES_MAX,
        "JOB_ID_MAX_CHARS": JOB_ID_MAX_CHARS,
        "JOB_ID_RULE": JOB_ID_RULE,
        "RESERVED_JOB_ID": RESERVED_JOB_ID,
        "SHARED_TYPES": SHARED_TYPES,
    }
    return "\n".join(f"local {name} = {_literal(value)}" for name, value in tables.items())


def _records() -> str:
    """Return the Lua functions that convert a job's record to a table and back, and the list of its facts to a table."""
    names = JobRecord.__struct_fields__
    hot = [name for name in names if name != "rare"]
    # A table that is made with more than 16 fields is made for 32: most jobs have few of them at a time.
    fields, late = hot[:_FIELDS_AT_ONCE], hot[_FIELDS_AT_ONCE:]
    packed = ", ".join("rare or false" if name == "rare" else f"job.{name} or false" for name in names)
    facts = ", ".join(f"{name} = row[{number}] or nil" for number, name in enumerate(SpecFacts.__struct_fields__, 1))
    return f"""
local RARE = {_literal(dict.fromkeys(RARE, 1))}
-- Without a table for the list itself: the elements after its head ({_LIST_HEAD_BYTES} bytes) are read one by one.
local function read_record(id, packed)
  local _, {", ".join(names)} = cmsgpack.unpack_limit(packed, {len(names)}, {_LIST_HEAD_BYTES})
  local job = {{ id = id, {", ".join(f"{name} = {name} or nil" for name in fields)} }}
  {"; ".join(f"if {name} then job.{name} = {name} end" for name in late)}
  if rare then
    for name, value in pairs(rare) do
      job[name] = value
    end
    job.has_rare = true
  end
  return job
end
local record = {{ {", ".join(["false"] * len(names))} }} -- one list for all that are packed
local function pack_record(job, rare)
  {", ".join(f"record[{number}]" for number in range(1, len(names) + 1))} = {packed}
  return cmsgpack.pack(record)
end
local function read_facts(row)
  return {{ {facts} }}
end
"""


def _set(states: Iterable[State]) -> dict[str, Literal]:
    return {state.value: 1 for state in sorted(states)}


def _literal(value: Literal) -> str:
    """Return the value as a Lua literal."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"[{_literal(name)}] = {_literal(part)}" for name, part in value.items()) + " }"
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return '"' + "".join(f"\\{byte:03d}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte) for byte in value) + '"'
    return repr(value)


# ---------------------------------------------------------------------------------------------------- the session

Clocks = tuple[Argument, Argument]

NO_CLOCKS: Clocks = ("", "")


class ScriptCall(NamedTuple, Generic[T]):
    """One verb with its arguments, and the decoder of its answer."""

    verb: str
    arguments: Sequence[Argument]
    decode: Callable[[Reply], T]
    reads: bool = False
    leads: bool = False
    """True for a verb that carries an epoch, and may be refused."""


def _twice(look: Callable[[], T]) -> T:
    """Call `look`, once more if the connection was lost before an answer could be expected."""
    try:
        return look()
    except TurnInterrupted as error:
        if error.why is not InterruptCause.CONNECTION or isinstance(error.__cause__, redis.TimeoutError):
            raise
        return look()


class RedisSession:
    """One store's connection and its numbered turns; used by one thread at a time."""

    def __init__(self, client: redis.Redis, where: str, script: str, clock: Clock | None) -> None:
        self._client: Any = client  # its execute_command has no types
        self._where = where
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._number = 0
        self.notes: tuple[list[bytes], list[bytes]] | None = ([], [])
        """Notes of the last turn: subject and kind of the queues that jobs came back to, and positions of lease requests that
        were cut short. None: not known."""

    def close(self) -> None:
        self._client.close()

    def time(self) -> float:
        seconds, microseconds = self._command("TIME")
        return int(seconds) + int(microseconds) / 1e6

    def check_records(self, app: str) -> None:
        """Raise ConfigError if the oldest job was written by a version of tasuki whose records have other fields."""
        oldest = [
            self._command("GET", f"{app}:job:{job_id.decode()}") for job_id in self._command("ZRANGE", f"{app}:jobs", "0", "0")
        ]
        found = [len(read_fields(packed)) for packed in oldest if packed]
        if found not in ([], [len(JobRecord.__struct_fields__)]):
            raise ConfigError(
                f"{self._where}: the jobs of app {app!r} were written by another version of tasuki, with other records; "
                "let that version end them, or use another database or --app"
            )

    # -- turns ----------------------------------------------------------------------------------------------------
    def look(self, call: ScriptCall[T]) -> T:
        """Call a verb that only reads. Harmless twice: a connection that broke while it idled is made again at once."""
        calls: list[ScriptCall[Any]] = [call]
        _, [answer], notices, *_ = _twice(lambda: self._send("look", calls, self._clocks()))
        self._log(notices)
        return call.decode(answer)

    def fields_of(self, name: str, listed_in: str, member: str) -> tuple[list[bytes], bool]:
        """Return (field, value, …) of a hash, and whether a set has the member; repeated likewise. A key of another type, which
        only an outsider can have written, counts as empty."""
        fields, is_member = _twice(lambda: self._pipeline(("HGETALL", name), ("SISMEMBER", listed_in, member)))
        for answer in (fields, is_member):
            if isinstance(answer, redis.ResponseError) and not str(answer).startswith("WRONGTYPE"):
                raise self._error(answer)
        found: dict[bytes, bytes] = {} if isinstance(fields, redis.ResponseError) else fields
        return [part for pair in found.items() for part in pair], is_member == 1

    def _pipeline(self, *commands: tuple[str, ...]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except redis.RedisError as error:
            raise self._error(error) from error
        return answers

    def _command(self, *parts: str) -> Any:
        try:
            return self._client.execute_command(*parts)
        except redis.RedisError as error:
            raise self._error(error) from error

    def run(self, calls: Sequence[ScriptCall[Any]], done: Callable[[list[Reply]], None]) -> None:
        """Call all of them in one transaction. `done` gets the answers, also if they are found only when the turn is recalled."""
        self._number += 1
        clocks = self._clocks()
        mode = "lead" if len(calls) > 1 and any(call.leads for call in calls) else "run"
        done(self._run_once(mode, calls, clocks, "", done))

    def attempt(
        self, calls: Sequence[ScriptCall[Any]], before: Sequence[Reply], clocks: Clocks | None
    ) -> tuple[list[Reply], str, Clocks]:
        """Return what the answers would be, their digest, and the clocks that they were made by.

        `before` are the answers that were given out already.
        """
        _, answers, digest, lease_clock, wall_clock = self._send("try", calls, clocks or self._clocks())
        if answers[:-1] != before:
            raise self._conflict()
        return answers, digest.decode(), (lease_clock, wall_clock)

    def commit(self, calls: Sequence[ScriptCall[Any]], clocks: Clocks, digest: str) -> None:
        """Do the turn that was tried, or nothing if the answers would differ now."""
        self._number += 1
        self._run_once("commit", calls, clocks, digest, lambda _: None)

    def _run_once(
        self, mode: str, calls: Sequence[ScriptCall[Any]], clocks: Clocks, digest: str, done: Callable[[list[Reply]], None]
    ) -> list[Reply]:
        number = self._number

        def was_stored() -> bool:
            verdict, *answers = self._send("recall", calls, clocks, number=number)
            self.notes = None
            if verdict == b"done":
                done(answers[0])
            return bool(verdict == b"done")

        verdict, *answers = self._send(mode, calls, clocks, digest, number=number, was_stored=was_stored)
        if verdict == b"changed":
            raise self._conflict()
        if verdict == b"void":
            raise Unavailable(f"{self._where}: this turn was abandoned before; nothing was stored")
        found: list[Reply] = answers[0]
        self._log(answers[1])
        self.notes = (answers[2], answers[3])
        return found

    def _log(self, notices: Sequence[bytes]) -> None:
        for notice in notices:
            logger.warning("%s: %s", self._where, notice.decode())

    def _conflict(self) -> TurnInterrupted:
        return TurnInterrupted(
            f"{self._where}: another server changed what this turn had seen; nothing was stored", InterruptCause.CONFLICT
        )

    # -- calls ----------------------------------------------------------------------------------------------------
    def _clocks(self) -> Clocks:
        return NO_CLOCKS if self._clock is None else (self._clock.lease(), self._clock.wall())

    def _send(
        self,
        mode: str,
        calls: Sequence[ScriptCall[Any]],
        clocks: Clocks,
        digest: str = "",
        *,
        number: int = 0,
        was_stored: Callable[[], bool] | None = None,
    ) -> list[Reply]:
        arguments: list[Argument] = [mode, self._name, number, *clocks, digest, len(calls)]
        for call in calls:
            arguments += (call.verb, len(call.arguments))
            arguments += call.arguments
        execute: Callable[..., list[Reply]] = self._client.execute_command
        try:
            try:
                reply = execute("EVALSHA", self._sha, 0, *arguments)
            except redis.exceptions.NoScriptError:  # a new server, or one that was restarted
                reply = execute("EVAL", self._script, 0, *arguments)
        except redis.RedisError as error:
            raise self._error(error, was_stored) from error
        if reply[0] == b"stale":
            raise StaleEpoch(f"this epoch does not lead, {int(reply[1])} does ({reply[2].decode() or 'nobody'}); step down")
        return reply

    def _error(self, error: redis.RedisError, was_stored: Callable[[], bool] | None = None) -> TasukiError:
        translated = translate(error, self._where, was_stored)
        if isinstance(translated, TurnInterrupted):
            # The server may be a replica now, or its answer may still come and be taken for the next one.
            self._client.connection_pool.disconnect()
        return translated
