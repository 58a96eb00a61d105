"""What answers contain, as typed structs; the OpenAPI document is made of these."""

from __future__ import annotations

from typing import Any

import msgspec


class Error(msgspec.Struct):
    """What was wrong. `code` is stable, `message` is for people."""

    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorReply(msgspec.Struct):
    """Every answer that is not 2xx."""

    error: Error


class AppAccepted(msgspec.Struct, omit_defaults=True):
    """The job is stored. In a batch, what could not be stored has an error."""

    job_id: str
    status: str = ""
    error: Error | None = None


class AppAcceptedMany(msgspec.Struct):
    """In the order of the request."""

    jobs: list[AppAccepted]


class AppStatus(msgspec.Struct, kw_only=True):
    """Where a job stands."""

    job_id: str
    status: str
    """queued, running, finished, failed or canceled"""
    detail: str
    created_at: str
    updated_at: str
    retry_count: int
    """Failures and lost attempts so far."""


class AppResult(msgspec.Struct, kw_only=True):
    """What the worker found out."""

    job_id: str
    status: str
    result: Any
    summary_text: str
    freqs_csv: str
    meta: dict[str, Any]


class Enrolled(msgspec.Struct, kw_only=True):
    """A token that registers one worker, once. Shown this once."""

    enroll_token: str
    token_id: str
    expires_at: str
    ttl_seconds: int


class WorkerRegistered(msgspec.Struct, kw_only=True):
    """The worker's own token. Shown this once."""

    worker_id: str
    worker_token: str
    token_id: str
    expires_at: str
    ttl_seconds: int
    scope: list[str]
    """The subjects that it may take; none: all."""


class WorkerSelf(msgspec.Struct, kw_only=True):
    """What a worker's token is good for. Without `worker_id`: for any worker. Without `expires_at`: until it is revoked."""

    worker_id: str
    token_id: str
    scope: list[str]
    expires_at: str | None


class WorkerRevoked(msgspec.Struct):
    """How many tokens of the worker were still valid."""

    worker_id: str
    revoked: int


class Leased(msgspec.Struct, kw_only=True):
    """One job, to be finished or renewed before the lease ends."""

    job_id: str
    payload: Any
    lease_id: str
    lease_ttl_seconds: float


class LeasedMany(msgspec.Struct):
    """As many as there were, at most as many as were asked for."""

    jobs: list[Leased]


class LeaseRenewed(msgspec.Struct):
    """The lease goes on for so long. `cancel`: stop, and report it as failed with the error_code CANCELED."""

    lease_ttl_seconds: float
    cancel: bool


class BatchItem(msgspec.Struct, omit_defaults=True):
    """One item of a batch: with an error, or as the single form answers."""

    job_id: str
    lease_id: str
    status: int
    error: Error | None = None
    lease_ttl_seconds: float | None = None
    cancel: bool | None = None


class ToldMany(msgspec.Struct):
    """In the order of the request."""

    items: list[BatchItem]


class ResultRecorded(msgspec.Struct):
    """It is stored. The job is finished."""

    job_id: str
    status: str = "finished"


class FailureRecorded(msgspec.Struct):
    """It is stored. The job is queued (it will be tried again), failed or canceled."""

    job_id: str
    status: str
    retry_count: int
    """Failures and lost attempts so far."""


class JobAccepted(msgspec.Struct, omit_defaults=True):
    """The job is stored, now (`created`) or before. In a batch, what could not be stored has an error."""

    job_id: str
    state: str = ""
    created: bool = False
    error: Error | None = None


class AcceptedMany(msgspec.Struct):
    """In the order of the request."""

    jobs: list[JobAccepted]


class LogResponse(msgspec.Struct, kw_only=True):
    """Some of a log, from `offset` on; ask for `next` next."""

    stream: str
    attempt: int
    offset: int
    next: int
    cut_bytes: int
    """How much before `offset` is not kept."""
    data_base64: bytes
    text: str
    state: str
    ended: bool
    """The job is over: the rest stands in its result."""
    progress: float | None
    progress_text: str
    elsewhere: list[str] = []
    """The servers to ask instead: the job runs there."""


class BlobHad(msgspec.Struct):
    """Whether the blob is here; else send it, from this offset on: what is before it came earlier, and was cut off."""

    have: bool
    offset: int = 0


class BlobKept(msgspec.Struct):
    """The blob is durable. A job that names it must follow within the hour."""

    sha256: str
    size_bytes: int


class BlobPart(msgspec.Struct):
    """All before this offset is kept, for a day; go on there."""

    sha256: str
    size_bytes: int
    offset: int


class BlobLink(msgspec.Struct, omit_defaults=True):
    """Where to GET (all) or PUT (these) bytes of a blob: a secret, for `expires_s` seconds."""

    url: str
    expires_s: float
    offset: int
    size_bytes: int
    headers: dict[str, str] = {}
    """To be sent exactly so."""


class BlobDownload(msgspec.Struct, omit_defaults=True):
    """Without a link: this server gives none, GET the blob here."""

    link: BlobLink | None = None


class BlobUpload(msgspec.Struct, omit_defaults=True):
    """What is still to be sent. `have`: nothing, it is here. Not `direct`: this server gives no links, PUT the blob here."""

    have: bool = False
    direct: bool = False
    links: list[BlobLink] = []
    """The next ones; then ask again. None: commit."""
    missing_bytes: int = 0


class BlobTaken(msgspec.Struct):
    """Whether the blob is verified and durable; if not, ask again."""

    stored: bool


class Health(msgspec.Struct):
    """The server is there."""

    status: str = "ok"
