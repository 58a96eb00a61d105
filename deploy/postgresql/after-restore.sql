-- For a PostgreSQL store that was set back to an earlier time (pg_restore, point-in-time recovery, a replica that was behind).
-- What `tasuki restore` does to SQLite, and why: docs/decisions/0024-a-restored-store-begins-a-new-life.md
--
-- Stop every tasuki server first; then, once:
--     psql "$DATABASE" -v ON_ERROR_STOP=1 --single-transaction -f after-restore.sql

-- Nobody may lead while this runs: a server that is still up waits here, and is refused afterwards.
LOCK TABLE tasuki_scopeepoch IN EXCLUSIVE MODE;

INSERT INTO tasuki_scopeepoch (scope, epoch, holder) VALUES ('leader', 0, '') ON CONFLICT (scope) DO NOTHING;
UPDATE tasuki_scopeepoch SET epoch = (epoch / 1000000000 + 1) * 1000000000, holder = 'restore' WHERE scope = 'leader';
DELETE FROM tasuki_scopelease;
DELETE FROM tasuki_member;
DELETE FROM tasuki_turnmark;

INSERT INTO tasuki_incident (job_id, at, kind, attempt, worker_id, actor, reason)
SELECT id, extract(epoch FROM clock_timestamp()), 'restored', attempt, coalesce(assigned_worker_id, ''), 'restore',
       'the store was restored from a backup; a worker that still runs this attempt can no longer report it'
FROM tasuki_jobrun WHERE state IN ('ASSIGNED', 'RUNNING', 'ORPHANED');

UPDATE tasuki_jobrun SET
    state = 'CANCELED', ready = 0, version = version + 1, finished_at = extract(epoch FROM clock_timestamp()),
    error_code = 'CANCELED', error_summary = 'canceled; the store was restored from a backup',
    lease_id = '', lease_expires_at = NULL, lease_expired_at = NULL
WHERE state IN ('ASSIGNED', 'RUNNING') AND cancel_requested = 1;

UPDATE tasuki_jobrun SET
    state = 'PENDING', ready = 2, version = version + 1,
    not_before = extract(epoch FROM clock_timestamp()) + 2 + lease_ttl_s
               + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END,
    lease_id = '', lease_expires_at = NULL, lease_expired_at = NULL
WHERE state IN ('ASSIGNED', 'RUNNING');

UPDATE tasuki_jobrun SET state = 'PENDING', ready = 1, version = version + 1, lease_id = '', lease_expired_at = NULL
WHERE state = 'ORPHANED';

-- Jobs that have ended keep the attempt that ended them; a requeue raises it.
UPDATE tasuki_jobrun SET attempt = (attempt / 1000000 + 1) * 1000000 WHERE state = 'PENDING';

DELETE FROM tasuki_counter;
INSERT INTO tasuki_counter ("group", state, n)
SELECT "group", CASE WHEN state IN ('ASSIGNED', 'RUNNING') THEN 'active' ELSE lower(state) END, count(*)
FROM tasuki_jobrun GROUP BY 1, 2;
