-- The statements of the SQL store for SQLite >= 3.35. Loaded once by stores/sql/database.py.
--
-- `-- name: NAME` begins a statement, which goes on to the next name. `{rows: …}` stands for that row written as often as the
-- batch has items, with commas between; such statements are kept in sizes of 1, 2, 4, … 256. ?1, ?2, … are shared by all rows and
-- come before the rows' own parameters. A list of row ids of any length is passed by `IN (SELECT value FROM json_each(?))`.
--
-- One statement for a whole batch, because each row of an executemany gives the GIL up and takes it back. Measured at 256 rows, CPU
-- per row: insert 4.7 µs against 9.4, finish 10.5 against 14.7; beside a busy second thread 124 against 176 µs for the whole life
-- of a job. An INSTEAD OF trigger for finish took 1.5 times as long as UPDATE … FROM (VALUES …).
--
-- Columns of tasuki_jobrun (django/models.py explains each):
--   id                  row id, the age; also the last part of lease_id, so that a report finds its row without the unique key
--   idempotency_key     the job_id
--   ready               1: may be leased now (PENDING and due, or ORPHANED); 2: PENDING and delayed; 3: a run that was stored ahead of
--                       its time, PENDING or ASSIGNED; 4: such a run, ASSIGNED, that its worker may fetch; 0: all others. Written as
--                       literals where it is compared, since the partial indexes are found by them
--   lease_expires_at    when reaping may end the lease, grace included; not NULL exactly while ASSIGNED or RUNNING
--   lease_owner         the peer that was let in as the worker; compared with every claim and report
--   lease_id            '' once the lease was taken away; kept after a report, to tell an exact repeat from a stale report
--   exit_code … meta    the outcome; all NULL, '' or 0 while there is none
-- Every transition adds 1 to version. Every report and claim is checked completely inside its own write.


-- ------------------------------------------------------------------------------------------------ submit

-- name: submit_plain
-- Jobs for handlers that differ from the defaults in nothing but their body: 6 parameters each. The backoff is theirs.
INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec, backoff_s)
VALUES {rows: (?1, ?, ?, ?, ?, ?, ?, 1.0)}
ON CONFLICT (idempotency_key) DO NOTHING

-- name: submit_full
INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec,
                           exec, kind, priority, ready, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
VALUES {rows: (?1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}
ON CONFLICT (idempotency_key) DO NOTHING

-- name: add_blob
INSERT INTO tasuki_jobblob (job_id, sha256, role) SELECT id, ?2, ?3 FROM tasuki_jobrun WHERE idempotency_key = ?1

-- name: forget_results
DELETE FROM tasuki_jobblob WHERE role = 'result' AND job_id IN (SELECT value FROM json_each(?1))

-- name: request_cancels
UPDATE tasuki_jobrun SET cancel_requested = 1, version = version + 1
FROM (VALUES {rows: (?, ?)}) AS judged
WHERE id = column1 AND version = column2 AND state IN ('ASSIGNED', 'RUNNING')

-- name: requeue
UPDATE tasuki_jobrun SET
    state = 'PENDING', ready = column3, not_before = column4, not_after = column5, attempt = column6,
    version = version + 1, generation = generation + 1,
    failures = 0, losses = 0, cancel_requested = 0, lease_id = '', started_at = NULL, finished_at = NULL,
    exit_code = NULL, error_code = NULL, error_summary = '', permanent = 0,
    result = NULL, result_sha256 = NULL, result_size_bytes = NULL, meta = NULL, replaced_report = NULL
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?)}) AS judged
WHERE id = column1 AND version = column2 AND state IN ('SUCCEEDED', 'FAILED', 'CANCELED', 'TIMED_OUT', 'SKIPPED')


-- ------------------------------------------------------------------------------------------------ lease

-- name: band
-- The next lower priority that has ready jobs.
SELECT priority FROM tasuki_jobrun WHERE ready = 1 AND priority < ?1 ORDER BY priority DESC LIMIT 1

-- name: groups
-- The first ?4 distinct groups of a priority in [?2, ?3), by one seek each, however long their queues are.
WITH RECURSIVE head (name) AS (
    SELECT (SELECT "group" FROM tasuki_jobrun
            WHERE ready = 1 AND priority = ?1 AND "group" >= ?2 AND "group" < ?3 ORDER BY "group" LIMIT 1)
    UNION ALL
    SELECT (SELECT "group" FROM tasuki_jobrun
            WHERE ready = 1 AND priority = ?1 AND "group" > head.name AND "group" < ?3 ORDER BY "group" LIMIT 1)
    FROM head WHERE head.name IS NOT NULL
)
SELECT name FROM head WHERE name IS NOT NULL LIMIT ?4

-- name: subjects
-- The first ?5 distinct subjects of a group in [?3, ?4), by one seek each.
WITH RECURSIVE head (name) AS (
    SELECT (SELECT subject FROM tasuki_jobrun
            WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject >= ?3 AND subject < ?4 ORDER BY subject LIMIT 1)
    UNION ALL
    SELECT (SELECT subject FROM tasuki_jobrun
            WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject > head.name AND subject < ?4 ORDER BY subject LIMIT 1)
    FROM head WHERE head.name IS NOT NULL
)
SELECT name FROM head WHERE name IS NOT NULL LIMIT ?5

