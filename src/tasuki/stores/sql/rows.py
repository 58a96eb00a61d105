"""Conversion between rows of the SQL store and the structs of the core. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tasuki.core.job import LEASED, TERMINAL, BlobRef, Job, JobSpec, Lease, OnDisconnect, Outcome, Progress, State
from tasuki.core.store_messages import JobKind, ReadyQueue, TokenRow, storable_text

encode_spec = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_report_key = msgspec.msgpack.Decoder(tuple[int | None, str | None, str | None]).decode
_encode_json = msgspec.json.Encoder().encode
_decode_patterns = msgspec.json.Decoder(tuple[str, ...]).decode

ABOVE_ALL_TEXT = "\U0010ffff"
NEXT = "\x01"  # appended to a name: the smallest text above it (names have no control characters). PostgreSQL refuses NUL
READY, DELAYED, AHEAD, DUE = 1, 2, 3, 4  # values of the column `ready`; 0 is none of them
FAILED_STATES = TERMINAL - {State.SUCCEEDED}
"""Terminal states without success. Their rows always have an error_code, by which an index finds them."""

_STATES = {state.value: state for state in State}  # an enum's own look-up is three times as slow


FILTERED_COLUMNS = (
    "id, idempotency_key, state, subject, submitter, assigned_worker_id, array_id, created_at, error_code, error_summary"
)
"""Columns that `find` filters by: `{found}` in the statements."""


class JobRow(NamedTuple):
    """A job's row as it is read: the columns of `{columns}` in the statements, in this order.

    `{columns_but_result}` has b"" for an inline result: up to 64 KiB that no verb needs to judge the row.
    """

    id: int
    idempotency_key: str
    state: str
    ready: int
    priority: int
    group: str
    subject: str
    kind: int
    exec: str
    attempt: int
    version: int
    lease_id: str
    assigned_worker_id: str | None
    incarnation: str
    lease_owner: str
    lease_expires_at: float | None
    lease_expired_at: float | None
    on_disconnect: str
    reconnect_grace_s: float
    cancel_requested: int
    assigned_at: float | None
    started_at: float | None
    finished_at: float | None
    exit_code: int | None
    error_code: str | None
    error_summary: str
    permanent: int
    result: bytes | None
    result_sha256: str | None
    result_size_bytes: int | None
    meta: bytes | None
    replaced_report: bytes | None
    not_before: float | None
    not_after: float | None
    generation: int
    failures: int
    losses: int
    max_retries: int
    max_losses: int
    backoff_s: float
    created_at: float
    submitter: str
    leader_epoch: int
    job_definition_id: int | None
    scheduled_for: float | None
    progress: float | None
    progress_text: str
    continuation_check_deadline_at: float | None
    body_hash: bytes
    spec: bytes

    @property
    def job_state(self) -> State:
        return _STATES[self.state]

    @property
    def queue(self) -> ReadyQueue:
        return ReadyQueue(self.subject, JobKind(self.kind), self.exec)

    @property
    def is_unfetched(self) -> bool:
        """Return whether it is a run that was stored ahead, and that no worker has got yet."""
        return self.ready in (AHEAD, DUE)


def _columns(fields: tuple[str, ...]) -> str:
    return ", ".join('"group"' if field == "group" else field for field in fields)


# The test for a result must not read it: for `result IS NULL` SQLite would follow the overflow pages.
_RESULT_UNREAD = {
    "sqlite": "CASE typeof(result) WHEN 'null' THEN NULL ELSE x'' END",
    "postgresql": "CASE WHEN result IS NULL THEN NULL ELSE ''::bytea END",
}


def fragments(vendor: str) -> dict[str, str]:
    """Return the texts that replace `{name}` in the statements."""
    unread = _RESULT_UNREAD[vendor]
    return {
        "columns": _columns(JobRow._fields),
        "columns_but_result": _columns(tuple(unread if field == "result" else field for field in JobRow._fields)),
        "found": FILTERED_COLUMNS,
        "token": _columns(TokenRow.__struct_fields__),
        # PostgreSQL would give the scope as a list, SQLite as text.
        "token_as_read": _columns(TokenRow.__struct_fields__).replace("scope", "CAST(scope AS text)"),
    }


def job_of(row: JobRow) -> Job:
    """Return the job with everything that the store knows."""
    state = _STATES[row.state]
    spec = decode_spec(row.spec)
    return Job(
        spec=spec,
        state=state,
        submitter=row.submitter,
        body_hash=row.body_hash,
        created_at=row.created_at,
        attempt=row.attempt,
        generation=row.generation,
        failures=row.failures,
        losses=row.losses,
        version=row.version,
        priority=row.priority,
        not_before=row.not_before,
        not_after=row.not_after,
        lease=lease_of(row),
        assigned_worker_id=row.assigned_worker_id,
        assigned_at=row.assigned_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested=bool(row.cancel_requested),
        outcome=outcome_of(row),
        leader_epoch=row.leader_epoch,
        job_definition_id=row.job_definition_id,
        scheduled_for=row.scheduled_for,
        progress=Progress(row.progress, row.progress_text) if row.progress is not None else None,
        confirming_until=row.continuation_check_deadline_at,
    )


def lease_of(row: JobRow) -> Lease | None:
    """Return the lease that may still report: that of a leased or orphaned job."""
    state = _STATES[row.state]
    if state not in LEASED and not (state is State.ORPHANED and row.lease_id):
        return None
    over_at = row.lease_expires_at if state in LEASED else row.lease_expired_at
    assert over_at is not None
    grace_s = row.reconnect_grace_s if row.on_disconnect == OnDisconnect.KEEP.value else 0.0
    return Lease(
        lease_id=row.lease_id,
        worker_id=row.assigned_worker_id or "",
        incarnation=row.incarnation,
        attempt=row.attempt,
        expires_at=over_at - grace_s,
        on_disconnect=OnDisconnect(row.on_disconnect),
        reconnect_grace_s=row.reconnect_grace_s,
        owner=row.lease_owner,
    )


def outcome_of(row: JobRow) -> Outcome | None:
    """Return the latest outcome; None if no attempt has ended since the last grant or requeue."""
    if row.state != State.SUCCEEDED.value and row.error_code is None:
        return None
    ref = None
    if row.result is None and row.result_size_bytes is not None:
        assert row.result_sha256 is not None
        ref = BlobRef(row.result_sha256, row.result_size_bytes)
    return Outcome(
        exit_code=row.exit_code,
        error_code=row.error_code or None,
        message=row.error_summary,
        result=row.result,
        result_ref=ref,
        result_sha256=row.result_sha256,
        meta=_decode_meta(row.meta) if row.meta is not None else {},
        permanent=bool(row.permanent),
    )


def result_sha256_of(outcome: Outcome) -> str | None:
    """Return the hash of the result: that of the blob, if the result is one."""
    return outcome.result_ref.sha256 if outcome.result_ref is not None else outcome.result_sha256


def result_size_of(outcome: Outcome) -> int | None:
    """Return the size of the blob or of the inline bytes; None without a result."""
    if outcome.result_ref is not None:
        return outcome.result_ref.size_bytes
    return len(outcome.result) if outcome.result is not None else None


ReportKey = tuple[int | None, str | None, str | None]
"""Identity of a report: exit_code, error_code, result_sha256. Not the message: a program's log tail often differs."""


