"""An app's job and result as bytes: payload <-> JobSpec, {result, summary_text, freqs_csv, meta} <-> Outcome. Pure.

`result` is kept as JSON in the outcome's bytes, `summary_text` and `freqs_csv` beside it in its notes, where the Redis store
finds them and gives each a key of its own. If they are too large for notes, or the result for the row, one document of all
three takes the place of the bytes. Either way `result_sha256` is the hash of all three, without `meta`: the store itself knows
a repeat by it.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from tasuki.core.job import RESULT_INLINE_MAX_BYTES, Outcome
from tasuki.core.protocol import META_MAX_BYTES
from tasuki.errors import TooLarge

NOTES_MAX_BYTES = 10 * 1024  # of summary_text and freqs_csv; the rest of META_MAX_BYTES is for `meta`
APP_META_MAX_BYTES = 4 * 1024
assert NOTES_MAX_BYTES + APP_META_MAX_BYTES < META_MAX_BYTES
_WHOLE = "document"  # in the notes: the bytes are the document of all three


def payload_of(payload: bytes) -> Any:
    """A job's payload for JSON: as it was sent. What is no JSON was made by somebody else, and goes as base64."""
    return _json_or_base64(payload)


def outcome_of(result: Any, summary_text: str, freqs_csv: str, meta: dict[str, Any]) -> tuple[Outcome, bytes | None]:
    """What is reported; with the bytes of a blob if it is too large for the row."""
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
    """The four fields, from what was stored."""
    meta = notes.get("meta") or {}
    if notes.get(_WHOLE):
        return {**msgspec.json.decode(data), "meta": meta}
    return {
        "result": _json_or_base64(data),
        "summary_text": notes.get("summary_text", ""),
        "freqs_csv": notes.get("freqs_csv", ""),
        "meta": meta,
    }


def _json_or_base64(data: bytes) -> Any:
    if not data:
        return None
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {"base64": base64.b64encode(data).decode()}
    return msgspec.Raw(data)