-- name: queues
-- The first ?6 distinct queues of a priority behind (?2, ?3, ?4, ?5), by some seeks each: another exec, another kind, the next
-- subject, the next group. As one comparison of rows SQLite would seek the group alone here, and read all of it.
WITH RECURSIVE head ("group", subject, kind, exec) AS (
    SELECT * FROM (
        SELECT "group", subject, kind, exec FROM tasuki_jobrun
        WHERE ready = 1 AND priority = ?1 AND ("group", subject, kind, exec) > (?2, ?3, ?4, ?5)
        ORDER BY "group", subject, kind, exec LIMIT 1)
    UNION ALL
    SELECT next."group", next.subject, next.kind, next.exec
    FROM head JOIN tasuki_jobrun AS next ON next.id = coalesce(
        (SELECT id FROM tasuki_jobrun
         WHERE ready = 1 AND priority = ?1 AND "group" = head."group" AND subject = head.subject AND kind = head.kind
           AND exec > head.exec
         ORDER BY exec LIMIT 1),
        (SELECT id FROM tasuki_jobrun
         WHERE ready = 1 AND priority = ?1 AND "group" = head."group" AND subject = head.subject AND kind > head.kind
         ORDER BY kind, exec LIMIT 1),
        (SELECT id FROM tasuki_jobrun
         WHERE ready = 1 AND priority = ?1 AND "group" = head."group" AND subject > head.subject
         ORDER BY subject, kind, exec LIMIT 1),
        (SELECT id FROM tasuki_jobrun
         WHERE ready = 1 AND priority = ?1 AND "group" > head."group" ORDER BY "group", subject, kind, exec LIMIT 1))
)
SELECT "group", subject, kind, exec FROM head LIMIT ?6

-- name: execs
-- The first ?6 distinct execs from ?5 on of jobs of the kind ?3 and the subjects ?4, by one seek each. ORDER BY makes the
-- recursion's queue a heap: what comes first, in whichever subject, is returned first, and the next call can go on behind it.
WITH RECURSIVE head (subject, exec) AS (
    SELECT value, (SELECT exec FROM tasuki_jobrun
                   WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = value AND kind = ?3 AND exec >= ?5
                   ORDER BY exec LIMIT 1)
    FROM json_each(?4)
    UNION ALL
    SELECT subject, (SELECT exec FROM tasuki_jobrun
                     WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = head.subject AND kind = ?3 AND exec > head.exec
                     ORDER BY exec LIMIT 1)
    FROM head WHERE head.exec IS NOT NULL
    ORDER BY 2
)
SELECT subject, exec FROM head WHERE exec IS NOT NULL LIMIT ?6

-- name: oldest_of_queue
-- A queue is a subject, a kind of job and an exec. Jobs that are too late to start at ?7 are left for `late`.
SELECT id, idempotency_key, spec, submitter, attempt, state, result_sha256 FROM tasuki_jobrun
WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = ?3 AND kind = ?4 AND exec = ?5
  AND (not_after IS NULL OR not_after >= ?7) ORDER BY id LIMIT ?6

-- name: oldest_of_queues
-- The n oldest of several queues: ORDER BY makes the recursion's queue a heap, so this is a merge of them that reads
-- n + (number of queues) entries. Jobs that are too late to start at ?5 are left.
WITH RECURSIVE oldest (id, subject, kind, exec) AS (
    SELECT head.id, json_extract(name.value, '$[0]'), json_extract(name.value, '$[1]'), json_extract(name.value, '$[2]')
    FROM json_each(?3) AS name JOIN tasuki_jobrun AS head ON head.id = (
        SELECT id FROM tasuki_jobrun
        WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = json_extract(name.value, '$[0]') AND kind = json_extract(name.value, '$[1]')
          AND exec = json_extract(name.value, '$[2]') AND (not_after IS NULL OR not_after >= ?5) ORDER BY id LIMIT 1)
    UNION ALL
    SELECT next.id, oldest.subject, oldest.kind, oldest.exec
    FROM oldest JOIN tasuki_jobrun AS next ON next.id = (
        SELECT id FROM tasuki_jobrun
        WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = oldest.subject AND kind = oldest.kind
          AND exec = oldest.exec AND id > oldest.id AND (not_after IS NULL OR not_after >= ?5) ORDER BY id LIMIT 1)
    ORDER BY 1 LIMIT ?4
)
SELECT job.id, idempotency_key, spec, submitter, attempt, state, result_sha256
FROM oldest CROSS JOIN tasuki_jobrun AS job ON job.id = oldest.id

-- name: named
-- A job for leasing by job_id, ready or not: the last columns tell.
SELECT id, idempotency_key, spec, submitter, attempt, state, result_sha256, "group", ready, lease_expires_at,
       not_after, subject
FROM tasuki_jobrun WHERE idempotency_key = ?1

-- name: grant
UPDATE tasuki_jobrun SET
    state = 'ASSIGNED', ready = 0, attempt = attempt + 1, version = version + 1,
    lease_id = ?1 || id, assigned_worker_id = ?2, incarnation = ?3, lease_expires_at = ?4, lease_ttl_s = ?5,
    on_disconnect = ?6, reconnect_grace_s = ?7, assigned_at = ?8, leader_epoch = ifnull(?9, leader_epoch), lease_owner = ?10,
    started_at = NULL, exit_code = NULL, error_code = NULL, error_summary = '', permanent = 0,
    result = NULL, result_sha256 = NULL, result_size_bytes = NULL, meta = NULL, progress = NULL, progress_text = '',
    continuation_state = 'NONE', continuation_check_started_at = NULL, continuation_check_deadline_at = NULL
