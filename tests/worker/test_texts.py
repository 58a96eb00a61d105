"""Texts of handlers that are no Unicode must not keep a report from being sent."""

from __future__ import annotations

from tasuki.core.protocol import Ending, JobsFinished
from tasuki.wire.messages import encode
from tasuki.worker.attempt import handler_failure


def test_an_error_with_a_lone_surrogate_can_be_reported() -> None:
    outcome = handler_failure(ValueError("bad name \udcff"))

    assert outcome.message == r"ValueError: bad name \udcff"
    assert encode(JobsFinished([Ending("a", "lease", 1, outcome)]))
