"""What requests bring, as typed structs; the OpenAPI document is made of these."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

BATCH_MAX = 512
ERROR_CODE_MAX_CHARS = 64

JobId = Annotated[str, Meta(min_length=1, max_length=128)]
LeaseId = Annotated[str, Meta(min_length=1, max_length=200)]


# ---------------------------------------------------------------------------------------------------- apps


class AppJob(msgspec.Struct, kw_only=True):
    """One job of a batch."""

    payload: dict[str, Any]
    job_id: JobId | None = None
    priority: int = 5


class AppJobs(msgspec.Struct):
    """Several jobs, stored in one transaction."""

    jobs: Annotated[list[AppJob], Meta(min_length=1, max_length=BATCH_MAX)]


class Enrolment(msgspec.Struct, kw_only=True):
    """For whom an enrol token is. With `worker_id`, it registers that worker again."""

    label: Annotated[str, Meta(max_length=200)] = ""
    worker_id: Annotated[str, Meta(max_length=64)] = ""


class Registration(msgspec.Struct, kw_only=True):
    """What a worker tells of itself."""

    label: Annotated[str, Meta(max_length=200)] = ""


class LeaseWish(msgspec.Struct, kw_only=True):
    """Without `max_jobs`: one job. With it: up to so many, as a list."""

    max_jobs: Annotated[int, Meta(ge=1, le=BATCH_MAX)] | None = None


class LeaseItem(msgspec.Struct, kw_only=True):
    """One lease of a batch."""

    job_id: JobId
    lease_id: LeaseId


class Renewal(msgspec.Struct, kw_only=True):
    """The lease to renew."""

    lease_id: LeaseId


class Renewals(msgspec.Struct):
    """Several leases."""

    leases: Annotated[list[LeaseItem], Meta(min_length=1, max_length=BATCH_MAX)]


class ResultReport(msgspec.Struct, kw_only=True):
    """What a worker has found out."""

    lease_id: LeaseId
    result: dict[str, Any]
    summary_text: str
    freqs_csv: str
    meta: dict[str, Any] = {}


class ResultOf(ResultReport, kw_only=True):
    """One result of a batch."""

    job_id: JobId


class ResultsOf(msgspec.Struct):
    """Several results."""

    results: Annotated[list[ResultOf], Meta(min_length=1, max_length=BATCH_MAX)]


class FailureReport(msgspec.Struct, kw_only=True):
    """Why an attempt came to nothing. `permanent`: trying again can never help."""

    lease_id: LeaseId
    error_code: Annotated[str, Meta(min_length=1, max_length=ERROR_CODE_MAX_CHARS)]
    error_message: Annotated[str, Meta(max_length=16_384)] = ""
    traceback: str | None = None
    permanent: bool = False


class FailureOf(FailureReport, kw_only=True):
    """One failure of a batch."""

    job_id: JobId


class FailuresOf(msgspec.Struct):
    """Several failures."""

    failures: Annotated[list[FailureOf], Meta(min_length=1, max_length=BATCH_MAX)]


# ---------------------------------------------------------------------------------------------------- /v1


class FileBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An input file, inline."""

    name: str
    data_base64: bytes


class JobBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One job; see docs/concepts.md for each field. The payload as text, or in base64."""

    job_id: JobId | None = None
    subject: str = "job.assign.default"
    exec: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    payload: str | None = None
    payload_base64: bytes | None = None
    files: list[FileBody] = []
    timeout_s: float | None = None
    max_retries: int = 3
    max_losses: int = 3
    backoff_s: float = 10.0
    priority: int = 5
    not_before: float | None = None
    not_after: float | None = None
    permanent_exit_codes: list[int] = []
    retry_exit_codes: list[int] = []
    headers: dict[str, str] = {}
    array_id: str | None = None
    on_failed: str = "return"


class JobsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Several jobs, stored in one transaction."""

    jobs: Annotated[list[JobBody], Meta(min_length=1, max_length=BATCH_MAX)]
    on_failed: str = "return"


class BlobOffer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A blob that the caller is about to send."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]


class BlobWanted(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A blob that the caller is about to read."""

    job_id: JobId
    """Whose input or result it is."""


class JobIds(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which jobs, and why."""

    job_ids: Annotated[list[JobId], Meta(min_length=1, max_length=BATCH_MAX)]
    reason: str = ""


class ReasonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Why."""

    reason: str = ""