WHERE id IN (SELECT value FROM json_each(?11)) AND ready = 1 AND (not_after IS NULL OR not_after >= ?8)

-- name: take_from_lost
-- Makes a job with an expired lease ready for the grant that follows in the same transaction.
UPDATE tasuki_jobrun SET ready = 1, losses = ?3, version = version + 1, lease_expires_at = NULL
WHERE id = ?1 AND version = ?2 AND state IN ('ASSIGNED', 'RUNNING') AND lease_expires_at <= ?4

-- name: fetch
-- Runs that were assigned ahead and may start begin their leases: ?1 the lease clock, ?2 the margin, ?3 the wall clock, ?4 as ?1 of
-- `held`.
UPDATE tasuki_jobrun INDEXED BY tasuki_job_leased SET ready = 0, version = version + 1, lease_expires_at = ?1 + lease_ttl_s + ?2
WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED' AND ready = 4 AND lease_expires_at > ?1 AND not_before <= ?3
  AND (assigned_worker_id, incarnation, lease_owner) IN (
      SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?4))

-- name: set_ahead
-- A run that was stored ahead: assigned, taken back, or judged at its time.
UPDATE tasuki_jobrun SET
    state = column3, ready = column4, attempt = column5, version = version + 1, lease_id = column6, assigned_worker_id = column7,
    incarnation = column8, lease_expires_at = column9, lease_ttl_s = coalesce(column10, lease_ttl_s), on_disconnect = column11,
    reconnect_grace_s = column12, assigned_at = column13, lease_owner = column14, leader_epoch = ?1
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}) AS new
WHERE id = column1 AND version = column2 AND ready > 2

-- name: held
-- For all of ?1, each a worker_id, incarnation and owner, in one walk over the live leases.
SELECT assigned_worker_id, incarnation, lease_owner, idempotency_key, spec, submitter, lease_id, attempt, lease_expires_at,
       on_disconnect, reconnect_grace_s, ready
FROM tasuki_jobrun INDEXED BY tasuki_job_leased
WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED'
  AND (assigned_worker_id, incarnation, lease_owner) IN (
      SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?1))
ORDER BY lease_expires_at, id


-- ------------------------------------------------------------------------------------------------ start, renew, release

-- name: start
UPDATE tasuki_jobrun SET state = 'RUNNING', started_at = ?1, version = version + 1
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?)}) AS claim
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND incarnation = column5
  AND attempt = column6 AND lease_owner = column7 AND state = 'ASSIGNED'
RETURNING idempotency_key, lease_id, assigned_worker_id, incarnation, attempt, lease_owner, cancel_requested

-- name: renew
UPDATE tasuki_jobrun SET
    lease_expires_at = ?1 + column8 + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END, lease_ttl_s = column8
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?)}) AS claim
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND incarnation = column5
  AND attempt = column6 AND lease_owner = column7 AND state IN ('ASSIGNED', 'RUNNING')
RETURNING idempotency_key, lease_id, assigned_worker_id, incarnation, attempt, lease_owner, cancel_requested

-- name: tell_progress
-- Apart from `renew`, since few attempts have progress.
UPDATE tasuki_jobrun SET progress = column8, progress_text = column9
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?, ?)}) AS claim
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND incarnation = column5
  AND attempt = column6 AND lease_owner = column7 AND state IN ('ASSIGNED', 'RUNNING')

-- name: tell_continuation
-- ?1 the wall clock. 0 seconds: its worker may go on.
UPDATE tasuki_jobrun SET
    continuation_state = CASE WHEN column8 > 0 THEN 'CONFIRMING' ELSE 'NONE' END,
    continuation_check_started_at = CASE WHEN column8 > 0 THEN ?1 END,
    continuation_check_deadline_at = CASE WHEN column8 > 0 THEN ?1 + column8 END
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?)}) AS claim
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND incarnation = column5
  AND attempt = column6 AND lease_owner = column7 AND state IN ('ASSIGNED', 'RUNNING')

-- name: resume
-- ?1 the lease clock with the margin, ?2 now. For an ORPHANED job whose worker is back before another was granted it.
UPDATE tasuki_jobrun SET
    state = 'RUNNING', ready = 0, version = version + 1, started_at = ifnull(started_at, ?2), lease_expired_at = NULL,
    lease_expires_at = ?1 + column8 + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END, lease_ttl_s = column8
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?)}) AS claim
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND incarnation = column5
  AND attempt = column6 AND lease_owner = column7 AND state = 'ORPHANED'
RETURNING idempotency_key, lease_id, assigned_worker_id, incarnation, attempt, lease_owner, cancel_requested

-- name: release
-- Cheaper than `settle`, for the many jobs of a worker that drains: an attempt that has not started has no outcome yet.
UPDATE tasuki_jobrun SET
    state = 'PENDING', ready = CASE ready WHEN 3 THEN 3 ELSE 1 END, version = version + 1, lease_id = '',
    lease_expired_at = lease_expires_at, lease_expires_at = NULL
FROM (VALUES {rows: (?, ?, ?)}) AS claim
WHERE id = column1 AND version = column2 AND lease_id = column3 AND state = 'ASSIGNED'


-- name: leases_of
SELECT idempotency_key FROM tasuki_jobrun INDEXED BY tasuki_job_leased
WHERE lease_expires_at IS NOT NULL AND (?1 = '' OR lease_owner = ?1) AND (?2 = '' OR assigned_worker_id = ?2)
ORDER BY lease_expires_at, id LIMIT ?3


