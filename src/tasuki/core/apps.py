"""An app: a kind of job with workers of its own, served below /calc/{app} and, where the store is Redis, with keys of its own.

Jobs of an app are the same whether they are made over HTTP or with raw commands in Redis: this module defines them. Pure.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import asdict

from tasuki.core.decoding import decodable
from tasuki.core.job import LEASED, RESULT_INLINE_MAX_BYTES, JobIncident, JobSpec, Outcome, State
from tasuki.core.protocol import META_MAX_BYTES
from tasuki.core.subject import app_subject
from tasuki.errors import TooLarge

NOTES_MAX_BYTES = 10 * 1024  # of summary_text and freqs_csv; the rest of META_MAX_BYTES is for `meta`
APP_META_MAX_BYTES = 4 * 1024
assert NOTES_MAX_BYTES + APP_META_MAX_BYTES < META_MAX_BYTES
_WHOLE = "document"  # in the notes: the bytes are the document of all three

_NO_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def outcome_of(result: Any, summary_text: str, freqs_csv: str, meta: dict[str, Any]) -> tuple[Outcome, bytes | None]:
    """Return the outcome of a result, and the bytes of a blob if the result is too large for the row."""
    if len(msgspec.json.encode(meta)) > APP_META_MAX_BYTES:
        raise TooLarge(f"meta has more than {APP_META_MAX_BYTES} bytes; put large things into result")
    document = _document(result, summary_text, freqs_csv)
    sha256 = hashlib.sha256(document).hexdigest()
    plain = msgspec.json.encode(result)
    notes: dict[str, Any] = {"meta": meta} if meta else {}
    left, small = NOTES_MAX_BYTES, dict[str, str]()
    for name, text in (("summary_text", summary_text), ("freqs_csv", freqs_csv)):
        if (size := len(text.encode())) <= left:
            left, small[name] = left - size, text
    notes |= small
    if len(small) == 2 and len(plain) <= RESULT_INLINE_MAX_BYTES:
        return Outcome(result=plain, result_sha256=sha256, meta=notes), None
    notes[_WHOLE] = True
    if len(document) <= RESULT_INLINE_MAX_BYTES:
        return Outcome(result=document, result_sha256=sha256, meta=notes), None
    return Outcome(result_sha256=sha256, meta=notes), document


def _document(result: Any, summary_text: str, freqs_csv: str) -> bytes:
    return msgspec.json.encode({"result": result, "summary_text": summary_text, "freqs_csv": freqs_csv}, order="sorted")


def is_hash_of_all(outcome: Outcome) -> bool:
    """Return whether `result_sha256` is the hash of the whole document of an app's result, whose summary and table are notes."""
    summary_text, freqs_csv = outcome.meta.get("summary_text"), outcome.meta.get("freqs_csv")
    if outcome.result is None or not isinstance(summary_text, str) or not isinstance(freqs_csv, str):
        return False
    try:
        document = _document(msgspec.json.decode(outcome.result), summary_text, freqs_csv)
    except _NO_JSON:
        return False
    return hashlib.sha256(document).hexdigest() == outcome.result_sha256


@decodable
class AppDocument(msgspec.Struct):
    """The parts of a result whose bytes are the document of all three."""

    result: Any = None
    summary_text: str = ""
    freqs_csv: str = ""


def result_of(data: bytes, notes: dict[str, Any]) -> dict[str, Any]:
    """Return result, summary_text, freqs_csv and meta from the stored bytes and notes.

    Workers of other kinds may finish an app's job too: notes that do not fit are left out, and bytes are shown as what they are.
    """
    parts = None
    if notes.get(_WHOLE):
        with suppress(*_NO_JSON):
            parts = msgspec.json.decode(data, type=AppDocument)
    if parts is None:
        texts = [note if isinstance(note := notes.get(name), str) else "" for name in ("summary_text", "freqs_csv")]
        parts = AppDocument(json_or_base64(data), *texts)
    meta = notes.get("meta")
    return {**msgspec.structs.asdict(parts), "meta": meta if isinstance(meta, dict) else {}}


def json_or_base64(data: bytes) -> Any:
    """Return bytes of a job for a JSON document: JSON as it was sent, other bytes as base64."""
    if not data:
        return None
    try:
        msgspec.json.decode(data)
    except _NO_JSON:
        return {"base64": base64.b64encode(data).decode()}
    return msgspec.Raw(data)


DEFAULT_APP = "tasuki"
"""The prefix of the keys in Redis of a server that serves no app."""


class AppLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the jobs of an app that name none of their own."""

    max_retries: int = 3
    backoff_s: float = 10.0
    timeout_s: float | None = None


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

_PASSING = ("fenced", "cancel_requested", "restored")  # incidents that change nothing of where a job stands


def detail_of(state: State, incidents: Sequence[JobIncident], message: str, cancel_reason: str) -> str:
    """Return why a job of an app stands where it stands; Redis keeps the same text in `{app}:status:{id}`.

    `message` is that of its outcome, `cancel_reason` was given with the cancel of a leased job.
    """
    last = next((incident for incident in reversed(incidents) if incident.kind not in _PASSING), None)
    if state is State.SUCCEEDED:
        return ""
    if state in LEASED or last is None or last.kind == "requeued":
        return cancel_reason
    return "; ".join(filter(None, (cancel_reason, last.reason or message)))


def template_of(app: str, limits: AppLimits | None = None) -> JobSpec:
    """Return the part that all jobs of the app share; job_id, payload and priority are left out."""
    return JobSpec(job_id="", subject=app_subject(app), delay_first_loss=True, **asdict(limits or AppLimits()))
