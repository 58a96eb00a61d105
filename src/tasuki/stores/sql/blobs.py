"""The verbs of the SQL store on blobs: places for bytes that come, caches, and the leader's collection of what nothing refers to.

Locks. Before a verb writes a reference it calls `Transaction.stored_among`, which (where several servers write) share-locks the
rows that it found until the transaction ends: nobody can condemn them meanwhile. A writer that comes while a blob is being
condemned waits, and then finds it condemned.

Collection takes several statements, because a statement sees the references as they were when it began: one that waited for, or
ran beside, a transaction that writes a reference could find none and condemn all the same. So rows are locked first, skipping
locked ones, and only the next statement, which sees what was committed before the lock was granted, looks for references.

A caller that adds files to a cache, or removes it, locks its id first, and then judges by what the cache has: no key of the
database says that `a` and `a/b` cannot both be there, or that all files have one target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tasuki.core.job import BlobRef
from tasuki.core.store_messages import (
    BlobClaim,
    BlobPlace,
    CachedFile,
    CacheEntry,
    CacheOrder,
    CacheStored,
    Condemned,
    CondemnOrder,
    MissingBlobs,
)
from tasuki.errors import CacheConflict, InterruptCause, TurnInterrupted
from tasuki.stores.common import judge_cache, judge_names, lowest_generation
from tasuki.stores.sql.database import NOTHING_STORED, Transaction

SCAN_MAX = 2_000  # rows that one call looks at, a few ms; the next one continues where it stopped


def place_of(row: tuple[Any, ...]) -> BlobPlace:
    """Return the place of a row (sha256, size_bytes, generation, stored)."""
    sha256, size_bytes, generation, stored = row
    return BlobPlace(sha256, size_bytes, generation, bool(stored))


def place_blobs(tx: Transaction, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
    sizes: dict[str, int] = {}
    for claim in claims:
        sizes.setdefault(claim.sha256, claim.size_bytes)
    places = _touch(tx, sizes)
    new = sorted((sha256, size_bytes) for sha256, size_bytes in sizes.items() if sha256 not in places)
    if new:
        wall = tx.clock.wall()
        tx.session.changed("place_blobs", (wall, lowest_generation(wall)), new)
        # Read again instead of returned: another server may have placed the same bytes at this moment.
        places |= _touch(tx, [sha256 for sha256, _ in new])
    missing = [sha256 for sha256 in sizes if sha256 not in places]
    if missing:
        story = f"blob {missing[0]} was placed by another server and condemned at this moment"
        raise TurnInterrupted(f"{story}; {NOTHING_STORED}, try again", InterruptCause.CONFLICT)
    return [places[claim.sha256] for claim in claims]


def _touch(tx: Transaction, sha256s: Iterable[str]) -> dict[str, BlobPlace]:
    parameters = (tx.clock.wall(), tx.session.listed(sorted(sha256s)))
    return {row[0]: place_of(row) for row in tx.session.rows("touch_blobs", parameters)}


def blobs_stored(tx: Transaction, places: Sequence[BlobPlace]) -> list[bool]:
    rows = sorted({(place.sha256, place.generation): place.size_bytes for place in places}.items())
    batch = [(*key, size_bytes) for key, size_bytes in rows]
    stored = {tuple(row) for row in tx.session.returned("blobs_stored", (tx.clock.wall(),), batch)}
    return [(place.sha256, place.generation) in stored for place in places]


def condemn_blobs(tx: Transaction, order: CondemnOrder, *, epoch: int) -> Condemned:
    tx.check_epoch(epoch)
    places = [place_of(row) for row in tx.session.rows("condemned_blobs", (order.limit,))]
    total_bytes = None
    if order.budget_bytes is not None:
        ((total_bytes,),) = tx.session.rows("blob_bytes")
    if len(places) < order.limit:
        new = _condemn(tx, order, order.limit - len(places), total_bytes)
        places += new
        if total_bytes is not None:
            total_bytes -= sum(place.size_bytes for place in new)
    return Condemned(tuple(places), None if total_bytes is None else int(total_bytes))


def _condemn(tx: Transaction, order: CondemnOrder, limit: int, total_bytes: int | None) -> list[BlobPlace]:
    over_bytes = 0
    if order.budget_bytes is not None and total_bytes is not None:
        over_bytes = total_bytes - order.budget_bytes
    before = max(order.unused_since, order.squeezed_since) if over_bytes > 0 else order.unused_since
    chosen = []
    rows = tx.session.rows("blobs_by_age", (*tx.condemn_after, before, SCAN_MAX))
    tx.condemn_after = (0.0, 0)
    for row_id, touched_at, size_bytes, is_used in rows:
        if touched_at >= order.unused_since and over_bytes <= 0:
            break  # from here on only blobs that a lack of room would condemn, and there is room again
        if not is_used:
            chosen.append(row_id)
            over_bytes -= size_bytes
        if len(chosen) == limit:
            tx.condemn_after = (touched_at, row_id)
            break
    else:
        if len(rows) == SCAN_MAX:
            tx.condemn_after = (rows[-1][1], rows[-1][0])
    if not chosen:
        return []
    locked = [row_id for (row_id,) in tx.session.rows("lock_blobs", (tx.session.listed(chosen), before))]
    condemned = {row[0]: place_of(row[1:]) for row in tx.session.rows("condemn_blobs", (tx.session.listed(locked),))}
    return [condemned[row_id] for row_id in chosen if row_id in condemned]


def forget_blobs(tx: Transaction, places: Sequence[BlobPlace], *, epoch: int) -> int:
    tx.check_epoch(epoch)
    return tx.session.changed("forget_blobs", (), sorted({(place.sha256, place.generation) for place in places}))


# ---------------------------------------------------------------------------------------------------- caches


def put_cache(tx: Transaction, orders: Sequence[CacheOrder]) -> list[CacheStored | CacheConflict | MissingBlobs]:
    return [_put_cache(tx, order) for order in orders]


def _put_cache(tx: Transaction, order: CacheOrder) -> CacheStored | CacheConflict | MissingBlobs:
    new = _new_files(tx, order)
    if new and isinstance(new, list):
        _lock(tx, order.cache_id)
        new = _new_files(tx, order)
    if not isinstance(new, list):
        return new
    if new:
        known = [name for (name,) in tx.session.rows("cache_names", (order.cache_id,))]
        if (clash := judge_names(order, known, new)) is not None:
            return clash
        rows = [(entry.name, entry.sha256, entry.size_bytes) for entry in sorted(new, key=lambda entry: entry.name)]
        tx.session.changed("add_cached_files", (order.cache_id, order.target, order.owner, tx.clock.wall()), rows)
    return CacheStored(len(new))


def _new_files(tx: Transaction, order: CacheOrder) -> list[CacheEntry] | CacheConflict | MissingBlobs:
    names = sorted({entry.name for entry in order.entries})
    known = {row[1]: CachedFile(*row[1:]) for row in tx.session.rows("cached_files", (order.cache_id, tx.session.listed(names)))}
    begun = tx.session.rows("cache_target", (order.cache_id,))
    stored = tx.stored_among(BlobRef(entry.sha256, entry.size_bytes) for entry in order.entries)
    return judge_cache(order, known, begun[0][0] if begun else None, stored)


def _lock(tx: Transaction, cache_id: str) -> None:
    tx.session.rows("lock_cache", (cache_id,))


def remove_cache(tx: Transaction, caches: Sequence[tuple[str, str]]) -> list[int]:
    for cache_id in sorted({cache_id for cache_id, _ in caches}):
        _lock(tx, cache_id)
    return [tx.session.change("remove_cache", cache) for cache in caches]
