"""Firing: the runs that a definition gets now, from its nominal times or from events. Pure; stores carry it out.

Theory of operation. A *definition* says what is run, when or upon which events, and how runs follow each other. A *run* is a job
like any other; its id is made of the definition and the nominal time (`d7-1767225600`) or the event (`e12-7`), so that firing
again changes nothing. Only the leader fires, in turns of its own: it reads the definitions as they are committed, plans here,
and writes runs, and its notes on the definition (`FiringState`), in that one transaction. Nothing is decided ahead of its time: a
leader that assigns stores the next run of a definition before (`PlannedRun.ahead`), and at its time that one is judged as if it
were new. If the definition was changed since, it is withdrawn.

**Which times.** `FiringState.fired_until` is the time up to which all nominal times are settled. Later ones up to now are due; so
nothing is missed while no leader is there, and nothing is fired twice. Times that are older than the window (300 s unless the
settings say otherwise) are not run after a long stop: the newest of them leaves one SKIPPED run that says how many there were. If
the schedule was changed, times count from the change on; if the clock was set back, from now on.

**Which runs at once.** forbid: while the last run has not ended, a new one is SKIPPED with STILL_RUNNING. replace: the last one
is canceled, and the new one waits until nothing of it is left (`waits_for`). allow: none of that. A run that waits for its retry
has not ended.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

import msgspec

from tasuki.core.decoding import decodable
from tasuki.core.job import (
    JOB_ID_MAX_CHARS,
    TEXT_MAX_BYTES,
    TIME_END,
    JobSpec,
    Outcome,
    check_name,
    check_nesting,
    check_spec,
    check_text,
    event_run_id,
    run_id,
    type_name,
)
from tasuki.core.lifecycle import JobEvent
from tasuki.core.scheduler.schedule import Schedule, parse_schedule, zone_of
from tasuki.core.subject import check_pattern, check_subject, matches
from tasuki.errors import InvalidInput, TasukiError, TooLarge, quoted

DJANGO_EXEC = "django"
"""Exec that runs a management command of a Django project; its first argument is the name of the command."""
SKIP_LATE_RUNS_AFTER_S = 300.0
SKIP_LATE_RUNS_AFTER_MAX_S = 366 * 86400.0
PROBLEM_RETRY_S = 60.0  # until a definition that cannot be fired is looked at again: it, or a package, may be in order then
RUNS_AT_ONCE = 60  # of one definition in one turn; the next turn continues with the rest
RUNS_PER_TURN = 1024  # of all definitions and events; more wait for the next turn, which comes at once
# Nominal times that a SKIPPED run counts, 16 µs each: after a long stop a turn counts those of 256 definitions, and a transaction
# that computes for 5 s is ended by PostgreSQL.
MISSED_COUNT_MAX = 200
CLOCK_SET_BACK_S = 1.0  # nothing is settled later than now; more than this is no jitter
DEFINITION_NAME_MAX_CHARS = 200
EVENT_PAYLOAD_MAX_BYTES = 64 * 1024
EVENT_ARGUMENT = "--event="


class DefinitionType(enum.StrEnum):
    """Cause of a definition's runs."""

    TIME = "time"
    EVENT = "event"


class ConcurrencyPolicy(enum.StrEnum):
    """Rule for a run that is due while the last one has not ended."""

    FORBID = "forbid"
    ALLOW = "allow"
    REPLACE = "replace"


def default_policy(definition_type: str) -> str:
    """Return the rule that loses nothing: a time may be left out while a run continues, another one comes; an event may not."""
    return (ConcurrencyPolicy.ALLOW if definition_type == DefinitionType.EVENT else ConcurrencyPolicy.FORBID).value


