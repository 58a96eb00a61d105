"""Which generation bytes that come (back) get. Pure; shared by all stores, so that they agree.

A generation is never used twice for one sha256: a deleter that wakes up after an hour must not find new bytes under the name
that it was told to delete. While a condemned row stands, the next one is higher by one. Once it is forgotten nothing remembers
it: so generations also grow with time. What was forgotten had been untouched for the grace time of collection before, which is
longer than the second in which two generations could meet.
"""

from __future__ import annotations

GENERATIONS_BEGIN_AT = 1_767_225_600  # 2026-01-01T00:00:00Z; in 32 bits there is room until 2094


def lowest_generation(wall: float) -> int:
    """Of a blob that nothing is known of at this time."""
    return max(0, int(wall) - GENERATIONS_BEGIN_AT)