-- ------------------------------------------------------------------------------------------------ finish, fail, reap

-- name: leased_groups
-- Read before `finish`: RETURNING would cost 1.5 µs a row, this 0.6.
SELECT id, "group" FROM tasuki_jobrun WHERE id IN (SELECT value FROM json_each(?1)) AND state IN ('ASSIGNED', 'RUNNING')

-- name: succeeded_of
SELECT id FROM tasuki_jobrun WHERE id IN (SELECT value FROM json_each(?1)) AND state = 'SUCCEEDED'

-- name: finish_plain
-- Attempts with an inline result or none, no message and no meta. ORPHANED ones are left to `settle`, like all unusual ones.
UPDATE tasuki_jobrun SET
    state = 'SUCCEEDED', version = version + 1, lease_expires_at = NULL, finished_at = ?1,
    started_at = ifnull(started_at, column7), exit_code = column8, result = column9, result_sha256 = column10,
    result_size_bytes = length(column9)
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}) AS report
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND attempt = column5
  AND lease_owner = column6 AND state IN ('ASSIGNED', 'RUNNING')

-- name: finish_full
UPDATE tasuki_jobrun SET
    state = 'SUCCEEDED', version = version + 1, lease_expires_at = NULL, finished_at = ?1,
    started_at = ifnull(started_at, column7), exit_code = column8, result = column9, result_sha256 = column10,
    result_size_bytes = column11, error_code = column12, error_summary = column13, meta = column14
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}) AS report
WHERE id = column1 AND idempotency_key = column2 AND lease_id = column3 AND assigned_worker_id = column4 AND attempt = column5
  AND lease_owner = column6 AND state IN ('ASSIGNED', 'RUNNING')

-- name: settle
-- New states after reports, losses and cancels. The attempt that was read must still be the current one, in the same state:
-- columns 1 to 7.
UPDATE tasuki_jobrun SET
    state = column8, ready = column9, not_before = column10, version = version + 1,
    lease_id = column11, lease_expires_at = NULL, lease_expired_at = column7, failures = column12, losses = column13,
    started_at = column14, finished_at = column15, leader_epoch = column16,
    exit_code = column17, error_code = column18, error_summary = column19, permanent = column20,
    result = column21, result_sha256 = column22, result_size_bytes = column23, meta = column24, replaced_report = column25
FROM (VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}) AS judged
WHERE id = column1 AND state = column2 AND version = column3 AND attempt = column4 AND lease_id = column5
  AND assigned_worker_id IS column6 AND lease_expires_at IS column7

-- name: add_incidents
INSERT INTO tasuki_incident (job_id, at, kind, attempt, worker_id, actor, reason) VALUES {rows: (?, ?, ?, ?, ?, ?, ?)}

-- name: count
INSERT INTO tasuki_counter (shard, "group", state, n) VALUES {rows: (?1, ?, ?, ?)}
ON CONFLICT ("group", state, shard) DO UPDATE SET n = n + excluded.n


-- ------------------------------------------------------------------------------------------------ the leader

-- name: epoch
-- For a leader's transaction; `epoch_seen` is for readers.
SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = ?1

-- name: epoch_seen
SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = ?1

-- name: take_over
INSERT INTO tasuki_scopeepoch (scope, epoch, holder, taken_over_at) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (scope) DO UPDATE SET epoch = excluded.epoch, holder = excluded.holder, taken_over_at = excluded.taken_over_at
WHERE epoch < excluded.epoch

-- name: record_once
INSERT INTO tasuki_scopeepoch (scope, epoch, holder) VALUES (?1, 0, ?2) ON CONFLICT (scope) DO NOTHING

-- name: taken_over_at
SELECT taken_over_at FROM tasuki_scopeepoch WHERE scope = ?1

-- name: renew_all
-- ?1 the lease clock with the margin, ?2 the same at the takeover before. Leases that only that takeover renewed are left.
UPDATE tasuki_jobrun SET
    lease_expires_at = ?1 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
WHERE lease_expires_at IS NOT NULL AND ready < 3
  AND lease_expires_at > ?2 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END

-- name: not_renewed
-- None: there is one writer.
SELECT 1 FROM tasuki_jobrun
WHERE lease_expires_at IS NOT NULL
  AND lease_expires_at > ?2 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
  AND lease_expires_at < ?1 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
LIMIT 1

-- name: leases_over
SELECT id FROM tasuki_jobrun WHERE lease_expires_at > ?1 AND lease_expires_at <= ?2 AND ready <> 3
ORDER BY lease_expires_at, id LIMIT ?3

-- name: late
-- `ready > 0` as in the index, which has no jobs without a not_after.
SELECT id FROM tasuki_jobrun WHERE not_after IS NOT NULL AND ready > 0 AND not_after < ?1 AND ready < 3
ORDER BY not_after, id LIMIT ?2

-- name: delayed_due
SELECT id, subject, kind, exec FROM tasuki_jobrun WHERE ready = 2 AND not_before > ?1 AND not_before <= ?2 ORDER BY not_before, id LIMIT ?3

-- name: promote
UPDATE tasuki_jobrun SET ready = 1, version = version + 1
WHERE id IN (SELECT value FROM json_each(?1)) AND ready = 2

-- name: old
-- Pruning walks by age, without an index of its own: ids grow with time.
SELECT id, state, "group", created_at, finished_at FROM tasuki_jobrun WHERE id > ?1 ORDER BY id LIMIT ?2