@decodable
class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """A job by time or by event. The fields are columns of the table of definitions."""

    id: int = 0
    name: str
    enabled: bool = True
    type: str = DefinitionType.TIME.value
    event_type: str = ""
    """Pattern of the types of events that it runs upon: a subject, `*` and `>` allowed."""
    command_name: str
    default_args_json: Any = None
    schedule_type: str = ""
    schedule_value: str = ""
    time_zone: str = "UTC"
    queue: str = "default"
    timeout_seconds: int | None = None
    max_retries: int = 3
    retry_backoff_seconds: int = 10
    concurrency_policy: str = ""
    """Empty: `default_policy`."""
    changed_at: float = 0.0
    """Time at which its schedule was last changed, or it was enabled."""

    @property
    def policy(self) -> str:
        """The rule in force."""
        return self.concurrency_policy or default_policy(self.type)

    @property
    def plan(self) -> str:
        """The text by which it is noticed that the nominal times are others now; statements of the SQL store make it too."""
        return f"{self.schedule_type} {self.schedule_value} {self.time_zone}"


class FiringState(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's notes on one definition. A requeue writes them too: it makes a run the last one again."""

    fired_until: float = 0.0
    """All nominal times up to this one are settled."""
    next_at: float | None = None
    """The next nominal time; with a problem, the time of the next look."""
    plan: str = ""
    """`Definition.plan` and `changed_at` when `next_at` was computed."""
    changed_at: float = 0.0
    last_run_id: str = ""
    """The last run that was not skipped."""
    waits_for: str = ""
    """The earlier run that it replaces, until that has ended; then the store makes it ready."""
    problem: str = ""
    """The reason why it cannot be fired."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is not processed yet."""

    id: int
    event_type: str
    payload_json: str = "null"
    created_at: float
    job_definition_id: int | None = None
    """The only definition that it is for: a run that somebody asked for by hand."""


class LastRun(msgspec.Struct, frozen=True):
    """The run that a new one must not overlap, as the store has it."""

    job_id: str
    is_over: bool
    waits_for: str | None = None
    """The earlier run that it waits for, unless that is over."""

    @property
    def open(self) -> str | None:
        """The run that a new one must not overlap: while this one waits, the one that it waits for, also if it never began."""
        return self.waits_for or (None if self.is_over else self.job_id)


class PlannedRun(msgspec.Struct, kw_only=True):
    """A run to be stored. With an `end` it is terminal from the start, and never runs."""

    definition_id: int
    spec: JobSpec
    scheduled_for: float
    waits_for: str | None = None
    end: tuple[JobEvent, Outcome] | None = None
    ahead: bool = False
    """Stored before its time, to be assigned: not ready until it was judged."""

    @property
    def submitter(self) -> str:
        return f"definition:{self.definition_id}"

    @property
    def is_ready(self) -> bool:
        return self.waits_for is None and self.end is None and not self.ahead


class FiringPlan(msgspec.Struct, kw_only=True):
    """Everything that one definition gets in this turn."""

    runs: list[PlannedRun] = msgspec.field(default_factory=list)
    cancel: list[str] = msgspec.field(default_factory=list)
    """Runs that are replaced."""
    last_run_id: str = ""


# ---------------------------------------------------------------------------------------------------- nominal times


class DueTimes(msgspec.Struct, frozen=True):
    """Nominal times to settle now."""

    times: tuple[int, ...] = ()
    missed: int = 0
    """Times before these that are too old to be run; more than MISSED_COUNT_MAX are not counted."""
    newest_missed: int | None = None
    settled_until: float = 0.0
    next_at: int | None = None


def settled_before(definition: Definition, state: FiringState, now: float) -> float:
    """Return the time up to which nominal times need no run."""
    if state.fired_until > now + CLOCK_SET_BACK_S:  # the clock was set back: runs that it has seen already have their ids
        return now
    if state.plan == definition.plan and state.changed_at == definition.changed_at:
        return state.fired_until
    if state.changed_at != definition.changed_at:  # to a time before the last firing, if the clock was set back between the two
        return min(max(state.fired_until, definition.changed_at), now)
    return max(state.fired_until, now - CLOCK_SET_BACK_S)  # the change has no time: it was not made by `save`


def due_times(schedule: Schedule, zone: tzinfo, settled: float, now: float, window_s: float) -> DueTimes:
    """Return the nominal times in (settled, now]: those inside the window, and what is told of older ones."""
    too_old = math.ceil(now - window_s) - 1  # the last second that is outside the window
    missed, newest = 0, None
    at = settled
    if settled < too_old and (newest := schedule.last_until(too_old, zone)) is not None and newest > settled:
        for found in schedule.times(settled, zone):
            missed += 1
            if found >= newest or missed > MISSED_COUNT_MAX:
                break
        at = newest
    times: list[int] = []
    following = schedule.after(at, zone)
    while following is not None and following <= now and len(times) < RUNS_AT_ONCE:
        times.append(following)
        following = schedule.after(following, zone)
    is_complete = following is None or following > now
    return DueTimes(tuple(times), missed, newest if missed else None, now if is_complete else times[-1], following)


# ---------------------------------------------------------------------------------------------------- runs


def stored_ahead(definition_id: int, state: FiringState) -> str | None:
    """Return the id that the next run of the definition has if it was stored ahead of its time."""
    return run_id(definition_id, int(state.next_at)) if state.next_at is not None and not state.problem else None


def runs_of(definition: Definition, due: DueTimes, window_s: float) -> Iterator[PlannedRun]:
    """Yield the runs of these nominal times, without regard to other runs."""
    if due.newest_missed is not None:
        count = f"more than {MISSED_COUNT_MAX}" if due.missed > MISSED_COUNT_MAX else str(due.missed)
        what = "nominal time was" if due.missed == 1 else "nominal times were"
        message = f"{count} {what} missed by more than {window_s:g} s, up to {_text_of(due.newest_missed)}; they are not run"
        yield _planned(definition, due.newest_missed, None, (JobEvent.SKIP, Outcome(error_code="TOO_LATE", message=message)))
    for nominal in due.times:
        yield _planned(definition, nominal, window_s, None)


def _planned(definition: Definition, nominal: int, window_s: float | None, end: tuple[JobEvent, Outcome] | None) -> PlannedRun:
    spec = _spec(
        definition,
        run_id(definition.id, nominal),
        nominal,
        not_before=float(nominal),
        not_after=nominal + window_s if window_s is not None else None,
    )
    return PlannedRun(definition_id=definition.id, spec=spec, scheduled_for=float(nominal), end=end)


def run_ahead(definition: Definition, due: DueTimes, now: float, ahead_s: float, window_s: float) -> PlannedRun | None:
    """Return the run of the next nominal time if that is near enough to be stored now."""
    if due.next_at is None or not now < due.next_at <= now + ahead_s:
        return None
    run = _planned(definition, due.next_at, window_s, None)
    run.ahead = True
    return run


def run_of_event(definition: Definition, event: EventRow) -> PlannedRun:
    """Return the run of an event, or raise InvalidInput. However late it comes, it is run: it says that something happened."""
    if not 0 <= event.created_at < TIME_END:
        raise InvalidInput(f"event {event.id}: created_at {event.created_at} is not a Unix time in seconds")
    is_plain = event.job_definition_id is not None and event.payload_json == "null"
    extra = () if is_plain else (f"{EVENT_ARGUMENT}{event.payload_json}",)
    spec = _spec(definition, event_run_id(event.id, definition.id), event.created_at, arguments=extra)
    return PlannedRun(definition_id=definition.id, spec=check_spec(spec, is_run=True), scheduled_for=event.created_at)


def is_for(event: EventRow, definition: Definition) -> bool:
    """Return whether the event gives the definition a run."""
    if event.job_definition_id is not None:
        return event.job_definition_id == definition.id
    return definition.enabled and definition.type == DefinitionType.EVENT and matches(definition.event_type, event.event_type)


def _spec(
    definition: Definition,
    job_id: str,
    scheduled_for: float,
    *,
    arguments: tuple[str, ...] = (),
    not_before: float | None = None,
    not_after: float | None = None,
) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        subject=f"{definition.queue}.{definition.command_name}",
        exec=DJANGO_EXEC,
        args=(definition.command_name, *arguments_of(definition.default_args_json), *arguments),
        env={"TASUKI_SCHEDULED_FOR": _text_of(scheduled_for), "TASUKI_DEFINITION": definition.name},
        timeout_s=float(definition.timeout_seconds) if definition.timeout_seconds else None,
        max_retries=definition.max_retries,
        backoff_s=float(definition.retry_backoff_seconds),
        not_before=not_before,
        not_after=not_after,
    )


