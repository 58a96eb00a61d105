"""The job: the submitter's request (`JobSpec`), the store's knowledge (`Job`), and the end of an attempt (`Outcome`).

This module has data, the checks that make bad data impossible to build, and ids. The life cycle is in `lifecycle.py`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import replace

from tasuki.core.decoding import decodable
from tasuki.core.subject import DEFAULT_SUBJECT, check_subject, subject_for
from tasuki.errors import InvalidInput, TooLarge, WrongType, quoted

JOB_ID_MAX_CHARS = 128
NAME_MAX_CHARS = 64
RESULT_INLINE_MAX_BYTES = 64 * 1024  # larger results are blobs, durable before the finish
BODY_INLINE_MAX_BYTES = 64 * 1024  # payload + inline files of one job; more travels as blobs
EXEC_MAX_BYTES = 1024  # a name, or the path of a program where any program is allowed
ARGS_MAX = 4096
ENV_MAX = 256
FILES_MAX = 1024
TEXT_MAX_BYTES = 128 * 1024  # one argument or environment value; Linux's own limit for one string of execve
HEADERS_MAX = 64
TEXTS_MAX_BYTES = 160 * 1024  # arguments, environment and headers together: a turn reads hundreds of such jobs at once
PRIORITY_MAX = 9
TIMEOUT_MAX_S = 366 * 86400.0
COMMAND_BACKOFF_S = 10.0
BROADCAST_WITHIN_S = 3600.0  # for which a broadcast waits for workers that are away
HANDLER_BACKOFF_S = 1.0  # its failures are mostly those of a service that it calls, or of code that is being written
BUDGET_MAX = 1_000_000
EXIT_CODES_MAX = 64
EXIT_CODE_RANGE = (1, 255)  # of failures, as a shell shows them: 128 + n for signal n
TIME_END = 1e11  # Unix times in seconds are below this; in milliseconds they would not be
PROGRESS_TEXT_MAX_CHARS = 200
ROUTE_KEY_MAX_CHARS = 256
PAYLOAD_FILE = "tasuki-payload"  # name of the input file that is the payload of a handler's job, where that is too large for it

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class State(enum.StrEnum):
    """States of a job. The transitions between them are the table in `lifecycle.py`."""

    PENDING = "PENDING"
    ASSIGNED = "ASSIGNED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    TIMED_OUT = "TIMED_OUT"
    ORPHANED = "ORPHANED"
    SKIPPED = "SKIPPED"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELED, State.TIMED_OUT, State.SKIPPED})
DEAD = frozenset({State.FAILED, State.TIMED_OUT})  # dead letters: no retry remains
LEASED = frozenset({State.ASSIGNED, State.RUNNING})
READY = frozenset({State.PENDING, State.ORPHANED})


class OnDisconnect(enum.StrEnum):
    """The worker's choice for a job whose lease it cannot renew; stored with the lease."""

    STOP = "stop"
    KEEP = "keep"


class BlobRef(msgspec.Struct, frozen=True, gc=False):
    """Bytes by their hash."""

    sha256: str
    size_bytes: int


class InputFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One input of a job: inline (`data`), a blob (`sha256`, `size_bytes`), or a file of a cache (`cache`).

    The server adds hash and size to a file of a cache when it accepts the job.
    """

    name: str
    data: bytes | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    cache_id: str | None = None
    """Cache that has a file of the same name; `cache` says the same, and may name another file."""
    cache: tuple[str, str] | None = None
    """(cache_id, name of the file in the cache)"""

    @property
    def cached_as(self) -> tuple[str, str] | None:
        """(cache_id, name) of a file of a cache; None for another one."""
        return self.cache or ((self.cache_id, self.name) if self.cache_id is not None else None)

    def identity(self) -> str:
        """Return the text that stands for the contents in the body hash."""
        if self.data is not None:
            return hashlib.sha256(self.data).hexdigest()
        if self.cache is not None:
            return f"cache:{'/'.join(self.cache)}"
        return f"cache:{self.cache_id}" if self.cache_id is not None else self.sha256 or ""


class JobSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A submitter's request. Immutable once accepted."""

    job_id: str
    """Issued by the client; asking again with it gives the same job."""
    subject: str = DEFAULT_SUBJECT
    """Routing key; decides which workers may take it, and its group."""
    exec: str = ""
    """Name of an allow-listed program at the worker; empty: a Python handler, chosen by subject."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    payload: bytes = b""
    """Bytes for a handler, or the standard input of a command."""
    files: tuple[InputFile, ...] = ()
    cwd: str = ""
    """Current folder of a program that the server's own user submits over the unix socket for that user's workers, which are on
    the same machine. Empty: the attempt's own folder."""
    timeout_s: float | None = None
    """Limit of one attempt, from its start. None: the exec's own default. Not part of the body."""
    max_retries: int = 3
    """Number of reported failures that may be tried again. Not part of the body."""
    max_losses: int = 3
    """Number of attempts that may be lost with their worker before the job is dead-lettered. Not part of the body."""
    backoff_s: float | None = None
    """Delay of retry n (from 0): min(300, backoff_s * 2**n). None: 10 for a command, 1 for a handler. Not part of the body."""
    priority: int = 5
    """0-9, higher first, strictly. Not part of the body."""
    not_before: float | None = None
    """Unix time on the store's wall clock: no attempt is granted before it. Not part of the body."""
    not_after: float | None = None
    """Unix time on the store's wall clock: a job that still waits after it is SKIPPED. Not part of the body."""
    permanent_exit_codes: tuple[int, ...] = ()
    """Exit codes that are not worth another attempt. Empty: the exec's own rule. Not part of the body."""
    retry_exit_codes: tuple[int, ...] = ()
    """The only exit codes that are worth another attempt. Empty: the exec's own rule. Not part of the body."""
    headers: dict[str, str] = {}
    """Free notes for the submitter. Not part of the body."""
    array_id: str | None = None
    """The array that this job is an element of. Not part of the body."""
    route_key: str = ""
    """Key by which a sticky route chooses the worker; empty: the subject. Not part of the body."""
    delay_first_loss: bool = False
    """True: the job waits also after its first lost attempt; else only after later ones. Not part of the body."""
    mac: bytes = b""
    """Mark of the server that its own user submitted this command (`mark`). A submitter's own value is dropped. Not part of the
    body."""

    @property
    def retry_backoff_s(self) -> float:
        """The backoff in force: the job's own, else that of its kind."""
        if self.backoff_s is not None:
            return self.backoff_s
        return COMMAND_BACKOFF_S if self.exec else HANDLER_BACKOFF_S


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to run one attempt of one job."""

    lease_id: str
    worker_id: str
    incarnation: str
    attempt: int
    expires_at: float
    """On the store's lease clock, which is compared with nothing but itself."""
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    owner: str = ""
    """The peer that was let in as this worker (`Identity.owner`): nobody else can show the lease."""


