"""The log of refusals: one line at info for each, bounded per peer, without secrets. Agents and dispatchers write theirs with it.

A refusal costs its sender little, so the log is bounded: of each host LINES_MAX lines within INTERVAL_S, and its next line says
how many were left out. Past PEERS_MAX hosts, the others share one bound.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from tasuki.clocks import boot_time
from tasuki.core.access import TOKEN_PREFIXES
from tasuki.errors import TasukiError

LINES_MAX = 10  # enough for an operator to see what goes on
INTERVAL_S = 60.0
PEERS_MAX = 1000  # at the worst 2 MB of log in a minute
TEXT_MAX_CHARS = 300
# Other codes are answers (NOT_FOUND), or this side's own trouble, which is logged where it arises.
LOGGED = frozenset({
    "INVALID", "TOO_LARGE", "CORRUPT", "PROTOCOL", "UNKNOWN_FRAME", "VERSION", "UNAUTHORIZED", "FORBIDDEN", "TOKEN_REVOKED",
    "FENCED", "DISK_FULL", "OVERLOADED", "TOO_MANY_REQUESTS", "FULL", "EXEC_NOT_ALLOWED",
})  # fmt: skip
_secrets = re.compile(rf"(?:{'|'.join(TOKEN_PREFIXES.values())})[A-Za-z0-9_-]+")


class RefusalLog:
    """Writes refusals to a logger. `clock` returns the time in seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = boot_time) -> None:
        self._logger, self._clock = logger, clock
        self._peers: dict[str, tuple[float, int]] = {}
        """The start of each host's interval, and the number of its refusals since."""

    def error(self, peer: str, error: TasukiError, job_id: str = "") -> None:
        """Log an error that a peer is refused with; other errors are not logged."""
        if error.code in LOGGED:
            self.write(peer, error.code, error.message, job_id or str(error.details().get("job_id", "")))

    def write(self, peer: str, code: str, text: str, job_id: str = "") -> None:
        """Log one refusal. `peer` is an address with or without a port, or the name of a worker."""
        left_out = self._left_out(peer.rpartition(":")[0] or peer, self._clock())
        if left_out is not None:
            text = _secrets.sub("tsk_…", text[:TEXT_MAX_CHARS]) + (f" ({left_out} more were not logged)" if left_out else "")
            peer, job_id, text = (part if part.isprintable() else ascii(part)[1:-1] for part in (peer, job_id[:128], text))
            facts = {"code": code, "peer": peer, "job_id": job_id}
            self._logger.info("refused %s of %s, job %s: %s", code, peer, job_id or "-", text, extra=facts)

    def _left_out(self, host: str, now_s: float) -> int | None:
        """Return how many refusals of a host were left out since its last line; None if this one is left out too."""
        if host not in self._peers and len(self._peers) >= PEERS_MAX:
            self._peers = {name: since for name, since in self._peers.items() if now_s - since[0] < INTERVAL_S}
            host = host if len(self._peers) < PEERS_MAX else "others"
        began_s, count = self._peers.get(host, (now_s, 0))
        left_out = 0
        if now_s - began_s >= INTERVAL_S:
            left_out, began_s, count = max(0, count - LINES_MAX), now_s, 0
        self._peers[host] = (began_s, count + 1)
        return left_out if count < LINES_MAX else None