-- name: prune_jobs
DELETE FROM tasuki_jobrun WHERE id IN (SELECT value FROM json_each(?1))

-- name: prune_incidents
DELETE FROM tasuki_incident WHERE job_id IN (SELECT value FROM json_each(?1))

-- name: prune_logs
DELETE FROM tasuki_logchunk WHERE job_id IN (SELECT value FROM json_each(?1))

-- name: prune_events
-- The oldest ones are looked at: all that are older than the others may be deleted, and are soon.
DELETE FROM tasuki_event WHERE id IN (SELECT id FROM tasuki_event ORDER BY id LIMIT ?1) AND processed_at < ?2

-- name: job_to_archive
SELECT id FROM tasuki_jobrun WHERE id = ?1 AND version = ?2

-- name: forget_log
DELETE FROM tasuki_jobblob WHERE job_id = ?1 AND role = 'log'

-- name: add_log
INSERT INTO tasuki_jobblob (job_id, sha256, role) VALUES (?1, ?2, 'log')

-- name: set_log_ref
-- An address that the application wrote stays.
UPDATE tasuki_jobrun SET log_ref = ?2 WHERE id = ?1 AND (log_ref = '' OR log_ref LIKE 'blob:%')

-- name: delete_log_chunks
DELETE FROM tasuki_logchunk WHERE id IN (SELECT value FROM json_each(?1))

-- name: prune_notes
-- Notes of definitions that were deleted, unless a run of one still waits.
DELETE FROM tasuki_definitionstate
WHERE waits_for = '' AND next_at IS NULL AND NOT EXISTS (SELECT 1 FROM tasuki_jobdefinition WHERE id = definition_id)

-- name: prune_rollups
DELETE FROM tasuki_minuterollup WHERE id IN (SELECT id FROM tasuki_minuterollup WHERE minute < ?2 ORDER BY minute LIMIT ?1)

-- name: prune_blobs
DELETE FROM tasuki_jobblob WHERE job_id IN (SELECT value FROM json_each(?1))

-- name: still_old
SELECT id FROM tasuki_jobrun WHERE id IN (SELECT value FROM json_each(?1)) AND finished_at < ?2

-- name: take_counters
-- There is one shard: only counters that are 0 are deleted.
DELETE FROM tasuki_counter WHERE n = 0 AND "group" IN (SELECT value FROM json_each(?1)) RETURNING "group", state, n

-- name: take_deltas
-- Counters without a shard. Here are none: one transaction writes at a time, so all share the one shard.
DELETE FROM tasuki_counter WHERE id IN (SELECT id FROM tasuki_counter WHERE shard IS NULL ORDER BY id LIMIT ?1)
RETURNING "group", state, n

-- name: next_lease_over
SELECT min(lease_expires_at) FROM tasuki_jobrun WHERE lease_expires_at IS NOT NULL

-- name: next_delayed
SELECT min(not_before) FROM tasuki_jobrun WHERE ready = 2 AND not_before > ?1


-- ------------------------------------------------------------------------------------------------ definitions and events

-- part: definition
definition.id, name, enabled, type, event_type, command_name, CAST(default_args_json AS text), schedule_type, schedule_value, time_zone,
queue, timeout_seconds, max_retries, retry_backoff_seconds, concurrency_policy, definition.changed_at,
fired_until, next_at, plan, state.changed_at, last_run_id, waits_for, problem
FROM tasuki_jobdefinition AS definition LEFT JOIN tasuki_definitionstate AS state ON state.definition_id = definition.id

-- name: due_definitions
-- ?1 now, ?2 the latest time that a leader of now can have settled, ?4 the time until which runs are stored ahead. Definitions are
-- few: all are looked at, so that no change of one goes unnoticed, however it was made.
SELECT {definition}
WHERE CASE WHEN enabled AND type = 'time'
           THEN next_at <= ?1 OR fired_until > ?2 OR plan IS NOT schedule_type || ' ' || schedule_value || ' ' || time_zone
                OR state.changed_at IS NOT definition.changed_at
                OR (next_at <= ?4 AND problem = '' AND NOT EXISTS (
                    SELECT 1 FROM tasuki_jobrun
                    WHERE idempotency_key = 'd' || definition.id || '-' || CAST(next_at AS integer)))
           ELSE next_at IS NOT NULL OR plan <> '' END
ORDER BY next_at, definition.id LIMIT ?3

-- name: definitions_for_events
SELECT {definition} WHERE (enabled AND type = 'event') OR definition.id IN (SELECT value FROM json_each(?1)) ORDER BY definition.id

-- name: new_events
SELECT id, event_type, CAST(payload_json AS text), created_at, job_definition_id FROM tasuki_event
WHERE processed_at IS NULL ORDER BY id LIMIT ?1

-- name: events_processed
UPDATE tasuki_event SET processed_at = ?1 WHERE id IN (SELECT value FROM json_each(?2)) AND processed_at IS NULL

-- name: events_refused
UPDATE tasuki_event SET problem = column2 FROM (VALUES {rows: (?, ?)}) AS refused WHERE id = column1

-- name: detached
SELECT worker_id FROM tasuki_detached

