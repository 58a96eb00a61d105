"""The leader's collection of blobs in the SQL store: condemn what nobody refers to, forget what was deleted.

Why several statements (RELIABILITY §2): a statement sees the references as they were when it began. One that waited for, or ran
beside, a transaction that writes a reference could find none and condemn all the same. So rows are locked first, skipping those
that somebody holds, and only a following statement, which sees what was committed before the lock was had, looks for references.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.core.store_messages import BlobPlace, Condemned, CondemnOrder
from tasuki.stores.sql.blobs import place_of
from tasuki.stores.sql.report import SqlReport

SCAN_MAX = 2_000  # rows that one call looks at, a few ms; the next one goes on where it stopped


class SqlCollect(SqlReport):
    """condemn_blobs and forget_blobs."""

    _condemn_after: tuple[float, int]
    """Where collection goes on: (touched_at, id) of the last row looked at. A hint that may be lost."""

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        with self._turn:
            self._check_epoch(epoch)
            places = [place_of(row) for row in self._session.rows("condemned_blobs", (order.limit,))]
            total_bytes = None
            if order.budget_bytes is not None:
                ((total_bytes,),) = self._session.rows("blob_bytes")
            if len(places) < order.limit:
                fresh = self._condemn(order, order.limit - len(places), total_bytes)
                places += fresh
                if total_bytes is not None:
                    total_bytes -= sum(place.size_bytes for place in fresh)
            return Condemned(tuple(places), None if total_bytes is None else int(total_bytes))

    def _condemn(self, order: CondemnOrder, limit: int, total_bytes: int | None) -> list[BlobPlace]:
        over_bytes = 0
        if order.budget_bytes is not None and total_bytes is not None:
            over_bytes = total_bytes - order.budget_bytes
        before = max(order.unused_since, order.squeezed_since) if over_bytes > 0 else order.unused_since
        chosen = []
        rows = self._session.rows("blobs_by_age", (*self._condemn_after, before, SCAN_MAX))
        self._condemn_after = (0.0, 0)
        for row_id, touched_at, size_bytes, is_used in rows:
            if touched_at >= order.unused_since and over_bytes <= 0:
                break  # from here on only a squeeze would do, and there is room again
            if not is_used:
                chosen.append(row_id)
                over_bytes -= size_bytes
            if len(chosen) == limit:
                self._condemn_after = (touched_at, row_id)
                break
        else:
            if len(rows) == SCAN_MAX:
                self._condemn_after = (rows[-1][1], rows[-1][0])
        if not chosen:
            return []
        locked = [row_id for (row_id,) in self._session.rows("lock_blobs", (self._session.ids(chosen), before))]
        condemned = {row[0]: place_of(row[1:]) for row in self._session.rows("condemn_blobs", (self._session.ids(locked),))}
        return [condemned[row_id] for row_id in chosen if row_id in condemned]

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        with self._turn:
            self._check_epoch(epoch)
            return self._session.changed("forget_blobs", (), sorted({(place.sha256, place.generation) for place in places}))
