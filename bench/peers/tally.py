"""The finish line of a round: counts empty jobs inside the worker process and tells the client when the last is done.

Imported by every task module, in the worker and in the client. The empty handler pays one `next()` per job for it
(about 50 ns) and no round trip; only the arming and the last job of a round write to Redis. That needs all jobs of a
round to run in one process, which is also what is being compared. It may touch two Redis lists, READY_KEY and
DONE_KEY, nothing else.
"""

from __future__ import annotations

import itertools
import os

import redis

READY_KEY = "peers:ready"
DONE_KEY = "peers:done"

# The peers' own command lines import the task modules, so the environment is the only way to hand them the address.
REDIS_URL = os.environ["PEERS_REDIS_URL"]
VARIANT = os.environ["PEERS_VARIANT"]


class Tally:
    """Counts finishes in this process; safe for threads, since `next()` on a count is one step under the GIL."""

    def __init__(self) -> None:
        self._finishes = itertools.count(1)
        self._jobs = 0

    def arm(self, jobs: int) -> None:
        """Begin a round of that many jobs, and tell the client that this worker is ready."""
        self._finishes = itertools.count(1)
        self._jobs = jobs
        _push(READY_KEY, jobs)

    def finish_one(self) -> None:
        """Count one finished job; the last one of the round is announced."""
        if next(self._finishes) == self._jobs:
            _push(DONE_KEY, self._jobs)


def _push(key: str, jobs: int) -> None:
    """Open a connection for one push: a kept one would be shared with forked children."""
    with redis.Redis.from_url(REDIS_URL) as connection:
        connection.rpush(key, jobs)


tally = Tally()
