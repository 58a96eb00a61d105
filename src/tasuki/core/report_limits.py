"""Limits of a worker's reports. Pure.

Reports share a transaction with other peers' jobs, and are tried again if it fails. A report that no store can hold (a number
past 64 bits, endless nesting) must be refused here, or it would fail every turn after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tasuki.core.job import RESULT_INLINE_MAX_BYTES, Outcome
from tasuki.core.protocol import META_MAX_BYTES, Claim, Ending
from tasuki.errors import InvalidInput, TooLarge

NUMBER_MAX = 2**63 - 1  # what an SQL integer holds
META_DEPTH_MAX = 32
MESSAGE_MAX_CHARS = 64 * 1024


def check_attempts(claims: Sequence[Claim | Ending]) -> None:
    """Refuse attempt numbers that no store can hold."""
    for claim in claims:
        if not 0 <= claim.attempt <= NUMBER_MAX:
            raise InvalidInput(f"attempt {claim.attempt} of job {claim.job_id[:128]!r} is not a number that can be stored")


def storable(ending: Ending) -> Outcome:
    """Return the outcome, or a failure with the reason if it cannot be stored.

    One bad report costs its own job an attempt, and nothing else.
    """
    outcome = ending.outcome
    try:
        check_outcome(outcome)
    except InvalidInput as error:
        return Outcome(error_code="BAD_OUTCOME", message=f"the worker's report cannot be stored: {error.message}", permanent=True)
    return outcome


def not_uploaded(outcome: Outcome) -> Outcome:
    """Return the failure that replaces a report whose result is a blob that is not stored."""
    sha256 = outcome.result_ref.sha256 if outcome.result_ref is not None else "?"
    return Outcome(error_code="BAD_OUTCOME", message=f"the worker's result, blob {sha256}, is not here: it was not uploaded")


def check_outcome(outcome: Outcome) -> None:
    """Raise InvalidInput or TooLarge with the reason if the outcome cannot be stored."""
    if outcome.exit_code is not None and not -NUMBER_MAX <= outcome.exit_code <= NUMBER_MAX:
        raise InvalidInput(f"exit_code {outcome.exit_code} is not a number that can be stored")
    if outcome.result is not None and len(outcome.result) > RESULT_INLINE_MAX_BYTES:
        raise TooLarge(
            f"a result of {len(outcome.result)} bytes is too large, the limit is {RESULT_INLINE_MAX_BYTES}; send a blob"
        )
    if outcome.result_ref is not None and not 0 <= outcome.result_ref.size_bytes <= NUMBER_MAX:
        raise InvalidInput(f"a result cannot have {outcome.result_ref.size_bytes} bytes; the size must be 0 to {NUMBER_MAX}")
    if len(outcome.message) > MESSAGE_MAX_CHARS:
        raise TooLarge(f"a message of {len(outcome.message)} characters is too long, the limit is {MESSAGE_MAX_CHARS}")
    if outcome.meta:
        _check_depth(outcome.meta)
        try:
            size = len(msgspec.msgpack.encode(outcome.meta))
        except OverflowError:
            raise InvalidInput("an outcome's meta has a whole number of more than 64 bits; send it as text") from None
        if size > META_MAX_BYTES:
            raise TooLarge(f"an outcome's meta has {size} bytes, the limit is {META_MAX_BYTES}; put large things into the result")


def _check_depth(meta: object) -> None:
    level: list[object] = [meta]
    for _ in range(META_DEPTH_MAX):
        level = [inner for value in level if isinstance(value, dict | list) for inner in _inside(value)]
        if not level:
            return
    raise InvalidInput(f"an outcome's meta may nest {META_DEPTH_MAX} levels, not more")


def _inside(value: dict[object, object] | list[object]) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value