-- name: thresholds
-- In the order of core.scheduler.thresholds.Thresholds.
SELECT skip_late_runs_after_seconds, log_retention_days_db, leader_tick_seconds, assign_ahead_seconds,
    heartbeat_interval_seconds, heartbeat_ttl_seconds, worker_detach_grace_seconds, leader_stale_seconds,
    leader_lock_ttl_seconds, subleader_check_seconds, reassign_after_seconds, max_jobs_per_worker,
    continuation_retry_count, continuation_retry_interval_seconds, grpc_ping_timeout_seconds, grpc_ping_failures
FROM tasuki_schedulersettings WHERE id = 1

-- name: skip_late_runs_after
SELECT skip_late_runs_after_seconds FROM tasuki_schedulersettings WHERE id = 1

-- name: mark_runs
-- New runs: which definition made them, for which time, and `ready` if it is another value than that of other new jobs: 0 waits for
-- another run, 3 was stored ahead.
UPDATE tasuki_jobrun SET job_definition_id = column2, scheduled_for = column3, leader_epoch = column4, ready = coalesce(column5, ready)
FROM (VALUES {rows: (?, ?, ?, ?, ?)}) AS run
WHERE idempotency_key = column1 AND state = 'PENDING'

-- name: waiting_over
-- Last runs of definitions that wait for the one before, which has ended.
SELECT definition_id, last_run_id, job.id, subject, kind, exec FROM tasuki_definitionstate AS state
LEFT JOIN tasuki_jobrun AS job ON idempotency_key = last_run_id AND job.state = 'PENDING' AND ready = 0
WHERE waits_for <> '' AND NOT EXISTS (
    SELECT 1 FROM tasuki_jobrun AS earlier
    WHERE earlier.idempotency_key = waits_for AND earlier.state IN ('PENDING', 'ASSIGNED', 'RUNNING', 'ORPHANED'))

-- name: forget_waiting
UPDATE tasuki_definitionstate SET waits_for = '' WHERE definition_id IN (SELECT value FROM json_each(?1))

-- name: make_ready
UPDATE tasuki_jobrun SET ready = 1, version = version + 1
WHERE id IN (SELECT value FROM json_each(?1)) AND state = 'PENDING' AND ready = 0

-- name: lock_notes
-- With one writer nothing else is locked.
SELECT definition_id, last_run_id, waits_for FROM tasuki_definitionstate WHERE definition_id IN (SELECT value FROM json_each(?1))

-- name: ahead_among
SELECT idempotency_key, body_hash FROM tasuki_jobrun WHERE idempotency_key IN (SELECT value FROM json_each(?1)) AND ready = 3

-- name: next_of_nothing
-- Notes on definitions that are gone, with the next run, which may be stored.
SELECT definition_id, next_at, problem FROM tasuki_definitionstate AS state
WHERE next_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM tasuki_jobdefinition WHERE id = definition_id)

-- name: forget_next
UPDATE tasuki_definitionstate SET next_at = NULL WHERE definition_id IN (SELECT value FROM json_each(?1))

-- name: runs_ahead
-- Runs that were stored ahead and that nobody has fetched: assigned ones among the live leases, others by the notes.
SELECT idempotency_key, subject, kind, exec, ready, assigned_worker_id, incarnation, attempt FROM (
    SELECT idempotency_key, subject, kind, exec, ready, assigned_worker_id, incarnation, attempt, scheduled_for
    FROM tasuki_jobrun INDEXED BY tasuki_job_leased WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED' AND ready > 2
    UNION ALL
    SELECT idempotency_key, subject, kind, exec, ready, '', '', 0, scheduled_for
    FROM tasuki_definitionstate JOIN tasuki_jobrun AS job ON idempotency_key = 'd' || definition_id || '-' || CAST(next_at AS integer)
    WHERE next_at IS NOT NULL AND problem = '' AND job.state = 'PENDING' AND ready = 3)
ORDER BY scheduled_for, idempotency_key LIMIT ?1

-- name: lock_free_runs
SELECT idempotency_key FROM tasuki_jobrun WHERE idempotency_key IN (SELECT value FROM json_each(?1))

-- name: notes_of_runs
-- Notes on the definitions of runs that are to be run again, unless their runs may overlap.
SELECT idempotency_key, state.definition_id, last_run_id, waits_for FROM tasuki_jobrun
JOIN tasuki_jobdefinition AS definition ON definition.id = job_definition_id
JOIN tasuki_definitionstate AS state ON state.definition_id = definition.id
WHERE idempotency_key IN (SELECT value FROM json_each(?1))
  AND NOT (concurrency_policy = 'allow' OR (concurrency_policy = '' AND type = 'event'))

-- name: run_again
UPDATE tasuki_definitionstate SET last_run_id = column2, waits_for = '' FROM (VALUES {rows: (?, ?)}) AS run WHERE definition_id = column1

-- name: save_firing
INSERT INTO tasuki_definitionstate (definition_id, fired_until, next_at, plan, changed_at, last_run_id, waits_for, problem)
VALUES {rows: (?, ?, ?, ?, ?, ?, ?, ?)}
ON CONFLICT (definition_id) DO UPDATE SET
    fired_until = excluded.fired_until, next_at = excluded.next_at, plan = excluded.plan, changed_at = excluded.changed_at,
    last_run_id = excluded.last_run_id, waits_for = excluded.waits_for, problem = excluded.problem

-- name: next_nominal
SELECT min(next_at) FROM tasuki_definitionstate AS state JOIN tasuki_jobdefinition AS definition ON definition.id = definition_id
WHERE enabled AND type = 'time'