def _text_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def plan_runs(policy: str, runs: Sequence[PlannedRun], last: LastRun | None, known: Collection[str]) -> FiringPlan:
    """Decide how new runs of one definition follow each other and the last one. Runs that are `known` were fired before."""
    plan = FiringPlan(last_run_id=last.job_id if last is not None else "")
    latest: PlannedRun | None = None
    for run in runs:
        if run.spec.job_id in known:
            continue
        plan.runs.append(run)
        if run.end is not None:
            continue
        going_on = latest.spec.job_id if latest is not None else last.open if last is not None else None
        if policy == ConcurrencyPolicy.FORBID and going_on is not None:
            message = f"run {going_on} of the same definition has not ended, and its concurrency_policy is forbid"
            run.end = (JobEvent.SKIP, Outcome(error_code="STILL_RUNNING", message=message))
            continue
        if policy == ConcurrencyPolicy.REPLACE:
            replaced = f"replaced by run {run.spec.job_id}"
            if latest is not None:
                latest.end = (JobEvent.CANCEL, Outcome(error_code="CANCELED", message=replaced))
                run.waits_for, latest.waits_for = latest.waits_for, None
            elif last is not None:
                run.waits_for = last.open
                if not last.is_over:
                    plan.cancel.append(last.job_id)
        latest = run
        plan.last_run_id = run.spec.job_id
    return plan


