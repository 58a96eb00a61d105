"""An app: a kind of job with workers of its own, served below /calc/{app} and, where the store is Redis, with keys of its own.

What a job of an app is, is said here once: whoever makes one, over HTTP or with raw commands in Redis, makes the same. Pure.
"""

from __future__ import annotations

from tasuki.core.job import JobSpec, State
from tasuki.core.subject import app_subject

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
"""What the apps call the states, over HTTP and in the keys of Redis."""


def template_of(app: str, *, max_retries: int = MAX_RETRIES, backoff_s: float = BACKOFF_S) -> JobSpec:
    """A job of the app without what is its own: job_id, payload, priority."""
    return JobSpec(job_id="", subject=app_subject(app), max_retries=max_retries, backoff_s=backoff_s, delay_first_loss=True)
