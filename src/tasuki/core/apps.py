"""An app: a kind of job with workers of its own, served below /calc/{app} and, where the store is Redis, with keys of its own.

Jobs of an app are the same whether they are made over HTTP or with raw commands in Redis: this module defines them. Pure.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from tasuki.core.job import RESULT_INLINE_MAX_BYTES, JobSpec, Outcome, State
from tasuki.core.protocol import META_MAX_BYTES
from tasuki.core.subject import app_subject
from tasuki.errors import TooLarge

NOTES_MAX_BYTES = 10 * 1024  # of summary_text and freqs_csv; the rest of META_MAX_BYTES is for `meta`
APP_META_MAX_BYTES = 4 * 1024
assert NOTES_MAX_BYTES + APP_META_MAX_BYTES < META_MAX_BYTES
_WHOLE = "document"  # in the notes: the bytes are the document of all three


def outcome_of(result: Any, summary_text: str, freqs_csv: str, meta: dict[str, Any]) -> tuple[Outcome, bytes | None]:
    """Return the outcome of a result, and the bytes of a blob if the result is too large for the row."""
    if len(msgspec.json.encode(meta)) > APP_META_MAX_BYTES:
        raise TooLarge(f"meta has more than {APP_META_MAX_BYTES} bytes; put large things into result")
    parts = {"result": result, "summary_text": summary_text, "freqs_csv": freqs_csv}
    document = msgspec.json.encode(parts, order="sorted")
    sha256 = hashlib.sha256(document).hexdigest()
    plain = msgspec.json.encode(result)
    notes: dict[str, Any] = {"meta": meta} if meta else {}
    size = len(summary_text.encode()) + len(freqs_csv.encode())
    if size <= NOTES_MAX_BYTES and len(plain) <= RESULT_INLINE_MAX_BYTES:
        notes |= {"summary_text": summary_text, "freqs_csv": freqs_csv}
        return Outcome(result=plain, result_sha256=sha256, meta=notes), None
    notes[_WHOLE] = True
    if len(document) <= RESULT_INLINE_MAX_BYTES:
        return Outcome(result=document, result_sha256=sha256, meta=notes), None
    return Outcome(result_sha256=sha256, meta=notes), document


def result_of(data: bytes, notes: dict[str, Any]) -> dict[str, Any]:
    """Return result, summary_text, freqs_csv and meta from the stored bytes and notes."""
    meta = notes.get("meta") or {}
    if notes.get(_WHOLE):
        return {**msgspec.json.decode(data), "meta": meta}
    return {
        "result": json_or_base64(data),
        "summary_text": notes.get("summary_text", ""),
        "freqs_csv": notes.get("freqs_csv", ""),
        "meta": meta,
    }


def json_or_base64(data: bytes) -> Any:
    """Return bytes of a job for a JSON document: JSON as it was sent, other bytes as base64."""
    if not data:
        return None
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {"base64": base64.b64encode(data).decode()}
    return msgspec.Raw(data)


DEFAULT_APP = "tasuki"
"""The prefix of the keys in Redis of a server that serves no app."""
MAX_RETRIES = 3
BACKOFF_S = 10.0

WORDS: dict[str, str] = {
    State.PENDING: "queued",
    State.ASSIGNED: "running",
    State.RUNNING: "running",
    State.ORPHANED: "running",
    State.SUCCEEDED: "finished",
    State.FAILED: "failed",
    State.TIMED_OUT: "failed",
    State.SKIPPED: "failed",
    State.CANCELED: "canceled",
}
"""Names of the states in the API of the apps, over HTTP and in the keys of Redis."""


def template_of(app: str, *, max_retries: int = MAX_RETRIES, backoff_s: float = BACKOFF_S) -> JobSpec:
    """Return the part that all jobs of the app share; job_id, payload and priority are left out."""
    return JobSpec(job_id="", subject=app_subject(app), max_retries=max_retries, backoff_s=backoff_s, delay_first_loss=True)