-- name: started_in_time
-- A run of a definition that began is retried also after its window; only what never began is skipped.
UPDATE tasuki_jobrun SET not_after = NULL
WHERE idempotency_key IN (SELECT value FROM json_each(?1)) AND job_definition_id IS NOT NULL AND not_after IS NOT NULL


-- ------------------------------------------------------------------------------------------------ readers

-- name: rows_to_judge
-- `rows_seen` is for verbs that will not write: only with several writers does it differ.
SELECT {columns_but_result} FROM tasuki_jobrun WHERE idempotency_key IN (SELECT value FROM json_each(?1))

-- name: rows_seen
SELECT {columns_but_result} FROM tasuki_jobrun WHERE idempotency_key IN (SELECT value FROM json_each(?1))

-- name: rows_by_key
SELECT {columns} FROM tasuki_jobrun WHERE idempotency_key IN (SELECT value FROM json_each(?1))

-- name: rows_by_id
SELECT {columns} FROM tasuki_jobrun WHERE id IN (SELECT value FROM json_each(?1))

-- name: incidents
SELECT at, kind, attempt, worker_id, actor, reason FROM tasuki_incident
WHERE job_id = (SELECT id FROM tasuki_jobrun WHERE idempotency_key = ?1) ORDER BY id

-- name: alive_among
SELECT idempotency_key FROM tasuki_jobrun
WHERE idempotency_key IN (SELECT value FROM json_each(?1)) AND state IN ('PENDING', 'ASSIGNED', 'RUNNING', 'ORPHANED')

-- name: counts
SELECT "group", state, sum(n) FROM tasuki_counter GROUP BY "group", state HAVING sum(n) <> 0

-- name: place
SELECT id, priority, "group", subject, kind, exec FROM tasuki_jobrun WHERE idempotency_key = ?1 AND ready = 1

-- name: head_of_queue
SELECT idempotency_key FROM tasuki_jobrun
WHERE ready = 1 AND priority = ?1 AND "group" = ?2 AND subject = ?3 AND kind = ?4 AND exec = ?5 ORDER BY id LIMIT ?6

-- name: ahead
SELECT count(*) FROM (
    SELECT 1 FROM tasuki_jobrun
    WHERE ready = 1 AND priority = ?2 AND "group" = ?3 AND subject = ?4 AND kind = ?5 AND exec = ?6 AND id < ?1
    LIMIT ?7)

-- name: blob_owners
SELECT owner FROM (
    SELECT idempotency_key AS owner, min(blob.id) AS place, 0 AS kind
    FROM tasuki_jobblob AS blob JOIN tasuki_jobrun AS job ON job.id = blob.job_id WHERE blob.sha256 = ?1 GROUP BY 1
    UNION ALL
    SELECT 'cache:' || cache_id, min(id), 1 FROM tasuki_cachefile WHERE sha256 = ?1 GROUP BY 1)
ORDER BY kind, place LIMIT ?2

-- name: id_range
SELECT (SELECT min(id) FROM tasuki_jobrun), (SELECT max(id) FROM tasuki_jobrun)

-- name: created_from_id
SELECT id, created_at FROM tasuki_jobrun WHERE id >= ?1 ORDER BY id LIMIT 1

-- name: find_by_array
SELECT {found} FROM tasuki_jobrun WHERE array_id IS NOT NULL AND array_id = :array_id AND id >= :low AND id < :high {and} ORDER BY id DESC LIMIT :most

-- name: find_failed
SELECT {found} FROM tasuki_jobrun INDEXED BY tasuki_job_failed WHERE error_code IS NOT NULL AND id < :high {and} ORDER BY id DESC
LIMIT :most

-- name: find_leased
-- Sorts only the live leases.
SELECT {found} FROM tasuki_jobrun INDEXED BY tasuki_job_leased WHERE lease_expires_at IS NOT NULL AND id < :high {and}
ORDER BY id DESC LIMIT :most

-- name: find_by_id
SELECT {found} FROM tasuki_jobrun WHERE id >= :low AND id < :high {and} ORDER BY id DESC LIMIT :most


-- ------------------------------------------------------------------------------------------------ tokens

-- name: add_token
INSERT INTO tasuki_token ({token})
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: token
SELECT {token_as_read} FROM tasuki_token WHERE sha256 = ?1

-- name: tokens
SELECT {token_as_read} FROM tasuki_token ORDER BY id

-- name: unrevoked_among
SELECT token_id FROM tasuki_token WHERE token_id IN (SELECT value FROM json_each(?1)) AND revoked_at IS NULL

-- name: add_audit
INSERT INTO tasuki_audit (at, actor, action, target, detail) VALUES (?, ?, ?, ?, ?)

-- name: audit
SELECT id, at, actor, action, target, detail FROM tasuki_audit WHERE id < ?2 ORDER BY id DESC LIMIT ?1

-- name: revoke_token
UPDATE tasuki_token SET revoked_at = ?2, revoked_by = ?3 WHERE token_id = ?1 AND revoked_at IS NULL


-- ------------------------------------------------------------------------------------------------ pauses

-- name: paused_patterns
SELECT pattern FROM tasuki_subjectpause

-- name: lock_pauses
-- One transaction writes at a time.
SELECT 1

-- name: pauses
SELECT pattern, since, actor, reason FROM tasuki_subjectpause ORDER BY pattern

-- name: add_pause
INSERT INTO tasuki_subjectpause (pattern, since, actor, reason) VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING

-- name: remove_pause
DELETE FROM tasuki_subjectpause WHERE pattern = ?1


