"""Reads that may be slow, answered from a second, read-only connection on its own thread, with what the caller may see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tasuki.core.access import Identity
from tasuki.core.broker.events import Query
from tasuki.core.explain import ExplainContext, explain
from tasuki.core.job import Job, JobIncident
from tasuki.core.store_messages import AuditRow, BlobPlace, Filter, GroupCounts, Page, TokenRow
from tasuki.core.subject import check_pattern
from tasuki.errors import InvalidInput, NotFound

PAGE_MAX = 1000
GET_MAX = 1000
GET_RESULTS_MAX = 64  # results are up to 64 KiB each, and a frame is up to 8 MiB
ARGS_SHOWN_MAX = 20


class Reader(Protocol):
    """The read verbs of a store (see stores/store.py)."""

    def get(self, job_ids: Sequence[str]) -> list[Job | None]: ...
    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page: ...
    def incidents(self, job_id: str) -> list[JobIncident]: ...
    def counts(self) -> dict[str, GroupCounts]: ...
    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None: ...
    def top_band(self) -> int | None: ...
    def epoch(self) -> tuple[int, str]: ...
    def ended_among(self, job_ids: Sequence[str]) -> list[str]: ...
    def token(self, sha256: str) -> TokenRow | None: ...
    def revoked_among(self, token_ids: Sequence[str]) -> list[str]: ...
    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]: ...
    def audit(self, *, limit: int = 100) -> list[AuditRow]: ...
    def close(self) -> None: ...


def answer_query(reader: Reader, query: Query) -> Any:
    """The body of the Reply; errors are the caller's fault and say so."""
    return _ANSWERS[query.verb](reader, query)


def _get(reader: Reader, query: Query) -> Any:
    job_ids = query.params.get("job_ids")
    if not isinstance(job_ids, list) or len(job_ids) > GET_MAX or not all(isinstance(job_id, str) for job_id in job_ids):
        raise InvalidInput(f"get needs job_ids, a list of at most {GET_MAX} texts")
    with_result = bool(query.params.get("result"))
    if with_result and len(job_ids) > GET_RESULTS_MAX:
        raise InvalidInput(f"results of at most {GET_RESULTS_MAX} jobs can be asked for at once, not of {len(job_ids)}")
    jobs = [_visible(job_id, job, query.identity) for job_id, job in zip(job_ids, reader.get(job_ids), strict=True)]
    return [describe(job, with_result=with_result) for job in jobs]


def _visible(job_id: str, job: Job | None, identity: Identity) -> Job:
    if job is None or not identity.may_see(job.submitter, job.spec.subject):
        raise NotFound(f"there is no job {job_id[:128]!r}, or it is not yours")
    return job


def _find(reader: Reader, query: Query) -> Any:
    params = dict(query.params)
    limit, cursor = params.pop("limit", 50), params.pop("cursor", None)
    if not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
        raise InvalidInput(f"limit must be 1 to {PAGE_MAX}, got {str(limit)[:40]}")
    if cursor is not None and not isinstance(cursor, str):
        raise InvalidInput("cursor must be the text that the page before came with")
    unknown = params.keys() - set(Filter.__struct_fields__)
    if unknown:  # left out, it would quietly find everything
        raise InvalidInput(f"find has no filter {min(unknown)[:40]!r}; there are {', '.join(Filter.__struct_fields__)}")
    try:
        filter = msgspec.convert(params, Filter)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"find: {error}") from None
    if filter.subject is not None:
        check_pattern(filter.subject)
    if not query.identity.admin:
        filter = msgspec.structs.replace(filter, submitter=query.identity.name, scope=query.identity.scope)
    page = reader.find(filter, limit=limit, cursor=cursor)
    return {"jobs": [describe(job) for job in page.jobs], "cursor": page.cursor}


def _counts(reader: Reader, query: Query) -> Any:
    query.identity.check_admin("statistics of all groups")
    return {group: msgspec.structs.asdict(counts) for group, counts in reader.counts().items()}


def _explain(reader: Reader, query: Query) -> Any:
    job_id = query.params.get("job_id")
    if not isinstance(job_id, str):
        raise InvalidInput("explain needs job_id, a text")
    job = _visible(job_id, reader.get([job_id])[0], query.identity)
    around = ExplainContext(
        workers=query.workers,
        ahead=reader.ready_ahead(job_id),
        top_band=reader.top_band(),
        trouble=query.trouble,
        now_wall=time.time(),
    )
    return explain(job, reader.incidents(job_id), around)


def _audit(reader: Reader, query: Query) -> Any:
    query.identity.check_admin("the audit of tokens")
    limit = query.params.get("limit", 100)
    if not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
        raise InvalidInput(f"token.audit: limit must be 1 to {PAGE_MAX}, got {limit!r}")
    return [msgspec.structs.asdict(row) for row in reader.audit(limit=limit)]


def _logs(reader: Reader, query: Query) -> Job:
    """Not an answer yet: whose worker is to be asked."""
    job_id = str(query.params["job_id"])
    return _visible(job_id, reader.get([job_id])[0], query.identity)


_ANSWERS = {"get": _get, "find": _find, "counts": _counts, "explain": _explain, "logs": _logs, "token.audit": _audit}

_PLAIN = (
    "attempt",
    "generation",
    "failures",
    "losses",
    "created_at",
    "assigned_at",
    "started_at",
    "finished_at",
    "assigned_worker_id",
    "cancel_requested",
    "not_before",
    "not_after",
    "priority",
    "submitter",
)


def describe(job: Job, *, with_result: bool = False) -> dict[str, Any]:
    """A job for people and programs outside: no payload, no environment values, the result only if asked for."""
    spec, outcome = job.spec, job.outcome
    view: dict[str, Any] = {
        "job_id": job.job_id,
        "state": str(job.state),
        "subject": spec.subject,
        "exec": spec.exec,
        "args": [argument[:200] for argument in spec.args[:ARGS_SHOWN_MAX]],
        "args_count": len(spec.args),
        "files": [file.name for file in spec.files],
        "env_names": sorted(spec.env),
        "payload_bytes": len(spec.payload),
        "timeout_s": spec.timeout_s,
        "max_retries": spec.max_retries,
        "max_losses": spec.max_losses,
        "headers": spec.headers,
        "array_id": spec.array_id,
    }
    view.update((name, getattr(job, name)) for name in _PLAIN)
    view["progress"] = job.progress.fraction if job.progress is not None else None
    view["progress_text"] = job.progress.text if job.progress is not None else ""
    view["outcome"] = None
    if outcome is not None:
        size = outcome.result_ref.size_bytes if outcome.result_ref is not None else len(outcome.result or b"")
        view["outcome"] = {
            "exit_code": outcome.exit_code,
            "error_code": outcome.error_code,
            "message": outcome.message,
            "result_bytes": size,
            "result_sha256": outcome.result_sha256,
            "result_is_blob": outcome.result_ref is not None,
            "meta": outcome.meta,
        }
        if with_result:
            view["outcome"]["result"] = outcome.result
    return view
