"""Encoding of the values that the Redis store keeps, and their decoding. Pure.

Numbers are texts that lose nothing (repr, and %.17g in Lua). An absent field stands for none, no and zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tasuki.core.job import (
    Job,
    JobIncident,
    JobSpec,
    Lease,
    OnDisconnect,
    Outcome,
    Progress,
    State,
    body_hash,
)
from tasuki.core.pauses import PausedPattern
from tasuki.core.store_messages import AuditRow, CachedFile, CacheSummary, Grant, Report, TokenRow, kind_of
from tasuki.core.subject import group_of, only_group
from tasuki.stores.common import input_refs, report_identity

PARTS = {"summary_text": "s", "freqs_csv": "f"}
"""Entries of an outcome's meta that have a key of their own (`{app}:summary:{id}`, `{app}:freqs:{id}`), and their letter."""

SHARED_TYPES = {"queue": "list", "lease:index": "zset", "delay": "zset", "dlq": "list", "revoked_tokens": "set"}
"""Keys below the app's prefix that outsiders may write and all jobs share, and their types."""

Reply = Any
"""Answer of a verb: bytes, None, and lists of these."""

Argument = str | bytes | int | float

Text = str | bool
"""A text, or False if there is none."""

encode = msgspec.msgpack.Encoder().encode
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_decode_progress = msgspec.json.Decoder(Progress).decode
_decode_incident = msgspec.msgpack.Decoder(tuple[str, str, int, str, str, str]).decode
_decode_audit = _decode_file = msgspec.msgpack.Decoder(tuple[str, str, str, str, str]).decode
_decode_cache = _decode_pause = msgspec.msgpack.Decoder(tuple[str, str, str]).decode

INSIDE_MAX_BYTES = 1024  # a payload up to this has no key of its own, unless outsiders know that key

_MAP_16 = 0xDE
_FIXED_MAP = 0x80
_FIXED_MAP_MAX = 15


class SpecFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields of a job that never change and that Lua needs; the head of `{app}:spec:{id}`."""

    subject: str
    group: str
    kind: str
    """See `kind_text`."""
    priority: str
    submitter: str
    max_retries: str
    max_losses: str
    backoff_s: str
    body_hash: Text = False
    """Hex; an outsider's job has none."""
    array_id: Text = False
    inputs: Text = False
    """The input blobs, each as `sha256:size_bytes;`."""
    not_before: Text = False
    not_after: Text = False
    delay_first_loss: Text = False


class JobRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields of a job that change: `{app}:job:{id}`. The last three are set by the script, not by the client."""

    state: str
    group: str
    payload: Text
    """Set if the job has a payload key."""
    version: Text
    attempt: Text
    assigned_worker_id: Text
    assigned_at: Text
    started_at: Text
    finished_at: Text
    lease_id: Text
    incarnation: Text
    owner: Text
    ttl_s: Text
    outcome: Text
    """o if there is one, then r, s, f for each of the keys result, summary, freqs; p for a key result that names a blob."""
    report_key: Text
    """Key of the report that ended the latest attempt, to recognize its repeat until the next grant or requeue."""
    rare: dict[str, str] | bool
    """The fields of RARE that the job has."""
    shown: Text
    """Set if outsiders may read the job: it has the keys status, lease and retry_count, and its keys expire after its end."""
    seq: str
    """Order of submission: the job's age, whatever happens to it later."""
    created_at: str


RARE = (
    "not_before",
    "not_after",
    "delayed",  # waits for promote
    "generation",
    "failures",
    "losses",
    "leader_epoch",
    "cancel_requested",  # 1 and the reason
    "progress",  # in JSON
    "keep",  # on_disconnect
    "reconnect_grace_s",
    "expires_at",  # of a lease that is kept; of others it is the score in the index
    "result_blob",
    "dead",  # is among the dead letters
)
"""Fields that most jobs never have."""


def optional(value: float | str | None) -> Argument:
    """Return the argument for a value that may be None: then it is ''."""
    return "" if value is None else value


def flag(value: bool) -> str:
    return "1" if value else "0"


read_record = msgspec.msgpack.Decoder(JobRecord).decode
read_fields = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_facts = msgspec.msgpack.Decoder(SpecFacts).decode

# ---------------------------------------------------------------------------------------------------- specs


Place = tuple[int, str, str, str]
"""Priority, group, kind (see `kind_text`) and subject of a queue."""


def kind_text(kind: int, exec: str) -> str:
    """Return how the store writes a kind: its number, and behind it the program of a command."""
    return f"{kind:d}:{exec}" if exec else f"{kind:d}"