-- ------------------------------------------------------------------------------------------------ blobs
-- At most one row of a sha256 is not condemned. The columns of a place are sha256, size_bytes, generation, stored.

-- name: stored_blobs
SELECT sha256, size_bytes FROM tasuki_blob
WHERE sha256 IN (SELECT value FROM json_each(?1)) AND stored = 1 AND condemned = 0

-- name: blob_places
SELECT sha256, size_bytes, generation, stored FROM tasuki_blob
WHERE sha256 IN (SELECT value FROM json_each(?1)) AND stored = 1 AND condemned = 0

-- name: touch_blobs
UPDATE tasuki_blob SET touched_at = ?1
WHERE sha256 IN (SELECT value FROM json_each(?2)) AND condemned = 0
RETURNING sha256, size_bytes, generation, stored

-- name: place_blobs
-- ?2 is the lowest generation that bytes may get now.
INSERT INTO tasuki_blob (touched_at, sha256, size_bytes, generation)
SELECT ?1, column1, column2, max(?2, ifnull((SELECT max(generation) + 1 FROM tasuki_blob WHERE sha256 = column1), 0))
FROM (VALUES {rows: (?, ?)}) WHERE true
ON CONFLICT DO NOTHING

-- name: blobs_stored
UPDATE tasuki_blob SET stored = 1, touched_at = ?1, size_bytes = CASE stored WHEN 1 THEN size_bytes ELSE column3 END
FROM (VALUES {rows: (?, ?, ?)}) AS place
WHERE sha256 = column1 AND generation = column2 AND condemned = 0
RETURNING sha256, generation

-- name: condemned_blobs
SELECT sha256, size_bytes, generation, stored FROM tasuki_blob WHERE condemned = 1 ORDER BY touched_at, id LIMIT ?1

-- name: blob_bytes
SELECT ifnull(sum(size_bytes), 0) FROM tasuki_blob WHERE condemned = 0

-- name: blobs_by_age
-- The longest untouched blobs after (?1, ?2), and whether a job or cache refers to them.
SELECT id, touched_at, size_bytes,
    EXISTS (SELECT 1 FROM tasuki_jobblob WHERE tasuki_jobblob.sha256 = tasuki_blob.sha256)
    OR EXISTS (SELECT 1 FROM tasuki_cachefile WHERE tasuki_cachefile.sha256 = tasuki_blob.sha256)
FROM tasuki_blob WHERE condemned = 0 AND (touched_at, id) > (?1, ?2) AND touched_at < ?3 ORDER BY touched_at, id LIMIT ?4

-- name: lock_blobs
-- With one writer it is enough to look once more.
SELECT id FROM tasuki_blob WHERE id IN (SELECT value FROM json_each(?1)) AND condemned = 0 AND touched_at < ?2

-- name: condemn_blobs
UPDATE tasuki_blob SET condemned = 1
WHERE id IN (SELECT value FROM json_each(?1)) AND condemned = 0
  AND NOT EXISTS (SELECT 1 FROM tasuki_jobblob WHERE tasuki_jobblob.sha256 = tasuki_blob.sha256)
  AND NOT EXISTS (SELECT 1 FROM tasuki_cachefile WHERE tasuki_cachefile.sha256 = tasuki_blob.sha256)
RETURNING id, sha256, size_bytes, generation, stored

-- name: forget_blobs
DELETE FROM tasuki_blob WHERE condemned = 1 AND (sha256, generation) IN (VALUES {rows: (?, ?)})


-- ------------------------------------------------------------------------------------------------ caches

-- name: cache_target
SELECT target FROM tasuki_cachefile WHERE cache_id = ?1 ORDER BY id LIMIT 1

-- name: lock_cache
-- There is one writer.
SELECT ?1

-- name: cache_names
SELECT name FROM tasuki_cachefile WHERE cache_id = ?1

-- name: cached_files
SELECT cache_id, name, sha256, size_bytes, target, owner, added_at FROM tasuki_cachefile
WHERE cache_id = ?1 AND name IN (SELECT value FROM json_each(?2))

-- name: cache
SELECT name, sha256, size_bytes, target, owner, added_at FROM tasuki_cachefile WHERE cache_id = ?1 AND name > ?2
ORDER BY name LIMIT ?3

-- name: caches
SELECT known.cache_id, files, total_bytes, target, owner, added_at
FROM (SELECT cache_id, count(*) AS files, sum(size_bytes) AS total_bytes, min(id) AS first_id FROM tasuki_cachefile
      WHERE cache_id > ?1 GROUP BY cache_id ORDER BY cache_id LIMIT ?2) AS known
JOIN tasuki_cachefile ON tasuki_cachefile.id = first_id ORDER BY known.cache_id

-- name: add_cached_files
INSERT INTO tasuki_cachefile (cache_id, target, owner, added_at, name, sha256, size_bytes)
VALUES {rows: (?1, ?2, ?3, ?4, ?, ?, ?)}

-- name: remove_cache
DELETE FROM tasuki_cachefile WHERE cache_id = ?1 AND target = ?2


-- ------------------------------------------------------------------------------------------------ statistics

-- name: add_rollups
INSERT INTO tasuki_minuterollup (minute, server_id, data) VALUES {rows: (?, ?, ?)} ON CONFLICT DO NOTHING

-- name: rollups
SELECT data FROM tasuki_minuterollup WHERE minute >= ?1 AND minute < ?2 ORDER BY minute, server_id
