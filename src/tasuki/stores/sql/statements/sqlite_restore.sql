-- The changes that make a restored database safe to open; docs/decisions/0024 says why. Loaded by stores/sql/sqlite_backup.py.
--
-- The states are those of core/lifecycle.py: ASSIGNED and RUNNING hold a lease, an ORPHANED job's lease is over but may still
-- be shown. `ready` is 1 for jobs that may be leased now, 2 for jobs that wait for their not_before.

-- name: raise_epochs
-- ?1 the step: epochs become the next multiple of it. ?2 the holder: a name that no server has.
UPDATE tasuki_scopeepoch SET epoch = (epoch / ?1 + 1) * ?1, holder = ?2

-- name: first_epoch
INSERT INTO tasuki_scopeepoch (scope, epoch, holder) VALUES (?1, ?2, ?3) ON CONFLICT (scope) DO NOTHING

-- name: add_incidents
INSERT INTO tasuki_incident (job_id, at, kind, attempt, worker_id, actor, reason)
SELECT id, ?1, 'restored', attempt, ifnull(assigned_worker_id, ''), ?2, ?3 FROM tasuki_jobrun
WHERE state IN ('ASSIGNED', 'RUNNING', 'ORPHANED')

-- name: cancel
-- Jobs whose cancel was requested: no worker is left that could report it.
UPDATE tasuki_jobrun SET
    state = 'CANCELED', ready = 0, version = version + 1, finished_at = ?1, error_code = 'CANCELED', error_summary = ?2,
    lease_id = '', lease_expires_at = NULL, lease_expired_at = NULL
WHERE state IN ('ASSIGNED', 'RUNNING') AND cancel_requested = 1

-- name: give_back
-- ?1 now, ?2 the margin. No loss is counted. The jobs wait until a worker from before the restore has stopped by itself.
UPDATE tasuki_jobrun SET
    state = 'PENDING', ready = 2, version = version + 1,
    not_before = ?1 + ?2 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END,
    lease_id = '', lease_expires_at = NULL, lease_expired_at = NULL
WHERE state IN ('ASSIGNED', 'RUNNING')

-- name: free_orphaned
UPDATE tasuki_jobrun SET state = 'PENDING', ready = 1, version = version + 1, lease_id = '', lease_expired_at = NULL
WHERE state = 'ORPHANED'

-- name: raise_attempts
-- The jobs that will run again. Ended ones keep the attempt that ended them; a requeue raises it.
UPDATE tasuki_jobrun SET attempt = (attempt / ?1 + 1) * ?1 WHERE state = 'PENDING'

-- name: forget_counters
DELETE FROM tasuki_counter

-- name: count_by_state
SELECT "group", state, count(*) FROM tasuki_jobrun GROUP BY "group", state

-- name: add_counter
INSERT INTO tasuki_counter ("group", state, n) VALUES (?1, ?2, ?3) ON CONFLICT ("group", state, shard) DO UPDATE SET n = n + excluded.n

-- name: make_present
CREATE TEMPORARY TABLE present (sha256 TEXT NOT NULL, generation INTEGER NOT NULL, PRIMARY KEY (sha256, generation)) WITHOUT ROWID

-- name: add_present
INSERT INTO present (sha256, generation) VALUES (?1, ?2)

-- name: unknown_blobs
SELECT sha256, generation FROM present
EXCEPT SELECT sha256, generation FROM tasuki_blob

-- name: forget_absent_blobs
-- Blobs whose bytes are not here: clients must be asked for them again.
DELETE FROM tasuki_blob WHERE NOT EXISTS (
    SELECT 1 FROM present WHERE present.sha256 = tasuki_blob.sha256 AND present.generation = tasuki_blob.generation)
