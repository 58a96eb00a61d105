"""The verbs of the Redis store as data: the arguments that go to Lua, and the decoding of its answers. Pure.

The comment above each verb in `lua/` has the order of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from tasuki.core.job import Job, JobIncident, Outcome, State, differing_fields
from tasuki.core.store_messages import (
    Assignment,
    AuditRow,
    BlobClaim,
    BlobPlace,
    Canceled,
    Condemned,
    CondemnOrder,
    Grant,
    GroupCounts,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    Promoted,
    Reaped,
    Report,
    ReportAnswer,
    ReportStatus,
    Requeued,
    RequeueOrder,
    Submission,
    Submitted,
    Takes,
    TokenRow,
)
from tasuki.errors import Conflict
from tasuki.stores.common import storable
from tasuki.stores.redis import codec
from tasuki.stores.redis.codec import Argument, JobRecord, Reply, SpecFacts, flag, optional

T = TypeVar("T")

Answered = Submitted | Conflict | MissingBlobs
Random = Callable[[int], bytes]

LEASE_PREFIX_BYTES = 12  # one worker's leases of one request share these; a number follows
ASSIGN_LEASE_BYTES = 16


class ScriptCall(NamedTuple, Generic[T]):
    """One verb with its arguments, and the decoder of its answer."""

    verb: str
    arguments: Sequence[Argument]
    decode: Callable[[Reply], T]
    reads: bool = False
    leads: bool = False
    """True for a verb that carries an epoch, and may be refused."""


class FilterFields(NamedTuple):
    """Fields of a job that a filter looks at."""

    job_id: str
    record: JobRecord
    facts: SpecFacts
    outcome: bytes | None


# ---------------------------------------------------------------------------------------------------- submitters


def submit(submissions: Sequence[Submission], on_failed: str, own_subject: str) -> ScriptCall[list[Answered]]:
    """Store new jobs. A payload has a key of its own if outsiders may look for it there (`own_subject`), or if it is large."""
    places: dict[codec.Place, int] = {}
    jobs: list[Argument] = []
    for submission in submissions:
        spec, number = submission.spec, 0
        is_inside = spec.subject != own_subject and len(spec.payload) <= codec.INSIDE_MAX_BYTES
        value, place = codec.spec_value(spec, submission.submitter, submission.body_hash, with_payload=is_inside)
        if spec.not_before is None and spec.not_after is None and not spec.files:
            number = places.setdefault(place, len(places) + 1)
        jobs += (number, value, b"" if is_inside else spec.payload)
    arguments: list[Argument] = [on_failed, len(places)]
    for place in places:
        arguments += (*place, codec.record_head(place[1], False), codec.record_head(place[1], True))
    arguments += (len(submissions), *(submission.spec.job_id for submission in submissions), *jobs)

    def decode(reply: Reply) -> list[Answered]:
        return [_submitted(submission, row) for submission, row in zip(submissions, reply, strict=True)]

    return ScriptCall("submit", arguments, decode)


def _submitted(submission: Submission, row: Reply) -> Answered:
    spec = submission.spec
    if row == b"created":
        return Submitted(spec.job_id, created=True)
    if row[0] == b"missing":
        return MissingBlobs(spec.job_id, tuple(sha256.decode() for sha256 in row[1:]))
    job = codec.job(row[1])
    assert job is not None
    if job.body_hash != submission.body_hash:
        return Conflict(spec.job_id, differing_fields(job.spec, spec), (job.submitter, job.spec.subject))
    return Submitted.before(job)


def cancel(orders: Sequence[tuple[str, str, str]]) -> ScriptCall[list[Canceled]]:
    """Cancel jobs; orders are (job_id, actor, reason)."""
    arguments: list[Argument] = [len(orders)]
    for job_id, actor, reason in orders:
        outcome = Outcome(error_code="CANCELED", message=storable(reason) or f"canceled by {actor}")
        arguments += (job_id, actor, storable(reason), codec.encode(outcome))

    def decode(reply: Reply) -> list[Canceled]:
        return [_canceled(*row) for row in reply]

    return ScriptCall("cancel", arguments, decode)


def _canceled(
    state: bytes | None, requested: bytes | None = None, worker_id: bytes | None = None, lease_id: bytes | None = None
) -> Canceled:
    return Canceled(_state(state), requested is not None, codec.text(worker_id), codec.text(lease_id))


def requeue(orders: Sequence[RequeueOrder]) -> ScriptCall[list[Requeued]]:
    arguments: list[Argument] = [len(orders)]
    for order in orders:
        generation = "" if order.generation is None else order.generation
        arguments += (order.job_id, order.actor, storable(order.reason), generation)
    return ScriptCall("requeue", arguments, lambda reply: [Requeued(row[0] == b"1", _state(row[1])) for row in reply])


# ---------------------------------------------------------------------------------------------------- workers


def lease(requests: Sequence[LeaseRequest], random: Random) -> ScriptCall[list[list[Grant]]]:
    # Requests of one turn mostly share one map of live workers, and idle workers ask for the same: both go once.
    maps = {id(request.live_workers): request.live_workers for request in requests}
    number_of = {key: number for number, key in enumerate(maps, 1)}
    arguments: list[Argument] = [len(maps)]
    for live_workers in maps.values():
        arguments.append(len(live_workers))
        for worker_id, patterns in live_workers.items():
            arguments += (worker_id, len(patterns), *patterns)
    terms: dict[tuple[Argument, ...], int] = {}
    secrets = random(LEASE_PREFIX_BYTES * len(requests)).hex("-", LEASE_PREFIX_BYTES).split("-")
    asking: list[Argument] = []
    for request, secret in zip(requests, secrets, strict=True):
        number = terms.setdefault(_terms(request, number_of[id(request.live_workers)]), len(terms) + 1)
        asking += (request.worker_id, secret, number, len(request.job_ids), *request.job_ids)
    arguments += (len(terms), *(part for shared in terms for part in shared), len(requests), *asking)

    def decode(reply: Reply) -> list[list[Grant]]:
        return [
            [
                codec.grant((job_id, lease_id, attempt, request.ttl_s, spec, payload))
                for job_id, lease_id, attempt, spec, payload in batched(flat, 5)
            ]
            for request, flat in zip(requests, reply, strict=True)
        ]

    return ScriptCall("lease", arguments, decode)


def _terms(request: LeaseRequest, live_workers: int) -> tuple[Argument, ...]:
    return (
        request.incarnation,
        request.ttl_s,
        request.on_disconnect.value,
        request.reconnect_grace_s,
        _KINDS[request.takes],
        request.limit,
        live_workers,
        len(request.patterns),
        *request.patterns,
    )


_KINDS = {takes: "".join(str(kind.value) for kind in takes.kinds) for takes in Takes}


def _grant_lists(reply: Reply) -> list[list[Grant]]:
    return [[codec.grant(row) for row in rows] for rows in reply]


def batched(flat: Sequence[T], width: int) -> Iterator[tuple[T, ...]]:
    """Return pieces of the same width."""
    return zip(*(iter(flat),) * width, strict=True)


def held(holders: Sequence[tuple[str, str]]) -> ScriptCall[list[list[Grant]]]:
    return ScriptCall("held", [len(holders), *(part for holder in holders for part in holder)], _grant_lists, reads=True)


def _key_of(claim: HeldLease) -> tuple[Argument, ...]:
    return claim.job_id, claim.worker_id, claim.incarnation, claim.lease_id, claim.attempt


def start(claims: Sequence[HeldLease]) -> ScriptCall[list[LeaseStatus]]:
    arguments = [len(claims), *(part for claim in claims for part in (*_key_of(claim), claim.ttl_s))]
    return ScriptCall("start", arguments, _statuses)


def renew(claims: Sequence[HeldLease]) -> ScriptCall[list[LeaseStatus]]:
    arguments: list[Argument] = [len(claims)]
    for claim in claims:
        arguments += (*_key_of(claim), claim.ttl_s, "" if claim.progress is None else msgspec.json.encode(claim.progress))
    return ScriptCall("renew", arguments, _statuses)


def _statuses(reply: Reply) -> list[LeaseStatus]:
    return [LeaseStatus(row.decode()) for row in reply]


def release(claims: Sequence[HeldLease], *, reason: str = "") -> ScriptCall[list[bool]]:
    arguments: list[Argument] = [storable(reason), len(claims)]
    for claim in claims:
        outcome = Outcome(error_code="CANCELED", message=f"canceled; {claim.worker_id} had not started it")
        arguments += (*_key_of(claim), codec.encode(outcome))
    return ScriptCall("release", arguments, flags)


def finish(reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
    return _report("finish", reports)


def fail(reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
    return _report("fail", reports)


def _report(verb: str, reports: Sequence[Report]) -> ScriptCall[list[ReportAnswer]]:
    arguments: list[Argument] = [len(reports), *(item.job_id for item in reports)]
    for item in reports:
        outcome = item.outcome
        if "\0" in outcome.message:
            outcome = replace(outcome, message=storable(outcome.message))
        arguments += (
            item.worker_id,
            item.lease_id,
            item.attempt,
            optional(item.started_at),
            codec.report_key(item, verb),
            *codec.outcome_arguments(outcome),
        )
        if verb == "fail":
            words = outcome.message or outcome.error_code or "failed"
            arguments += (outcome.error_code or "", flag(outcome.permanent), words)
    return ScriptCall(verb, arguments, _recorded)


_SUCCEEDED = ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED)


def _recorded(reply: Reply) -> list[ReportAnswer]:
    return [
        _SUCCEEDED if row == b"recorded" else ReportAnswer(ReportStatus(row[0].decode()), _state(row[1]), row[2].decode())
        for row in reply
    ]


# ---------------------------------------------------------------------------------------------------- the leader


def assign(assignments: Sequence[Assignment], epoch: int, random: Random) -> ScriptCall[list[Grant | None]]:
    arguments: list[Argument] = [epoch, len(assignments)]
    for item in assignments:
        arguments += (
            item.job_id,
            item.worker_id,
            item.incarnation,
            item.ttl_s,
            item.on_disconnect.value,
            item.reconnect_grace_s,
            random(ASSIGN_LEASE_BYTES).hex(),
        )
    return ScriptCall("assign", arguments, lambda reply: [None if row is None else codec.grant(row) for row in reply], leads=True)


def take_over(holder: str, epoch: int) -> ScriptCall[bool]:
    return ScriptCall("take_over", [holder, epoch], is_one)


def reap(*, epoch: int, limit: int = 256) -> ScriptCall[list[Reaped]]:
    def decode(reply: Reply) -> list[Reaped]:
        return [
            Reaped(job_id.decode(), State(state.decode()), worker_id.decode(), int(attempt), reason.decode())
            for job_id, state, worker_id, attempt, reason in reply
        ]

    return ScriptCall("reap", [epoch, limit], decode, leads=True)


def promote(*, epoch: int, limit: int = 1024) -> ScriptCall[Promoted]:
    def decode(reply: Reply) -> Promoted:
        return Promoted(tuple(subject.decode() for subject in reply[1:]), int(reply[0]))

    return ScriptCall("promote", [epoch, limit], decode, leads=True)


def skip(*, epoch: int, limit: int = 1024) -> ScriptCall[list[str]]:
    return ScriptCall("skip", [epoch, limit], texts, leads=True)


def prune(*, before: float, epoch: int, limit: int = 256) -> ScriptCall[int]:
    return ScriptCall("prune", [before, epoch, limit], int, leads=True)


def condemn_blobs(order: CondemnOrder, *, epoch: int) -> ScriptCall[Condemned]:
    def decode(reply: Reply) -> Condemned:
        total_bytes, rows = reply
        places = tuple(
            BlobPlace(sha256.decode(), int(size_bytes), int(generation), stored == b"1")
            for sha256, generation, size_bytes, stored in rows
        )
        return Condemned(places, None if order.budget_bytes is None else int(total_bytes))

    arguments = [epoch, order.unused_since, optional(order.budget_bytes), order.squeezed_since, order.limit]
    return ScriptCall("condemn_blobs", arguments, decode, leads=True)


def forget_blobs(places: Sequence[BlobPlace], *, epoch: int) -> ScriptCall[int]:
    doomed = dict.fromkeys((place.sha256, place.generation) for place in places)
    return ScriptCall("forget_blobs", [epoch, len(doomed), *(part for place in doomed for part in place)], int, leads=True)


# ---------------------------------------------------------------------------------------------------- readers


def get(job_ids: Sequence[str]) -> ScriptCall[list[Job | None]]:
    return ScriptCall("get", [len(job_ids), *job_ids], lambda reply: [codec.job(row) for row in reply], reads=True)


def incidents(job_id: str) -> ScriptCall[list[JobIncident]]:
    return ScriptCall("incidents", [job_id], lambda reply: [codec.incident(row) for row in reply], reads=True)


def epoch() -> ScriptCall[tuple[int, str]]:
    return ScriptCall("epoch", [], lambda reply: (int(reply[0]), reply[1].decode()), reads=True)


def next_due() -> ScriptCall[tuple[float | None, float | None]]:
    def decode(reply: Reply) -> tuple[float | None, float | None]:
        lease, delay = (None if at is None else float(at) for at in reply)
        return lease, delay

    return ScriptCall("next_due", [], decode, reads=True)


def find(below: str | None, count: int, *, with_texts: bool) -> ScriptCall[list[FilterFields]]:
    """Read the newest jobs below a seq, with the fields that a filter looks at."""

    def decode(reply: Reply) -> list[FilterFields]:
        return [
            FilterFields(job_id.decode(), codec.read_record(record), codec.split(spec)[0], outcome)
            for job_id, record, spec, outcome in reply
        ]

    return ScriptCall("find", [optional(below), count, flag(with_texts)], decode, reads=True)


def counts() -> ScriptCall[dict[str, GroupCounts]]:
    def decode(reply: Reply) -> dict[str, GroupCounts]:
        groups: dict[str, dict[str, int]] = {}
        for field, number in zip(reply[::2], reply[1::2], strict=True):
            counter, _, group = field.decode().partition(":")
            groups.setdefault(group, {})[counter] = int(number)
        return {group: GroupCounts(**counters) for group, counters in groups.items()}

    return ScriptCall("counts", [], decode, reads=True)


def ready_ahead(job_id: str) -> ScriptCall[int | None]:
    return ScriptCall("ready_ahead", [job_id], _optional_int, reads=True)


def top_band() -> ScriptCall[int | None]:
    return ScriptCall("top_band", [], _optional_int, reads=True)


def ended_among(job_ids: Sequence[str]) -> ScriptCall[list[str]]:
    return _some_of("ended_among", job_ids)


def revoked_among(token_ids: Sequence[str]) -> ScriptCall[list[str]]:
    return _some_of("revoked_among", token_ids)


def _some_of(verb: str, names: Sequence[str]) -> ScriptCall[list[str]]:
    """Call a verb that returns some of the names."""
    unique = dict.fromkeys(names)
    return ScriptCall(verb, [len(unique), *unique], texts, reads=True)


# ---------------------------------------------------------------------------------------------------- blobs and tokens


def blob_places(sha256s: Sequence[str]) -> ScriptCall[list[BlobPlace | None]]:
    def decode(reply: Reply) -> list[BlobPlace | None]:
        return [
            None if row is None else BlobPlace(sha256, int(row[0]), int(row[1]), stored=True)
            for sha256, row in zip(sha256s, reply, strict=True)
        ]

    return ScriptCall("blob_places", [len(sha256s), *sha256s], decode, reads=True)


def blob_owners(sha256: str, *, limit: int = 16) -> ScriptCall[list[str]]:
    return ScriptCall("blob_owners", [sha256, limit], texts, reads=True)


def place_blobs(claims: Sequence[BlobClaim]) -> ScriptCall[list[BlobPlace]]:
    def decode(reply: Reply) -> list[BlobPlace]:
        return [
            BlobPlace(claim.sha256, int(size_bytes), int(generation), stored == b"1")
            for claim, (size_bytes, generation, stored) in zip(claims, reply, strict=True)
        ]

    arguments = [len(claims), *(part for claim in claims for part in (claim.sha256, claim.size_bytes))]
    return ScriptCall("place_blobs", arguments, decode)


def blobs_stored(places: Sequence[BlobPlace]) -> ScriptCall[list[bool]]:
    arguments = [len(places), *(part for place in places for part in (place.sha256, place.generation, place.size_bytes))]
    return ScriptCall("blobs_stored", arguments, flags)


def add_token(token: TokenRow) -> ScriptCall[bool]:
    token = replace(token, label=storable(token.label))

    def decode(reply: Reply) -> bool:
        return reply == [b"added"] or [codec.token(row) for row in reply] == [token]

    fields = codec.token_arguments(token)
    detail = f"{token.kind} {token.label}".rstrip()
    return ScriptCall("add_token", [token.token_id, token.sha256, token.created_by, detail, len(fields), *fields], decode)


def token(sha256s: Sequence[str]) -> ScriptCall[list[TokenRow | None]]:
    return ScriptCall("token", [len(sha256s), *sha256s], lambda reply: [codec.token(row) for row in reply], reads=True)


def tokens() -> ScriptCall[list[TokenRow]]:
    return ScriptCall("tokens", [], lambda reply: [row for flat in reply if (row := codec.token(flat)) is not None], reads=True)


def revoke_token(token_id: str, *, actor: str) -> ScriptCall[bool]:
    return ScriptCall("revoke_token", [token_id, actor], is_one)


def audit(*, limit: int = 100) -> ScriptCall[list[AuditRow]]:
    return ScriptCall("audit", [limit], lambda reply: [codec.audit_row(row) for row in reply], reads=True)


# ---------------------------------------------------------------------------------------------------- plain answers


def texts(reply: Reply) -> list[str]:
    return [row.decode() for row in reply]


def flags(reply: Reply) -> list[bool]:
    return [row == b"1" for row in reply]


def is_one(reply: Reply) -> bool:
    return bool(reply == b"1")


def _optional_int(reply: Reply) -> int | None:
    return None if reply is None else int(reply)


def _state(state: bytes | None) -> State | None:
    return None if state is None else State(state.decode())
