"""Numbers in workers' reports, checked at the door: one that no store can hold would fail the whole turn, everybody's,
and again with every try, because what workers reported is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasuki.core.protocol import Heartbeat, JobsFinished, JobsReleased, JobsStarted, Message
from tasuki.errors import ProtocolError

INTEGER_MAX = (1 << 63) - 1  # of SQLite and PostgreSQL


def check_reports(message: Message) -> None:
    """ProtocolError if a number in it is outside of what can be stored. Other messages pass."""
    check = _CHECKS.get(type(message))
    if check is not None:
        check(message)


def _check_claims(message: Any) -> None:
    for claim in message.claims:
        if not 0 <= claim.attempt <= INTEGER_MAX:
            raise ProtocolError(f"attempt {claim.attempt} of job {claim.job_id[:128]!r} is not possible")


def _check_endings(message: JobsFinished) -> None:
    for ending in message.endings:
        code, ref = ending.outcome.exit_code, ending.outcome.result_ref
        if (
            not 0 <= ending.attempt <= INTEGER_MAX
            or (code is not None and not -INTEGER_MAX <= code <= INTEGER_MAX)
            or (ref is not None and not 0 <= ref.size_bytes <= INTEGER_MAX)
        ):
            raise ProtocolError(f"attempt, exit_code or size_bytes of job {ending.job_id[:128]!r} is not possible")


_CHECKS: dict[type, Callable[[Any], None]] = {
    JobsFinished: _check_endings,
    JobsStarted: _check_claims,
    JobsReleased: _check_claims,
    Heartbeat: _check_claims,
}
