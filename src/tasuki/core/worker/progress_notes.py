"""What a worker's attempts said last about how far they are, and which of that no server was told yet. Pure."""

from __future__ import annotations

from collections.abc import Container

from tasuki.core.job import Progress
from tasuki.core.protocol import PROGRESS_MAX


class ProgressNotes:
    """By lease_id; only the latest word counts."""

    def __init__(self) -> None:
        self._said: dict[str, Progress] = {}
        self._due: dict[str, None] = {}

    def note(self, lease_id: str, progress: Progress) -> None:
        self._said[lease_id] = progress
        self._due[lease_id] = None

    def all_due(self) -> None:
        """Another server knows nothing of it yet."""
        self._due = dict.fromkeys(self._said)

    def to_tell(self, held: Container[str]) -> dict[str, Progress]:
        """What goes with the next Heartbeat, of the attempts that are still held; the rest goes with the one after it."""
        if not self._said:
            return {}
        self._said = {lease_id: said for lease_id, said in self._said.items() if lease_id in held}
        due = [lease_id for lease_id in self._due if lease_id in self._said]
        self._due = dict.fromkeys(due[PROGRESS_MAX:])
        return {lease_id: self._said[lease_id] for lease_id in due[:PROGRESS_MAX]}