# ---------------------------------------------------------------------------------------------------- checks


def check_definition(definition: Definition) -> Definition:
    """Return the definition if it can be fired, else raise InvalidInput that begins with the name of the field."""
    try:
        msgspec.convert(msgspec.structs.asdict(definition), Definition)
    except msgspec.ValidationError as error:
        expected, _, field = str(error).rpartition(" - at `$.")
        raise InvalidInput(f"{field.rstrip('`')}: {expected.lower()}") from None
    if not definition.name.strip() or len(definition.name) > DEFINITION_NAME_MAX_CHARS or not definition.name.isprintable():
        raise InvalidInput(f"name {quoted(definition.name)} must have 1 to {DEFINITION_NAME_MAX_CHARS} printable characters")
    for field in ("command_name", "queue"):
        if "." in check_name(getattr(definition, field), field):
            raise InvalidInput(f"{field} {quoted(getattr(definition, field))} must not have a dot: it is a token of the subject")
    _check_choice(definition.type, DefinitionType, "type")
    _check_choice(definition.policy, ConcurrencyPolicy, "concurrency_policy")
    _check_numbers(definition)
    if definition.type == DefinitionType.EVENT:
        if not definition.event_type:
            raise InvalidInput(
                "event_type is empty; a definition of type event needs the types that it runs upon, as in 'order.*'"
            )
        _named("event_type", check_pattern, definition.event_type)
    else:
        parse_schedule(definition.schedule_type, definition.schedule_value)
        zone_of(definition.time_zone)
    check_spec(_spec(definition, "d" + "0" * (JOB_ID_MAX_CHARS - 1), 0.0))
    return definition


