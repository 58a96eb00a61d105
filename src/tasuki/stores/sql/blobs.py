"""Which bytes exist, in the SQL store: places for those that come, and what others may refer to.

Locks. Whoever writes a reference first asks `_stored_among`, which (where several servers write) share-locks the rows it found
until the end of the turn: nobody can condemn them meanwhile. Who comes while one is being condemned waits, and then finds it
condemned. `sql_collect.py` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tasuki.core.store_messages import BlobClaim, BlobPlace
from tasuki.errors import InterruptCause, TurnInterrupted
from tasuki.stores.generations import lowest_generation
from tasuki.stores.sql.base import SqlBase
from tasuki.stores.sql.database import NOTHING_STORED


def place_of(row: tuple[Any, ...]) -> BlobPlace:
    """Of the columns sha256, size_bytes, generation, stored."""
    sha256, size_bytes, generation, stored = row
    return BlobPlace(sha256, size_bytes, generation, bool(stored))


class SqlBlobs(SqlBase):
    """Verbs of those who bring bytes, and what submit and finish ask before they refer to some."""

    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        if not claims:
            return []
        with self._turn:
            sizes: dict[str, int] = {}
            for claim in claims:
                sizes.setdefault(claim.sha256, claim.size_bytes)
            places = self._touch(sizes)
            new = sorted((sha256, size_bytes) for sha256, size_bytes in sizes.items() if sha256 not in places)
            if new:
                wall = self.clock.wall()
                self._session.changed("place_blobs", (wall, lowest_generation(wall)), new)
                # Read again instead of returned: another server may have placed the same bytes in this moment.
                places |= self._touch([sha256 for sha256, _ in new])
            missing = [sha256 for sha256 in sizes if sha256 not in places]
            if missing:
                story = f"blob {missing[0]} was placed by another server and condemned in this moment"
                raise TurnInterrupted(f"{story}; {NOTHING_STORED}, try again", InterruptCause.CONFLICT)
            return [places[claim.sha256] for claim in claims]

    def _touch(self, sha256s: Iterable[str]) -> dict[str, BlobPlace]:
        parameters = (self.clock.wall(), self._session.texts(sorted(sha256s)))
        return {row[0]: place_of(row) for row in self._session.rows("touch_blobs", parameters)}

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        if not places:
            return []
        with self._turn:
            rows = sorted({(place.sha256, place.generation): place.size_bytes for place in places}.items())
            batch = [(*key, size_bytes) for key, size_bytes in rows]
            stored = {tuple(row) for row in self._session.returned("blobs_stored", (self.clock.wall(),), batch)}
            return [(place.sha256, place.generation) in stored for place in places]

    def _stored_among(self, sha256s: Iterable[str]) -> set[str]:
        """Those that a job may refer to; they stay so until the end of the turn."""
        names = sorted(set(sha256s))
        return {sha256 for (sha256,) in self._session.rows("stored_blobs", (self._session.texts(names),))} if names else set()
