"""`job_id` in every line that is logged on behalf of a job, whoever writes it: it travels with the task, also into threads."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

_job_id: contextvars.ContextVar[str] = contextvars.ContextVar("job_id", default="")


@contextlib.contextmanager
def on_behalf_of(job_id: str) -> Iterator[None]:
    """What is logged inside, by this task and those that it starts, is about this job."""
    token = _job_id.set(job_id)
    try:
        yield
    finally:
        _job_id.reset(token)


class WithJobId(logging.Filter):
    """For a handler: gives each record its `job_id`, empty where it is about none."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.job_id = _job_id.get()
        return True