def report_key_of(outcome: Outcome) -> ReportKey:
    """Return the identity of a report that comes in."""
    return outcome.exit_code, outcome.error_code, result_sha256_of(outcome)


def report_key_in(row: JobRow) -> ReportKey:
    """Return the identity of the report that was recorded last."""
    if row.replaced_report is not None:
        return _decode_report_key(row.replaced_report)
    return row.exit_code, row.error_code or None, row.result_sha256


def replaced_report_of(row: JobRow) -> bytes | None:
    """Return the packed identity of the last attempt's report, if there was one: a cancel is about to replace its outcome."""
    return _encode_meta(report_key_in(row)) if row.error_code is not None and row.lease_id else None


def meta_of(outcome: Outcome) -> bytes | None:
    return _encode_meta(outcome.meta) if outcome.meta else None


def ready_value(not_before: float | None, wall: float) -> int:
    """Return the column `ready` of a PENDING job with this not_before."""
    return READY if not_before is None or not_before <= wall else DELAYED


def outcome_values(outcome: Outcome | None, state: State) -> tuple[Any, ...]:
    """Return the outcome's columns of `settle`. After a failure error_code is never NULL: without a code it is empty."""
    failed = state in FAILED_STATES or (outcome is not None and state is not State.SUCCEEDED)
    outcome = outcome or Outcome()
    return (
        outcome.exit_code,
        (outcome.error_code or "") if failed else outcome.error_code,
        storable_text(outcome.message),
        int(outcome.permanent),
        outcome.result if outcome.result_ref is None else None,
        result_sha256_of(outcome),
        result_size_of(outcome),
        meta_of(outcome),
    )


def token_of(row: tuple[Any, ...]) -> TokenRow:
    """Return the token of a row with the columns of `{token_as_read}`."""
    fields = dict(zip(TokenRow.__struct_fields__, row, strict=True))
    return TokenRow(**{**fields, "scope": _decode_patterns(fields["scope"])})


def token_values(token: TokenRow) -> tuple[Any, ...]:
    """Return the parameters of the statement `add_token`."""
    fields = msgspec.structs.asdict(token)
    return tuple({**fields, "label": storable_text(token.label), "scope": _encode_json(token.scope).decode()}.values())
