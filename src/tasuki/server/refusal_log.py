"""The log of refusals: one line at info for each, bounded per peer, without secrets. Agents and dispatchers write theirs with it.

A refusal costs its sender little, so the log is bounded: of each peer LINES_MAX lines within INTERVAL_S, and the next line says
how many were left out. A peer is a host, whatever its port. Past PEERS_MAX hosts, the others share one bound.
"""

from __future__ import annotations

import logging
import re

from tasuki.clocks import boot_time
from tasuki.core.access import TOKEN_PREFIXES
from tasuki.errors import TasukiError

LINES_MAX = 10  # of one peer: enough for an operator to see what goes on
INTERVAL_S = 60.0
PEERS_MAX = 1000  # one line of each is 200 KB in a minute, at the worst ten times that
TEXT_MAX_CHARS = 300
LOGGED = frozenset({
    "INVALID", "TOO_LARGE", "CORRUPT", "PROTOCOL", "UNKNOWN_FRAME", "VERSION", "UNAUTHORIZED", "FORBIDDEN", "TOKEN_REVOKED",
    "FENCED", "DISK_FULL", "OVERLOADED", "TOO_MANY_REQUESTS",
})  # fmt: skip
"""Codes of refusals. Others are answers (NOT_FOUND), or this side's own trouble, which is logged where it arises."""
_secrets = re.compile(rf"(?:{'|'.join(TOKEN_PREFIXES.values())})[A-Za-z0-9_-]+")


class RefusalRate:
    """Decides which refusals are logged. Pure: the time is passed in."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[float, int]] = {}
        """The start of each peer's interval, and the number of its refusals since."""

    def admit(self, peer: str, now_s: float) -> int | None:
        """Return how many refusals of this peer were left out since its last line; None if this one is left out too."""
        if peer not in self._peers and len(self._peers) >= PEERS_MAX:
            self._peers = {name: since for name, since in self._peers.items() if now_s - since[0] < INTERVAL_S}
            peer = peer if len(self._peers) < PEERS_MAX else "others"
        began_s, count = self._peers.get(peer, (now_s, 0))
        left_out = 0
        if now_s - began_s >= INTERVAL_S:
            left_out, began_s, count = max(0, count - LINES_MAX), now_s, 0
        self._peers[peer] = (began_s, count + 1)
        return left_out if count < LINES_MAX else None


class RefusalLog:
    """Writes refusals to a logger."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rate = RefusalRate()

    def error(self, peer: str, error: TasukiError, job_id: str = "") -> None:
        """Log an error that a peer is refused with; other errors are not logged."""
        if error.code in LOGGED:
            self.write(peer, error.code, error.message, job_id or str(error.details().get("job_id", "")))

    def write(self, peer: str, code: str, text: str, job_id: str = "") -> None:
        """Log one refusal. `peer` is an address with or without a port, or the name of a worker."""
        left_out = self._rate.admit(peer.rpartition(":")[0] or peer, boot_time())
        if left_out is None:
            return
        text = _secrets.sub("tsk_…", text[:TEXT_MAX_CHARS])
        more = f" ({left_out} more of this peer were not logged)" if left_out else ""
        peer, job_id, text = (part if part.isprintable() else ascii(part)[1:-1] for part in (peer, job_id[:128], text))
        facts = {"code": code, "peer": peer, "job_id": job_id}
        self._logger.info("refused %s of %s, job %s: %s%s", code, peer, job_id or "-", text, more, extra=facts)
