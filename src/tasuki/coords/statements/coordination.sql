-- The statements of coordination on PostgreSQL. Each is a transaction of its own, and is run under READ COMMITTED.
--
-- The tables (tasuki/django/models.py):
--   tasuki_member     one row per process that beats. beat_at: its last beat. version: grows when info changes.
--   tasuki_scopelease one row per scope, for ever. epoch: the last one given out. expires_at: when its lock ends.
--   tasuki_detached   one row per worker that gets no more work.
--
-- Times are seconds since 1970 on the database's clock: clock_timestamp(), which goes on while a statement waits for a row, and
-- not now(), which stands still. {now} stands for it.
--
-- A row is believed only where its time is near: a lock that ends more than lock_max_s from now, or a beat from the future, was
-- written before the clock was set back, and would else hold for as long as it was set back by.

-- name: beat_again
-- Touches nothing but the time, so that the info (which may be large, and stored apart) is not written again.
UPDATE tasuki_member SET beat_at = {now}
WHERE member_id = %(member_id)s AND incarnation = %(incarnation)s AND version = %(version)s

-- name: beat_anew
INSERT INTO tasuki_member (member_id, kind, incarnation, schema_version, version, info, beat_at)
VALUES (%(member_id)s, %(kind)s, %(incarnation)s, %(schema_version)s, %(version)s, %(info)s, {now})
ON CONFLICT (member_id) DO UPDATE SET
    kind = excluded.kind, incarnation = excluded.incarnation, schema_version = excluded.schema_version,
    version = excluded.version, info = excluded.info, beat_at = excluded.beat_at

-- name: live
-- seen_ids and seen_versions: what the caller has read already.
SELECT m.member_id, m.kind, m.incarnation, m.schema_version, m.version,
    CASE WHEN seen.version = m.version THEN NULL ELSE m.info END, ({now} - m.beat_at)::float8
FROM tasuki_member m
LEFT JOIN unnest(%(seen_ids)s::text[], %(seen_versions)s::bigint[]) AS seen (member_id, version) ON seen.member_id = m.member_id
WHERE abs({now} - m.beat_at) < %(timeout_s)s
ORDER BY m.member_id COLLATE "C"

-- name: forget
-- SKIP LOCKED: everybody does this at once, and one of them is enough. MATERIALIZED: in a sub-select the planner may run the
-- LIMIT once per row, and it limits nothing.
WITH dead AS MATERIALIZED (
    SELECT member_id FROM tasuki_member WHERE beat_at < {now} - %(forget_after_s)s
    LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
DELETE FROM tasuki_member m USING dead WHERE m.member_id = dead.member_id

-- name: heartbeat_ages
SELECT member_id, {now} - beat_at FROM tasuki_member

-- name: leave
DELETE FROM tasuki_member WHERE member_id = %(member_id)s AND incarnation = %(incarnation)s

-- name: acquire
-- One statement: of all who ask at once, the first to lock the row changes it, and the others' WHERE sees what it wrote.
INSERT INTO tasuki_scopelease AS lock (scope, epoch, holder, expires_at)
VALUES (%(scope)s, %(floor)s::bigint + 1, %(holder)s, {now} + %(ttl_s)s::float8)
ON CONFLICT (scope) DO UPDATE SET
    epoch = GREATEST(lock.epoch, %(floor)s::bigint) + 1, holder = excluded.holder, expires_at = {now} + %(ttl_s)s::float8
WHERE lock.expires_at <= {now} OR lock.expires_at > {now} + %(lock_max_s)s::float8
RETURNING epoch

-- name: holder
SELECT holder, expires_at - {now} FROM tasuki_scopelease WHERE scope = %(scope)s

-- name: set_expiry
-- Renews (ttl_s) and releases (0) a lock that is still held.
UPDATE tasuki_scopelease SET expires_at = {now} + %(ttl_s)s::float8
WHERE scope = %(scope)s AND holder = %(holder)s AND epoch = %(epoch)s
    AND expires_at > {now} AND expires_at <= {now} + %(lock_max_s)s::float8

-- name: degrade
-- A row that is no lock: its presence tells the leader to step down.
INSERT INTO tasuki_scopelease (scope, epoch, holder, expires_at) VALUES ('degrade', 0, '', 0) ON CONFLICT (scope) DO NOTHING

-- name: degraded
DELETE FROM tasuki_scopelease WHERE scope = 'degrade'

-- name: led
-- A row that is no lock: expires_at is when the store took the last turn of a leader.
INSERT INTO tasuki_scopelease (scope, epoch, holder, expires_at) VALUES ('led', 0, '', {now} - %(led_ago_s)s::float8)
ON CONFLICT (scope) DO UPDATE SET expires_at = excluded.expires_at

-- name: leader_seen
SELECT {now} - expires_at FROM tasuki_scopelease WHERE scope = 'led'

-- name: forget_detached_by_leader
DELETE FROM tasuki_detached WHERE actor = %(actor)s AND at < {now} - %(kept_s)s

-- name: detach
INSERT INTO tasuki_detached (worker_id, at, actor, reason) VALUES (%(worker_id)s, {now}, %(actor)s, %(reason)s)
ON CONFLICT (worker_id) DO UPDATE SET at = excluded.at, actor = excluded.actor, reason = excluded.reason
WHERE tasuki_detached.actor = %(leader)s AND excluded.actor <> %(leader)s

-- name: attach
DELETE FROM tasuki_detached WHERE worker_id = %(worker_id)s

-- name: detached
SELECT worker_id, actor FROM tasuki_detached