class Outcome(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The end of an attempt."""

    exit_code: int | None = None
    error_code: str | None = None
    """None: success; else a stable word: EXIT_CODE, SIGNAL, TIMED_OUT, CANCELED, HANDLER_ERROR, EXEC_NOT_ALLOWED, …"""
    message: str = ""
    result: bytes | None = None
    """Up to RESULT_INLINE_MAX_BYTES; recorded in the finish's own transaction."""
    result_ref: BlobRef | None = None
    """A larger result: a blob that was durable before this outcome was sent."""
    result_sha256: str | None = None
    meta: dict[str, Any] = {}
    permanent: bool = False
    """Trying again can never help: no retry is used up, the job is FAILED."""
    retry_in_s: float | None = None
    """Delay of the next attempt, instead of the job's backoff. Stores act on it and do not keep it."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the result, as its handler gave them."""
        found = self.meta.get("headers")
        return found if isinstance(found, dict) else {}


@decodable
class Progress(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Progress that a running attempt reports: 0 to 1, and a few words. Nothing is decided by it."""

    fraction: float
    text: str = ""

    @classmethod
    def of(cls, fraction: float, text: str = "") -> Progress:
        """Return a report that can be kept: the text printable and not too long. InvalidInput unless `fraction` is 0 to 1."""
        if not 0.0 <= fraction <= 1.0:  # NaN is not either
            raise InvalidInput(f"progress must be 0 to 1, got {fraction}")
        printable = "".join(character if character.isprintable() else " " for character in text)
        return cls(float(fraction), printable[:PROGRESS_TEXT_MAX_CHARS])


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the store knows of one job. A leased state without a lease cannot be built."""

    spec: JobSpec
    state: State
    submitter: str
    body_hash: bytes = b""
    created_at: float
    attempt: int = 0
    generation: int = 0
    failures: int = 0
    losses: int = 0
    version: int = 0
    priority: int = 5
    not_before: float | None = None
    not_after: float | None = None
    """Time of the spec; None once the job was retried after it."""
    lease: Lease | None = None
    assigned_worker_id: str | None = None
    """The worker that had the latest attempt; stays after the lease is over."""
    assigned_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested: bool = False
    outcome: Outcome | None = None
    """The outcome that made the job terminal, or that of the latest failed attempt while a retry waits."""
    leader_epoch: int = 0
    job_definition_id: int | None = None
    """The definition that the job is a run of."""
    scheduled_for: float | None = None
    progress: Progress | None = None
    """The latest attempt's last report of progress; a grant clears it."""
    confirming_until: float | None = None
    """Wall time until which its worker, which was cut off or detached, asks whether it may continue; a grant clears it."""

    def __post_init__(self) -> None:
        if self.state in LEASED and self.lease is None:
            raise ValueError(f"job {self.spec.job_id!r} cannot be {self.state} without a lease")

    @property
    def job_id(self) -> str:
        return self.spec.job_id


class JobIncident(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An unusual event in the life of a job, kept for `explain`."""

    at: float
    kind: str
    """failed, lost, fenced, orphaned, released, canceled, cancel_requested, requeued, dead_lettered, taken_over,
    resumed, skipped, restored, no_payload"""
    attempt: int = 0
    worker_id: str = ""
    actor: str = ""
    reason: str = ""


# ---------------------------------------------------------------------------------------------------- ids and names
# A job id becomes a folder name, a part of a URL and a database key, so one narrow alphabet serves all three: checked once, at
# the door, and trusted everywhere behind it.

# No leading dot: it would be a hidden file, or the folders "." and "..".
_is_job_id = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{JOB_ID_MAX_CHARS - 1}}}").fullmatch
_is_name = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_MAX_CHARS - 1}}}").fullmatch


def check_job_id(job_id: str, field: str = "job_id") -> str:
    """Return `job_id` if it is one, else raise InvalidInput that names the field."""
    if not is_job_id(job_id):
        raise InvalidInput(f"{field} {quoted(job_id)} must be {JOB_ID_RULE}")
    return job_id


is_run_id = re.compile(r"d([0-9]{1,19})-([0-9]{1,19})|e[0-9]{1,19}-([0-9]{1,19})").fullmatch
"""Matches ids of runs, which the leader makes of definitions and events: `d7-1767225600`, `e12-7`. A job of somebody else with
such an id would take the place of a run. Statements of the SQL store make the first form too."""


def run_id(definition_id: int, nominal: int) -> str:
    """Return the id of the run of a definition at a nominal time."""
    return f"d{definition_id}-{nominal}"


def event_run_id(event_id: int, definition_id: int) -> str:
    """Return the id of the run of a definition upon an event."""
    return f"e{event_id}-{definition_id}"


def nominal_time(job_id: str) -> float | None:
    """Return the nominal time of a scheduled run; None for other jobs, whose ids never have this form."""
    found = is_run_id(job_id) if job_id.startswith("d") else None
    return float(found[2]) if found is not None else None


def definition_of(job_id: str) -> int | None:
    """Return the id of the definition whose run has this id, if it is one's."""
    found = is_run_id(job_id)
    return int(found[1] or found[3]) if found is not None else None


def is_job_id(job_id: object) -> bool:
    """Return whether a job may have this id."""
    return isinstance(job_id, str) and _is_job_id(job_id) is not None and job_id != RESERVED_JOB_ID


def check_name(name: str, kind: str = "name") -> str:
    """Return `name` if it can name a worker or an exec, else raise InvalidInput that calls it by its `kind`."""
    if _is_name(name) is None:
        raise InvalidInput(f"{kind} {quoted(name)} must be {_rule(NAME_MAX_CHARS)}")
    return name


def _rule(max_chars: int) -> str:
    return f"1 to {max_chars} characters of A-Z a-z 0-9 . _ - and not begin with a dot"


RESERVED_JOB_ID = "index"  # in Redis, {app}:lease:index is the index of all leases
JOB_ID_RULE = f"{_rule(JOB_ID_MAX_CHARS)}, nor be {RESERVED_JOB_ID!r}"


# A UUIDv7 (RFC 9562) is made of a stamp and a tail, and written as head, low and tail:
#
#     tttttttt-tttt-7ccc-Vccc-rrrrrrrrrrrr        (V: the variant bits 10, then 2 bits of c)
#     stamp = t (48 bits, unix_ms) then c (26 bits)          tail = r (48 bits, always random)
#     head  = all before V                                   low  = the last 14 bits of c, with the variant before them
#
# The stamp is one integer, so that "the next id" is stamp + 1, and running out of c carries into t by itself.
# The head is the same for up to 16,384 ids in a row: written once per run, it makes an id cost 0.3 µs instead of 1.5.
_COUNTER_BITS = 26
# A new millisecond starts c at random in its lower half: makers in different processes seldom share a stamp (and then
# the tail still tells them apart), while 33 million ids remain before c carries.
_COUNTER_START_MASK = 2 ** (_COUNTER_BITS - 1) - 1
_COUNTER_BYTES = 4
_LOW_BITS = 14
_LOW_COUNT = 2**_LOW_BITS
_VARIANT = 0b10 << _LOW_BITS
_TAIL_BYTES = 6


class IdMaker:
    """Maker of ids that strictly increase, also inside one millisecond and when the clock steps back.

    The ids are UUIDv7, because random ids cost one dirty index page each and time-ordered ones do not. `clock_ms` returns Unix
    time in milliseconds, `random` that many random bytes. Not for use by several threads at once: each takes its own maker.
    """

    def __init__(self, clock_ms: Callable[[], int], random: Callable[[int], bytes]) -> None:
        self._clock_ms = clock_ms
        self._random = random
        self._last_stamp = -1

    def __call__(self) -> str:
        return self.many(1)[0]

    def many(self, count: int) -> list[str]:
        """Return the next `count` ids, with one look at the clock and one call for random bytes."""
        if count <= 0:
            return []
        random_bytes = self._random(_COUNTER_BYTES + _TAIL_BYTES * count)
        counter_start = int.from_bytes(random_bytes[:_COUNTER_BYTES], "big") & _COUNTER_START_MASK
        # A clock that stands or steps back loses to the successor of the last stamp that was given out.
        first = max(self._clock_ms() << _COUNTER_BITS | counter_start, self._last_stamp + 1)
        self._last_stamp = first + count - 1
        tails = random_bytes[_COUNTER_BYTES:].hex("-", _TAIL_BYTES).split("-")
        ids: list[str] = []
        while len(ids) < count:
            high, low = divmod(first + len(ids), _LOW_COUNT)
            run = tails[len(ids) : len(ids) + _LOW_COUNT - low]
            digits = f"{high >> 12:012x}"
            head = f"{digits[:8]}-{digits[8:]}-7{high & 0xFFF:03x}-"
            ids += [f"{head}{number:x}-{tail}" for number, tail in enumerate(run, _VARIANT | low)]
        return ids


# ---------------------------------------------------------------------------------------------------- checks of a spec

CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL, C1, line and bidi controls, lone surrogates: on a terminal they move, hide or reorder text."""
_SHA256 = re.compile(r"[0-9a-f]{64}\Z").match
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z").match


def check_spec(spec: JobSpec, *, is_run: bool = False) -> JobSpec:
    """Return the spec if it can be accepted, else raise InvalidInput naming the field, the value and the rule.

    `is_run`: it is the leader's, who alone may use ids of runs.
    """
    check_job_id(spec.job_id)
    if spec.job_id[0] in "de" and not is_run and is_run_id(spec.job_id):
        raise InvalidInput(f"job_id {quoted(spec.job_id)} has the form of the id of a scheduled run; choose another one")
    check_subject(spec.subject)
    if spec.exec:
        _check_text(spec.exec, "the exec name")
        if len(spec.exec.encode("utf-8", "surrogatepass")) > EXEC_MAX_BYTES or not spec.exec.isprintable():
            raise InvalidInput(f"exec {spec.exec[:40]!r} must be printable and have at most {EXEC_MAX_BYTES} bytes")
    if spec.cwd:
        _check_text(spec.cwd, "cwd")
        if not spec.exec or not spec.cwd.startswith("/"):
            raise InvalidInput(f"cwd {spec.cwd[:80]!r} must be the absolute path of the folder that a command runs in")
    if not 0 <= spec.priority <= PRIORITY_MAX:
        raise InvalidInput(f"priority must be 0 to {PRIORITY_MAX}, got {spec.priority}")
    if not (0 <= spec.max_retries <= BUDGET_MAX and 0 <= spec.max_losses <= BUDGET_MAX):
        raise InvalidInput(f"max_retries and max_losses must be 0 to {BUDGET_MAX}, got {spec.max_retries} and {spec.max_losses}")
    if spec.backoff_s is not None and not 0 <= spec.backoff_s <= TIMEOUT_MAX_S:
        raise InvalidInput(f"backoff_s must be 0 to {TIMEOUT_MAX_S:.0f} seconds, got {spec.backoff_s}")
    if spec.timeout_s is not None and not 0 < spec.timeout_s <= TIMEOUT_MAX_S:
        raise InvalidInput(f"timeout_s must be above 0 and at most {TIMEOUT_MAX_S:.0f} seconds, got {spec.timeout_s}")
    if spec.not_before is not None or spec.not_after is not None:
        _check_times(spec)
    if spec.permanent_exit_codes or spec.retry_exit_codes:
        check_exit_codes(spec.permanent_exit_codes, spec.retry_exit_codes)
    if spec.array_id is not None:
        check_job_id(spec.array_id, "array_id")
    if len(spec.route_key) > ROUTE_KEY_MAX_CHARS:
        raise TooLarge(f"route_key has {len(spec.route_key)} characters, the limit is {ROUTE_KEY_MAX_CHARS}; use a hash of it")
    size = len(spec.payload)
    if spec.args or spec.env or spec.files or spec.headers:
        _check_lists(spec)
        size += sum(len(file.data) for file in spec.files if file.data is not None)
    if size > BODY_INLINE_MAX_BYTES:
        raise TooLarge(
            f"payload and inline files of job {spec.job_id!r} have {size} bytes, the limit is {BODY_INLINE_MAX_BYTES}; "
            "upload them as blobs (the client does this by itself for files)"
        )
    return spec


def _check_times(spec: JobSpec) -> None:
    for name, at in (("not_before", spec.not_before), ("not_after", spec.not_after)):
        if at is not None and not 0 <= at < TIME_END:
            raise InvalidInput(f"{name} must be a Unix time in seconds, got {at}")
    if spec.not_before is not None and spec.not_after is not None and spec.not_after <= spec.not_before:
        raise InvalidInput(
            f"not_after ({spec.not_after}) must be later than not_before ({spec.not_before}); it could never start"
        )


def check_exit_codes(permanent: tuple[int, ...], retry: tuple[int, ...]) -> None:
    """Raise InvalidInput unless the two lists of exit codes are valid and disjoint."""
    lowest, highest = EXIT_CODE_RANGE
    for name, codes in (("permanent_exit_codes", permanent), ("retry_exit_codes", retry)):
        if len(codes) > EXIT_CODES_MAX:
            raise InvalidInput(f"{name} has {len(codes)} codes, the limit is {EXIT_CODES_MAX}")
        for code in codes:
            if not lowest <= code <= highest:
                raise InvalidInput(f"{name} has {code}; exit codes of failures are {lowest} to {highest} (128 + n for signal n)")
    both = sorted(set(permanent) & set(retry))
    if both:
        raise InvalidInput(f"permanent_exit_codes and retry_exit_codes both have {both[0]}; a code is one or the other")


def _check_lists(spec: JobSpec) -> None:
    if len(spec.args) > ARGS_MAX or len(spec.env) > ENV_MAX or len(spec.files) > FILES_MAX or len(spec.headers) > HEADERS_MAX:
        raise TooLarge(
            f"job {spec.job_id!r} has {len(spec.args)} args, {len(spec.env)} env names, {len(spec.files)} files, "
            f"{len(spec.headers)} headers; the limits are {ARGS_MAX}, {ENV_MAX}, {FILES_MAX}, {HEADERS_MAX}"
        )
    texts = sum(map(len, spec.args)) + sum(len(k) + len(v) for k, v in (*spec.env.items(), *spec.headers.items()))
    if texts > TEXTS_MAX_BYTES:
        raise TooLarge(
            f"arguments, environment and headers of job {spec.job_id!r} have {texts} characters, the limit is {TEXTS_MAX_BYTES}; "
            "put large things into files"
        )
    for argument in spec.args:
        _check_text(argument, "an argument")
    for name, value in spec.env.items():
        if _ENV_NAME(name) is None:
            raise InvalidInput(f"environment name {name[:40]!r} must be letters, digits and _, not starting with a digit")
        _check_text(value, f"the value of environment name {name}")
    for file in spec.files:
        _check_file(file)
    check_together(file.name for file in spec.files)


def check_together(names: Iterable[str]) -> None:
    """Refuse names of files that cannot lie in one folder, on any system."""
    if (clash := first_clash(names)) is not None:
        first, second = clash
        if first.casefold() == second.casefold():
            raise InvalidInput(f"two input files are named {first[:80]!r} (compared without case)")
        raise InvalidInput(f"input file {first[:80]!r} cannot also be the folder of {second[:80]!r}; rename one")


def first_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two of the names that cannot lie in one folder, on any system: they differ only in case, or the first would be the
    folder of the second."""
    # With a / at the end, a name sorts right before those of files that would be inside it.
    for (first, name), (second, other) in pairwise(sorted((f"{name.casefold()}/", name) for name in names)):
        if second.startswith(first):
            return name, other
    return None


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidInput(f"{what} contains a NUL character, which no program can be given")
    if len(text) > TEXT_MAX_BYTES:
        raise TooLarge(f"{what} has {len(text)} characters, the limit is {TEXT_MAX_BYTES}")


def is_sha256(text: str) -> bool:
    """Return True for 64 lower-case hex digits."""
    return _SHA256(text) is not None


def check_sha256(sha256: str) -> str:
    """Return the hash if it is 64 lower-case hex digits, else raise InvalidInput: it becomes part of paths and keys."""
    if not is_sha256(sha256):
        raise InvalidInput(f"not a sha256: {sha256[:80]!r}; it must be 64 lower-case hex digits")
    return sha256


def _check_file(file: InputFile) -> None:
    check_file_name(file.name)
    given = (file.data is not None) + (file.sha256 is not None) + (file.cache_id is not None) + (file.cache is not None)
    if given != 1:
        raise InvalidInput(f"input file {file.name!r} needs exactly one of data, sha256, cache; {given} were given")
    if file.sha256 is not None:
        if _SHA256(file.sha256) is None:
            raise InvalidInput(f"input file {file.name!r}: sha256 must be 64 lower-case hex digits, got {file.sha256[:70]!r}")
        if file.size_bytes is None or file.size_bytes < 0:
            raise InvalidInput(f"input file {file.name!r}: a blob needs its size_bytes")
    if file.cached_as is not None:
        cache_id, name = file.cached_as
        check_name(cache_id, "cache_id")
        check_file_name(name)


def check_file_name(name: str) -> str:
    """Return the name if it is a relative path that is safe to create below a folder, else raise InvalidInput."""
    parts = name.split("/")
    if len(name.encode("utf-8", "surrogatepass")) > 1024 or any(len(part) > 200 for part in parts):
        raise InvalidInput(f"file name {name[:80]!r}… is too long; it may have 1024 bytes, and 200 characters between two '/'")
    if not name or any(part in ("", ".", "..") for part in parts) or "\\" in name or CONTROL_CHARACTERS.search(name):
        raise InvalidInput(
            f"file name {name[:80]!r} must be a relative path without '..', empty parts, backslash or control characters"
        )
    return name


def broadcast_specs(spec: JobSpec, worker_ids: Iterable[str], not_after: float) -> list[JobSpec]:
    """Return one job for each of these workers, as elements of an array: `spec` has the array's id as its job_id, and the pattern
    that the workers meet as its subject. A worker that is away at `not_after` has missed its job.

    The ids of the jobs follow from the array's: the same broadcast again adds jobs for workers that are new, and no second one.
    """
    return [
        replace(
            spec,
            job_id=f"{spec.job_id}.{worker_id}",
            subject=subject_for(spec.subject, worker_id),
            array_id=spec.job_id,
            not_after=spec.not_after or not_after,
        )
        for worker_id in worker_ids
    ]


_body_encoder = msgspec.msgpack.Encoder()
_NO_FILES: list[tuple[str, str]] = []
_NO_ENV: list[tuple[str, str]] = []


def body_hash(spec: JobSpec) -> bytes:
    """Return the hash by which two submits of one id are the same job: of the fields that say what is done, not how often, when
    or for how long."""
    files = sorted((file.name, file.identity()) for file in spec.files) if spec.files else _NO_FILES
    return hashlib.sha256(
        _body_encoder.encode(
            (
                spec.subject,
                spec.exec,
                spec.args,
                sorted(spec.env.items()) if spec.env else _NO_ENV,
                hashlib.sha256(spec.payload).hexdigest() if spec.payload else EMPTY_SHA256,
                files,
                spec.cwd,
            )
        )
    ).digest()


def mark(spec: JobSpec, submitter: str, key: bytes) -> JobSpec:
    """Return the spec with the MAC of all its fields and its submitter; without a MAC if the key is empty."""
    bare = replace(spec, mac=b"") if spec.mac else spec
    return replace(bare, mac=hmac.digest(key, _body_encoder.encode((submitter, bare)), "sha256")) if key else bare


def is_marked(spec: JobSpec, submitter: str, key: bytes) -> bool:
    """Return whether the spec has the MAC that `mark` gave it."""
    return bool(key) and hmac.compare_digest(spec.mac, mark(spec, submitter, key).mac)


_COMPARED = ("subject", "exec", "args", "env", "payload", "cwd")


def differing_fields(one: JobSpec, other: JobSpec) -> list[str]:
    """Return the names of the body's fields in which the two differ; never their contents."""
    names = [name for name in _COMPARED if getattr(one, name) != getattr(other, name)]
    if sorted((f.name, f.identity()) for f in one.files) != sorted((f.name, f.identity()) for f in other.files):
        names.append("files")
    return names


# ---------------------------------------------------------------------------------------------------- arguments in Python

NESTING_MAX = 100
"""Lists and objects inside each other in a JSON value: each level takes a part of the stack of its reader."""

_encode = msgspec.msgpack.Encoder().encode
_decode_specs = msgspec.msgpack.Decoder(list[JobSpec]).decode
_AT = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<given>.+)` - at `\$\[(?P<place>\d+)\]\.(?P<path>(?P<field>\w+)\S*)`")
_SURROGATE = re.compile("[\ud800-\udfff]").search
_IN_PYTHON = {"null": "None", "array": "list", "object": "dict"}
_JSON_TYPE = re.compile(rf"\b(?:{'|'.join(_IN_PYTHON)})\b")
WAYS_OUT = {"payload": "; encode it, as in payload=text.encode()", "args": "; write args=[…]", "files": "; write files=[…]"}


def check_specs(specs: Sequence[JobSpec], names: Mapping[str, str] | None = None) -> None:
    """Raise WrongType if a job has a field of the wrong type: the server could not read it. `names` of fields in the message."""
    for place, spec in enumerate(specs):
        if type(spec) is not JobSpec:
            raise WrongType(f"specs[{place}] must be a JobSpec, got {type_name(spec)}")
    try:
        _decode_specs(_encode(specs))
    except (msgspec.ValidationError, TypeError) as error:
        raise _wrong_field(specs, error, names or {}) from None
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return  # not a matter of types: the sender says which job cannot be sent


def _wrong_field(specs: Sequence[JobSpec], error: Exception, names: Mapping[str, str]) -> WrongType:
    found = _AT.search(str(error))
    if found is None:  # a type that msgpack does not have
        for field in JobSpec.__struct_fields__:
            try:
                _encode([getattr(spec, field) for spec in specs])
            except TypeError as own:
                return WrongType(f"{names.get(field, field)} must be {_hint(field)}: {str(own)[:200]}")
        return WrongType(str(error))
    field, path = found["field"], found["path"]
    given = type_name(getattr(specs[int(found["place"])], field)) if path == field else found["given"]
    wanted = _hint(field) if path == field else python_types(found["wanted"])
    named = names.get(field, field) + path.removeprefix(field)
    return WrongType(f"{named} must be {wanted}, got {given}{WAYS_OUT.get(named, '')}")


def _hint(field: str) -> str:
    hint = get_type_hints(JobSpec)[field]
    return hint.__name__ if isinstance(hint, type) and "[" not in str(hint) else str(hint).replace("tasuki.core.job.", "")


def python_types(text: str) -> str:
    """Return a message of msgspec with Python's names of the types."""
    return _JSON_TYPE.sub(lambda name: _IN_PYTHON[name[0]], text)


def type_name(value: object) -> str:
    """Return the name of a value's type, for a message."""
    return type(value).__name__


def check_text(name: str, text: object) -> str:
    """Return the text if every database and program can be given it, else raise an error that begins with its name."""
    if not isinstance(text, str):
        raise WrongType(f"{name} must be str, got {type_name(text)}")
    if "\0" in text:
        raise InvalidInput(f"{name} has a NUL character; leave it out")
    if not text.isascii() and _SURROGATE(text):
        raise InvalidInput(f"{name} has a lone surrogate, which UTF-8 does not have; leave it out")
    return text


def check_nesting(name: str, encoded: bytes) -> None:
    """Raise InvalidInput if the lists and objects of a JSON text are too deep inside each other."""
    if len(encoded) <= 2 * NESTING_MAX or encoded.count(b"[") + encoded.count(b"{") <= NESTING_MAX:
        return
    level = [msgspec.json.decode(encoded)]
    for _ in range(NESTING_MAX + 1):
        inside = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, list | dict))
        level = list(chain.from_iterable(inside))
    if level:
        raise InvalidInput(f"{name} has lists or objects more than {NESTING_MAX} deep inside each other; make it flat")