class SharedValues(NamedTuple):
    """Values that many jobs have in common."""

    place: Place
    facts: SpecFacts
    """Facts up to the hash of the body, which is all zeros."""
    head: bytes
    """The facts packed, up to the hash; see `_PLAIN_FACTS`."""


@lru_cache(4096)
def shape_of(
    subject: str, exec: str, submitter: str, priority: int, max_retries: int, max_losses: int, backoff_s: float
) -> SharedValues:
    group, kind = group_of(subject), kind_text(kind_of(exec, submitter), exec)
    budgets = (str(max_retries), str(max_losses), repr(backoff_s))
    facts = SpecFacts(subject, group, kind, str(priority), submitter, *budgets, "0" * _HASH_CHARS)
    return SharedValues((priority, group, kind, subject), facts, encode(facts)[: -_HASH_CHARS - len(_PLAIN_FACTS)])


_HASH_CHARS = 64
_PLAIN_FACTS = b"\xc2" * (len(SpecFacts.__struct_fields__) - SpecFacts.__struct_fields__.index("body_hash") - 1)
"""The packed fields behind the hash of a body, if the job has none of them: false for each."""


def _shape(spec: JobSpec, submitter: str) -> SharedValues:
    return shape_of(spec.subject, spec.exec, submitter, spec.priority, spec.max_retries, spec.max_losses, spec.retry_backoff_s)


def spec_value(spec: JobSpec, submitter: str, hashed: bytes, *, with_payload: bool) -> tuple[bytes, Place]:
    """Return the value of `{app}:spec:{id}`: the length of the facts, the facts, and the spec, without its payload if that has
    a key of its own; and the queue that the job waits in, if it waits for nothing else."""
    shape = _shape(spec, submitter)
    if spec.files or spec.array_id or spec.delay_first_loss or spec.not_before is not None or spec.not_after is not None:
        facts = _all_facts(spec, shape, hashed.hex())
    else:
        facts = shape.head + hashed.hex().encode() + _PLAIN_FACTS
    packed = encode(spec if with_payload else replace(spec, payload=b""))
    return len(facts).to_bytes(_LENGTH_BYTES, "big") + facts + packed, shape.place


def template_value(template: JobSpec, submitter: str) -> tuple[bytes, Place]:
    """Return the value of `{app}:spec:{id}` for jobs of outsiders, up to the value of the job_id, which is appended; and their
    queue."""
    shape = _shape(template, submitter)
    facts = _all_facts(template, shape, False)
    fields = msgspec.to_builtins(template, builtin_types=(bytes,))
    fields.pop("job_id", None)
    fields.pop("payload", None)
    return len(facts).to_bytes(_LENGTH_BYTES, "big") + facts + _grown(encode(fields)) + encode("job_id"), shape.place


def _all_facts(spec: JobSpec, shape: SharedValues, hashed: Text) -> bytes:
    inputs = "".join(f"{ref.sha256}:{ref.size_bytes};" for ref in dict.fromkeys(input_refs(spec)))
    facts = replace(
        shape.facts,
        body_hash=hashed,
        array_id=spec.array_id or False,
        inputs=inputs or False,
        not_before=repr(spec.not_before) if spec.not_before is not None else False,
        not_after=repr(spec.not_after) if spec.not_after is not None else False,
        delay_first_loss="1" if spec.delay_first_loss else False,
    )
    return encode(facts)


def split(value: bytes) -> tuple[SpecFacts, bytes]:
    """Split a value of `{app}:spec:{id}` into the facts and the spec, which lacks a payload that has a key of its own."""
    end = _LENGTH_BYTES + int.from_bytes(value[:_LENGTH_BYTES], "big")
    return _decode_facts(value[_LENGTH_BYTES:end]), value[end:]


@lru_cache(1024)
def record_head(group: str, has_payload: bool) -> bytes:
    """Return the packed record of a new job that waits for nothing, up to its last three fields."""
    new = ("PENDING", group, "1" if has_payload else False)
    fields = (*new, *[False] * (len(JobRecord.__struct_fields__) - len(new)))
    return encode(fields)[:-_LAST_FIELDS]


_LAST_FIELDS = 3  # one byte each as long as they are false
_LENGTH_BYTES = 4


def with_payload(spec: bytes, payload: bytes) -> bytes:
    """Return the packed spec with the payload that had a key of its own, if it has one."""
    return _grown(spec) + _PAYLOAD + encode(payload) if payload else spec


_PAYLOAD = encode("payload")


