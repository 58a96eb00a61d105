"""The blobs of the memory store: rows that say which bytes exist. Touches nothing outside its own memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from tasuki.core.store_messages import BlobClaim, BlobPlace, Condemned, CondemnOrder
from tasuki.stores.common import lowest_generation
from tasuki.stores.memory.records import MemoryRecords
from tasuki.stores.store import Clock


class BlobRow(msgspec.Struct, frozen=True):
    """One generation of a blob."""

    seq: int
    place: BlobPlace
    touched_at: float
    condemned: bool = False

    @property
    def age_key(self) -> tuple[float, int]:
        """The longest untouched first."""
        return self.touched_at, self.seq


class MemoryBlobs(MemoryRecords):
    """The verbs on blobs; `MemoryStore` asks `_missing_among` before it writes a reference."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._blob_rows: dict[str, dict[int, BlobRow]] = {}  # sha256 -> generation
        self._last_blob_seq = 0

    # -- rows -----------------------------------------------------------------------------------------------------
    def _set_blob(self, sha256: str, generation: int, new: BlobRow | None) -> None:
        old = self._blob_rows.get(sha256, {}).get(generation)
        self._undo.append(lambda: self._put_blob(sha256, generation, old))
        self._put_blob(sha256, generation, new)

    def _put_blob(self, sha256: str, generation: int, row: BlobRow | None) -> None:
        rows = self._blob_rows.setdefault(sha256, {})
        if row is None:
            rows.pop(generation, None)
        else:
            rows[generation] = row
        if not rows:
            del self._blob_rows[sha256]

    def _live_blob(self, sha256: str) -> BlobRow | None:
        """The one row that is not condemned."""
        return next((row for row in self._blob_rows.get(sha256, {}).values() if not row.condemned), None)

    def _missing_among(self, sha256s: Iterable[str]) -> tuple[str, ...]:
        """Those that no job may refer to now."""
        rows = ((sha256, self._live_blob(sha256)) for sha256 in sorted(set(sha256s)))
        return tuple(sha256 for sha256, row in rows if row is None or not row.place.stored)

    # -- verbs ----------------------------------------------------------------------------------------------------
    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        rows = [self._live_blob(sha256) for sha256 in sha256s]
        return [row.place if row is not None and row.place.stored else None for row in rows]

    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        with self.turn():
            return [self._place_blob(claim) for claim in claims]

    def _place_blob(self, claim: BlobClaim) -> BlobPlace:
        wall = self.clock.wall()
        row = self._live_blob(claim.sha256)
        if row is None:
            self._last_blob_seq += 1
            generation = max([lowest_generation(wall), *(known + 1 for known in self._blob_rows.get(claim.sha256, ()))])
            row = BlobRow(self._last_blob_seq, BlobPlace(claim.sha256, claim.size_bytes, generation), wall)
        self._set_blob(claim.sha256, row.place.generation, replace(row, touched_at=wall))
        return row.place

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        with self.turn():
            return [self._blob_stored(place) for place in places]

    def _blob_stored(self, place: BlobPlace) -> bool:
        row = self._blob_rows.get(place.sha256, {}).get(place.generation)
        if row is None or row.condemned:
            return False
        size_bytes = row.place.size_bytes if row.place.stored else place.size_bytes
        stored = replace(row.place, stored=True, size_bytes=size_bytes)
        self._set_blob(place.sha256, place.generation, replace(row, place=stored, touched_at=self.clock.wall()))
        return True

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        with self.turn():
            self._check_epoch(epoch)
            rows = sorted((row for rows in self._blob_rows.values() for row in rows.values()), key=lambda row: row.age_key)
            places = [row.place for row in rows if row.condemned][: order.limit]
            total_bytes = sum(row.place.size_bytes for row in rows if not row.condemned)
            for row in rows:
                is_over = order.budget_bytes is not None and total_bytes > order.budget_bytes
                before = max(order.unused_since, order.squeezed_since) if is_over else order.unused_since
                if row.condemned or row.touched_at >= before or row.place.sha256 in self._blobs or len(places) == order.limit:
                    continue
                self._set_blob(row.place.sha256, row.place.generation, replace(row, condemned=True))
                places.append(row.place)
                total_bytes -= row.place.size_bytes
            return Condemned(tuple(places), None if order.budget_bytes is None else total_bytes)

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        with self.turn():
            self._check_epoch(epoch)
            doomed = {(place.sha256, place.generation) for place in places}
            known = [(sha256, number, row) for sha256, number in doomed if (row := self._blob_rows.get(sha256, {}).get(number))]
            gone = [(sha256, number) for sha256, number, row in known if row.condemned]
            for sha256, number in gone:
                self._set_blob(sha256, number, None)
            return len(gone)

    @abstractmethod
    def _check_epoch(self, epoch: int) -> None:
        """StaleEpoch unless this one leads."""