def problem_of(definition: Definition) -> tuple[str, str] | None:
    """Return the field that keeps the definition from being fired (empty: none of them), and the reason; None: it can be."""
    try:
        check_definition(definition)
    except TasukiError as error:
        field = error.message.partition(" ")[0].rstrip(":")
        return field if field in Definition.__struct_fields__ else "", error.message
    return None


def _check_choice(value: str, choices: type[enum.StrEnum], field: str) -> None:
    if value not in list(choices):
        raise InvalidInput(f"{field} {quoted(value)} must be one of {', '.join(choices)}")


def _check_numbers(definition: Definition) -> None:
    timeout = definition.timeout_seconds
    if timeout is not None and timeout <= 0:
        raise InvalidInput(f"timeout_seconds {timeout} must be above 0; leave it empty for no limit of its own")
    for field in ("max_retries", "retry_backoff_seconds"):
        if getattr(definition, field) < 0:
            raise InvalidInput(f"{field} {getattr(definition, field)} must not be below 0")


def _named(field: str, check: Any, value: str) -> None:
    try:
        check(value)
    except InvalidInput as error:
        raise InvalidInput(f"{field}: {error.message}") from None


_has_nul = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000").search  # in JSON: a backslash before it that is no escape itself


def check_event(event_type: str, payload: Any) -> str:
    """Return the payload as JSON, or raise InvalidInput that names the field."""
    _named("event_type", check_subject, check_text("event_type", event_type))
    try:
        encoded = msgspec.json.encode(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"payload is not JSON: {error}") from None
    if len(encoded) > EVENT_PAYLOAD_MAX_BYTES:
        raise TooLarge(
            f"payload has {len(encoded)} bytes as JSON, the limit is {EVENT_PAYLOAD_MAX_BYTES}; store it, and send its key"
        )
    if _has_nul(encoded):
        raise InvalidInput("payload has a NUL character, which PostgreSQL cannot store; leave it out")
    check_nesting("payload", encoded)
    return encoded.decode()


# ---------------------------------------------------------------------------------------------------- default_args_json


def arguments_of(default_args: Any) -> tuple[str, ...]:
    """Return the command line of `default_args_json`, or raise InvalidInput.

    A list is the command line. An object is options: `{"days": 7, "verbose": true, "tags": ["a", "b"]}` is
    `--days=7 --verbose --tags=a --tags=b`. `{"args": […], "options": {…}}` is both. None is nothing.
    """
    if default_args is None:
        return ()
    if isinstance(default_args, list | tuple):
        return tuple(_argument(value, "default_args_json") for value in default_args)
    if not isinstance(default_args, Mapping):
        raise InvalidInput(f"default_args_json must be a list or an object, not {type(default_args).__name__}")
    if {"args", "options"}.isdisjoint(default_args):
        return tuple(_options(default_args))
    args, options = default_args.get("args", []), default_args.get("options", {})
    if not set(default_args) <= {"args", "options"} or not isinstance(args, list | tuple) or not isinstance(options, Mapping):
        raise InvalidInput("default_args_json: with args (a list) or options (an object) there is nothing else in the object")
    return (*_options(options), *arguments_of(args))


def _options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum() or name.startswith("-"):
            raise InvalidInput(
                f"default_args_json: option {quoted(str(name))} must be letters, digits, - and _, without dashes before"
            )
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            yield flag
        elif isinstance(value, list | tuple):
            yield from (f"{flag}={_argument(one, f'default_args_json: {name}')}" for one in value)
        else:
            yield f"{flag}={_argument(value, f'default_args_json: {name}')}"


def _argument(value: Any, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidInput(f"{field} has an argument of type {type_name(value)}; an argument is a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"{field} has {value}, which is not JSON")
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except ValueError as error:
        raise InvalidInput(f"{field} has a number that cannot be written: {error}") from None
    if len(text) > TEXT_MAX_BYTES:
        raise InvalidInput(f"{field} has an argument of {len(text)} characters, the limit is {TEXT_MAX_BYTES}")
    return check_text(field, text)