def _grown(packed: bytes) -> bytes:
    """Return a msgpack map whose head announces one field more, which is to be appended."""
    if packed[0] == _MAP_16:
        size, body = int.from_bytes(packed[1:3], "big"), packed[3:]
    else:
        size, body = packed[0] - _FIXED_MAP, packed[1:]
    size += 1
    if size <= _FIXED_MAP_MAX:
        return bytes([_FIXED_MAP + size]) + body
    return bytes([_MAP_16]) + size.to_bytes(2, "big") + body


# ---------------------------------------------------------------------------------------------------- outcomes


def report_key(report: Report, verb: str) -> str:
    """Return the key by which a repeat of this report is recognized."""
    return hashlib.blake2b(encode(report_identity(report, verb)), digest_size=16).hexdigest()


def outcome_arguments(outcome: Outcome) -> list[Argument]:
    """Return the packed outcome without the parts that have a key of their own, the letters of these parts (b: a result that is a
    blob, by its sha256 and size), and the parts."""
    letters, values = "", list[Argument]()
    if outcome.result is not None:
        letters, values = "r", [outcome.result]
        outcome = replace(outcome, result=None)
    taken = {name: text for name in PARTS if isinstance(text := outcome.meta.get(name), str)} if outcome.meta else {}
    if taken:
        letters += "".join(PARTS[name] for name in taken)
        values += taken.values()
        outcome = replace(outcome, meta={name: value for name, value in outcome.meta.items() if name not in taken})
    if outcome.result_ref is not None:
        letters += "b"
        values += (outcome.result_ref.sha256, outcome.result_ref.size_bytes)
    return [encode(outcome), letters, *values]


def _outcome(
    packed: bytes | None, letters: Text, result: bytes | None, summary: bytes | None, freqs: bytes | None
) -> Outcome | None:
    """Return the outcome with the parts that its job's record has letters for: a key without one is an outsider's."""
    if packed is None or not isinstance(letters, str):
        return None
    outcome = _decode_outcome(packed)
    found = {"summary_text": summary, "freqs_csv": freqs}
    meta = {name: part.decode(errors="replace") for name, part in found.items() if part is not None and PARTS[name] in letters}
    if meta:
        outcome = replace(outcome, meta={**outcome.meta, **meta})
    return outcome if result is None or "r" not in letters else replace(outcome, result=result)


def outcome_texts(packed: bytes | None) -> tuple[str, str]:
    """Return the error code and the message."""
    if packed is None:
        return "", ""
    outcome = _decode_outcome(packed)
    return outcome.error_code or "", outcome.message


# ---------------------------------------------------------------------------------------------------- jobs


class LiveWorkers:
    """Patterns of live workers, by the group of their subjects (None: of any group).

    A lease tells Redis only of those workers that its own subjects may name: it costs the same whatever others subscribe to.
    """

    def __init__(self, patterns: Mapping[str, tuple[str, ...]]) -> None:
        self.patterns = patterns

    @cached_property
    def _by_group(self) -> dict[str | None, dict[str, list[str]]]:
        found: dict[str | None, dict[str, list[str]]] = {}
        for worker_id, patterns in self.patterns.items():
            for pattern in patterns:
                found.setdefault(only_group(pattern), {}).setdefault(worker_id, []).append(pattern)
        return found

    def arguments(self, wanted: tuple[str, ...]) -> tuple[Argument, ...]:
        """Return the number of those that subjects of these patterns may name, then for each its worker_id, the number of its
        patterns, and these.
        """
        named: dict[str, list[str]] = {}
        groups: set[str | None] = set()
        for pattern in wanted:
            last = pattern.rpartition(".")[2]
            if last in ("*", ">"):
                groups.add(only_group(pattern))
            elif last in self.patterns:
                named[last] = list(self.patterns[last])
        for group in self._by_group if None in groups else groups and {*groups, None}:
            for worker_id, patterns in self._by_group.get(group, {}).items():
                named.setdefault(worker_id, []).extend(patterns)
        arguments: list[Argument] = [len(named)]
        for worker_id, patterns in named.items():
            arguments += (worker_id, len(patterns), *patterns)
        return tuple(arguments)


def grant(row: Reply) -> Grant:
    job_id, lease_id, attempt, ttl_s, value, payload = row
    facts, spec = split(value)
    return Grant(job_id.decode(), with_payload(spec, payload), facts.submitter, lease_id.decode(), int(attempt), float(ttl_s))


def job(row: Reply) -> Job | None:
    """Return a job made of its keys."""
    if row is None:
        return None
    packed, value, payload, outcome, summary, freqs, result, expires_at = row
    record = read_record(packed)
    facts, packed_spec = split(value)
    rare = record.rare if isinstance(record.rare, dict) else {}
    spec = _decode_spec(packed_spec)
    if payload:
        spec = replace(spec, payload=payload)
    return Job(
        spec=spec,
        state=State(record.state),
        submitter=facts.submitter,
        body_hash=bytes.fromhex(facts.body_hash) if isinstance(facts.body_hash, str) else body_hash(spec),
        created_at=float(record.created_at),
        attempt=int(record.attempt),
        generation=int(rare.get("generation", 0)),
        failures=int(rare.get("failures", 0)),
        losses=int(rare.get("losses", 0)),
        version=int(record.version),
        priority=int(facts.priority),
        not_before=_time(rare.get("not_before", False)),
        not_after=_time(rare.get("not_after", False)),
        lease=_lease(record, rare, expires_at),
        assigned_worker_id=_text(record.assigned_worker_id),
        assigned_at=_time(record.assigned_at),
        started_at=_time(record.started_at),
        finished_at=_time(record.finished_at),
        cancel_requested="cancel_requested" in rare,
        outcome=_outcome(outcome, record.outcome, result, summary, freqs),
        leader_epoch=int(rare.get("leader_epoch", 0)),
        progress=_decode_progress(rare["progress"]) if "progress" in rare else None,
    )


def _lease(record: JobRecord, rare: dict[str, str], expires_at: bytes | None) -> Lease | None:
    if not isinstance(record.lease_id, str):
        return None
    return Lease(
        lease_id=record.lease_id,
        worker_id=_text(record.assigned_worker_id) or "",
        incarnation=_text(record.incarnation) or "",
        attempt=int(record.attempt),
        expires_at=float(expires_at or 0.0),
        on_disconnect=OnDisconnect.KEEP if "keep" in rare else OnDisconnect.STOP,
        reconnect_grace_s=float(rare.get("reconnect_grace_s", 0.0)),
        owner=_text(record.owner) or "",
    )


def incident(packed: bytes) -> JobIncident:
    at, kind, attempt, worker_id, actor, reason = _decode_incident(packed)
    return JobIncident(float(at), kind, attempt, worker_id, actor, reason)


# ---------------------------------------------------------------------------------------------------- tokens


def token_arguments(token: TokenRow) -> list[Argument]:
    """Return field, value, … without empty fields. The scope is JSON."""
    flat: list[Argument] = []
    for name in TokenRow.__struct_fields__:
        value = getattr(token, name)
        if value is not None and value not in ("", ()):
            flat += [name, msgspec.json.encode(value) if name == "scope" else value]
    return flat


def token(flat: Sequence[bytes], is_revoked: bool = False) -> TokenRow | None:
    """Return a token made of field, value, …; None for fields that are none of a token: outsiders may write anything."""
    fields: dict[str, Any] = {"revoked_at": 0.0} if is_revoked else {}
    try:
        pairs = ((name.decode(), value.decode()) for name, value in zip(flat[::2], flat[1::2], strict=True))
        fields |= {name: value for name, value in pairs if name in TokenRow.__struct_fields__}
        if "scope" in fields:
            fields["scope"] = msgspec.json.decode(fields["scope"])
        return msgspec.convert(fields, TokenRow, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def audit_rows(reply: Reply) -> list[AuditRow]:
    """Return entries of the audit from the number of the first one, and the packed entries."""
    found = []
    for place, packed in enumerate(reply[1:]):
        at, actor, action, target, detail = _decode_audit(packed)
        number = reply[0] - place
        found.append(AuditRow(number=number, at=float(at), actor=actor, action=action, target=target, detail=detail))
    return found


def pauses(reply: Reply) -> list[PausedPattern]:
    """Return the pauses of pattern, facts, …, by pattern."""
    found = []
    for pattern, packed in sorted(zip(reply[::2], reply[1::2], strict=True)):
        since, actor, reason = _decode_pause(packed)
        found.append(PausedPattern(pattern.decode(), float(since), actor, reason))
    return found


def cached_file(name: str, packed: bytes) -> CachedFile:
    sha256, size_bytes, target, owner, added_at = _decode_file(packed)
    return CachedFile(name, sha256, int(size_bytes), target, owner, float(added_at))


def cache_summary(cache_id: str, files: int, size_bytes: int, packed: bytes) -> CacheSummary:
    target, owner, created_at = _decode_cache(packed)
    return CacheSummary(cache_id, files, size_bytes, target, owner, float(created_at))


# ---------------------------------------------------------------------------------------------------- plain


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _time(value: Text) -> float | None:
    return float(value) if isinstance(value, str) else None


def _text(value: Text) -> str | None:
    return value if isinstance(value, str) else None
