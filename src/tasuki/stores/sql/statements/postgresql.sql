-- The statements of the SQL store for PostgreSQL >= 13, loaded once by stores/sql/database.py. Columns are explained in sqlite.sql.
--
-- `-- name: NAME` begins a statement, `-- part: NAME` a text that replaces `{NAME}` in later statements. Parameters are $1, $2, … or
-- :name; the cast where each first occurs is the type as which stores/sql/postgres_session.py sends it. A batch comes as one array
-- for each of its columns, behind the parameters that all rows share.
--
-- Several servers write at once, READ COMMITTED. Rules for every statement:
--   * A statement that waited for a row checks its condition again, but only on that row. So rows that a verb judges in Python are
--     read FOR UPDATE first, in the order of ids, and the whole condition of a write is in its WHERE.
--   * Leasing never waits: rows that another server is about to lease are skipped.
--   * The epoch is share-locked before a leader's first write. EXISTS (SELECT … epoch …) would see the epoch as it was when the
--     statement began, and would not fence (docs/invariants.md).
-- Values of `ready` are literals, since the partial indexes are found by them. Where rows are given by ids or keys the condition is
-- on `ready + 0`: the planner may assume that nothing is ready, and would read the whole index of ready rows for them.


-- ------------------------------------------------------------------------------------------------ submit

-- name: submit_plain
INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec, backoff_s)
SELECT $1::float8, job_id, subject, "group", submitter, body_hash, spec, 1.0
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::bytea[])
     AS new (job_id, subject, "group", submitter, body_hash, spec)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING id

-- name: submit_full
INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec,
                           exec, kind, priority, ready, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
SELECT $1::float8, new.*
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::bytea[],
            $8::text[], $9::smallint[], $10::smallint[], $11::smallint[], $12::float8[], $13::float8[], $14::integer[],
            $15::integer[], $16::float8[], $17::text[])
     AS new (job_id, subject, "group", submitter, body_hash, spec,
             exec, kind, priority, ready, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING id

-- part: enqueue
WITH created AS (
    INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec,
                               exec, kind, priority, ready, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
    SELECT now, job_id, subject, "group", submitter, body_hash, spec, exec, kind, priority,
           CASE WHEN not_before > now THEN 2 ELSE 1 END, not_before, not_after, max_retries, max_losses, backoff_s, array_id
    FROM (SELECT extract(epoch FROM clock_timestamp())::float8 AS now) AS clock,

-- part: enqueued
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING id, "group"
), counted AS (
    INSERT INTO tasuki_counter ("group", state, n, shard) SELECT "group", 'pending', count(*), NULL FROM created GROUP BY "group"
)
SELECT id FROM created

-- name: enqueue
-- Jobs of a user's own transaction, which may last: all in one statement, and no row that two such transactions share.
{enqueue} unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[],
                 $7::text[], $8::smallint[], $9::smallint[], $10::float8[], $11::float8[], $12::integer[],
                 $13::integer[], $14::float8[], $15::text[])
          AS new (job_id, subject, "group", submitter, body_hash, spec,
                  exec, kind, priority, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
{enqueued}

-- name: enqueue_alike
-- As `enqueue`, for jobs that differ in job_id, body_hash and spec alone: a fifth less for the server to do.
{enqueue} unnest($1::text[], $5::bytea[], $6::bytea[]) AS new (job_id, body_hash, spec),
          (SELECT $2::text AS subject, $3::text AS "group", $4::text AS submitter, $7::text AS exec, $8::smallint AS kind,
                  $9::smallint AS priority, $10::float8 AS not_before, $11::float8 AS not_after, $12::integer AS max_retries,
                  $13::integer AS max_losses, $14::float8 AS backoff_s, $15::text AS array_id) AS alike
{enqueued}

-- name: enqueue_one
-- One job; NULL if its id was known. The function is of migration 0014. Its values come as literals, to which its signature gives
-- their types: a cast of each would cost a tenth of the whole.
SELECT tasuki_enqueue($1, $2, $3, $4, $5, $6, $7, $8::smallint, $9::smallint, $10, $11, $12, $13, $14, $15)

-- name: has_enqueue_function
SELECT to_regproc('tasuki_enqueue') IS NOT NULL

-- name: add_blob
INSERT INTO tasuki_jobblob (job_id, sha256, role)
SELECT id, $2::text, $3::text FROM tasuki_jobrun WHERE idempotency_key = $1::text

-- name: forget_results
DELETE FROM tasuki_jobblob WHERE role = 'result' AND job_id = ANY($1::bigint[])

-- name: request_cancels
UPDATE tasuki_jobrun AS job SET cancel_requested = 1, version = job.version + 1
FROM unnest($1::bigint[], $2::bigint[]) AS judged (id, version)
WHERE job.id = judged.id AND job.version = judged.version AND state IN ('ASSIGNED', 'RUNNING')

-- name: requeue
UPDATE tasuki_jobrun AS job SET
    state = 'PENDING', ready = judged.ready, not_before = judged.not_before, not_after = judged.not_after,
    attempt = judged.attempt, version = job.version + 1, generation = generation + 1,
    failures = 0, losses = 0, cancel_requested = 0, lease_id = '', started_at = NULL, finished_at = NULL,
    exit_code = NULL, error_code = NULL, error_summary = '', permanent = 0,
    result = NULL, result_sha256 = NULL, result_size_bytes = NULL, meta = NULL, replaced_report = NULL
FROM unnest($1::bigint[], $2::bigint[], $3::smallint[], $4::float8[], $5::float8[], $6::integer[])
     AS judged (id, version, ready, not_before, not_after, attempt)
WHERE job.id = judged.id AND job.version = judged.version AND state IN ('SUCCEEDED', 'FAILED', 'CANCELED', 'TIMED_OUT', 'SKIPPED')


-- ------------------------------------------------------------------------------------------------ lease

-- name: band
SELECT priority FROM tasuki_jobrun WHERE ready = 1 AND priority < $1::smallint ORDER BY priority DESC LIMIT 1

-- name: groups
WITH RECURSIVE head (name) AS (
    SELECT (SELECT "group" FROM tasuki_jobrun
            WHERE ready = 1 AND priority = $1::smallint AND "group" >= $2::text AND "group" < $3::text ORDER BY "group" LIMIT 1)
    UNION ALL
    SELECT (SELECT "group" FROM tasuki_jobrun
            WHERE ready = 1 AND priority = $1 AND "group" > head.name AND "group" < $3 ORDER BY "group" LIMIT 1)
    FROM head WHERE head.name IS NOT NULL
)
SELECT name FROM head WHERE name IS NOT NULL LIMIT $4::bigint

-- name: subjects
WITH RECURSIVE head (name) AS (
    SELECT (SELECT subject FROM tasuki_jobrun
            WHERE ready = 1 AND priority = $1::smallint AND "group" = $2::text AND subject >= $3::text AND subject < $4::text
            ORDER BY subject LIMIT 1)
    UNION ALL
    SELECT (SELECT subject FROM tasuki_jobrun
            WHERE ready = 1 AND priority = $1 AND "group" = $2 AND subject > head.name AND subject < $4 ORDER BY subject LIMIT 1)
    FROM head WHERE head.name IS NOT NULL
)
SELECT name FROM head WHERE name IS NOT NULL LIMIT $5::bigint

-- name: queues
WITH RECURSIVE head ("group", subject, kind, exec) AS (
    (SELECT "group", subject, kind, exec FROM tasuki_jobrun
     WHERE ready = 1 AND priority = $1::smallint AND ("group", subject, kind, exec) > ($2::text, $3::text, $4::smallint, $5::text)
     ORDER BY "group", subject, kind, exec LIMIT 1)
    UNION ALL
    SELECT next.* FROM head CROSS JOIN LATERAL (
        SELECT "group", subject, kind, exec FROM tasuki_jobrun
        WHERE ready = 1 AND priority = $1 AND ("group", subject, kind, exec) > (head."group", head.subject, head.kind, head.exec)
        ORDER BY "group", subject, kind, exec LIMIT 1) AS next
)
SELECT "group", subject, kind, exec FROM head LIMIT $6::bigint

-- name: execs
-- Not around the floors: here it is asked only for workers that do not say what they offer.
WITH RECURSIVE head (subject, exec) AS (
    SELECT name, (SELECT exec FROM tasuki_jobrun
                  WHERE ready = 1 AND priority = $1::smallint AND "group" = $2::text AND subject = name AND kind = $3::smallint
                    AND exec >= $5::text
                  ORDER BY exec LIMIT 1)
    FROM unnest($4::text[]) AS name
    UNION ALL
    SELECT subject, (SELECT exec FROM tasuki_jobrun
                     WHERE ready = 1 AND priority = $1 AND "group" = $2 AND subject = head.subject AND kind = $3
                       AND exec > head.exec
                     ORDER BY exec LIMIT 1)
    FROM head WHERE head.exec IS NOT NULL
)
SELECT subject, exec FROM head WHERE exec IS NOT NULL LIMIT $6::bigint

-- The next three ask the same as band, groups and subjects, around what lies below the floors (stores/sql/postgres_ready.py): in
-- ranges of priorities, groups, subjects or execs without floors, and in single queues behind a row. Ranges of rows, as in (group, subject)
-- < (…), would not do: a walk stops at the end of such a range only if that lies in its first column.

-- part: in_subjects
LATERAL (
    SELECT 1 FROM tasuki_jobrun AS job
    WHERE ready = 1 AND job.priority = part.priority AND job."group" = part."group" AND subject >= low AND subject < high
    ORDER BY subject LIMIT 1) AS found

-- part: in_execs
LATERAL (
    SELECT 1 FROM tasuki_jobrun AS job
    WHERE ready = 1 AND job.priority = part.priority AND job."group" = part."group" AND job.subject = part.subject
      AND job.kind = part.kind AND exec >= low AND exec < high
    ORDER BY exec LIMIT 1) AS found

-- part: in_queue
LATERAL (
    SELECT 1 FROM tasuki_jobrun AS job
    WHERE ready = 1 AND job.priority = part.priority AND job."group" = part."group" AND job.subject = part.subject
      AND job.kind = part.kind AND job.exec = part.exec AND id > floor
    ORDER BY id LIMIT 1) AS found

-- name: band_above
SELECT max(priority) FROM (
    SELECT found.priority FROM unnest($1::smallint[], $2::smallint[]) AS part (above, below), LATERAL (
        SELECT priority FROM tasuki_jobrun WHERE ready = 1 AND priority > above AND priority < below
        ORDER BY priority DESC LIMIT 1) AS found
    UNION ALL
    SELECT part.priority FROM unnest($3::smallint[], $4::text[], $5::text[]) AS part (priority, low, high), LATERAL (
        SELECT 1 FROM tasuki_jobrun AS job
        WHERE ready = 1 AND job.priority = part.priority AND "group" >= low AND "group" < high ORDER BY "group" LIMIT 1) AS found
    UNION ALL
    SELECT part.priority
    FROM unnest($6::smallint[], $7::text[], $8::text[], $9::text[]) AS part (priority, "group", low, high), {in_subjects}
    UNION ALL
    SELECT part.priority
    FROM unnest($10::smallint[], $11::text[], $12::text[], $13::smallint[], $14::text[], $15::text[])
        AS part (priority, "group", subject, kind, low, high), {in_execs}
    UNION ALL
    SELECT part.priority
    FROM unnest($16::smallint[], $17::text[], $18::text[], $19::smallint[], $20::text[], $21::bigint[])
        AS part (priority, "group", subject, kind, exec, floor), {in_queue}
) AS priorities

-- name: groups_above
WITH RECURSIVE head (name, n, high) AS (
    SELECT found.name, 1::bigint, high FROM unnest($3::text[], $4::text[]) AS part (low, high), LATERAL (
        SELECT "group" AS name FROM tasuki_jobrun
        WHERE ready = 1 AND priority = $1::smallint AND "group" >= low AND "group" < high ORDER BY "group" LIMIT 1) AS found
    UNION ALL
    SELECT found.name, n + 1, high FROM head, LATERAL (
        SELECT "group" AS name FROM tasuki_jobrun
        WHERE ready = 1 AND priority = $1 AND "group" > head.name AND "group" < high ORDER BY "group" LIMIT 1) AS found
    WHERE n < $2::bigint
)
SELECT name FROM head
UNION SELECT part."group"
FROM unnest($5::smallint[], $6::text[], $7::text[], $8::text[]) AS part (priority, "group", low, high), {in_subjects}
UNION SELECT part."group"
FROM unnest($9::smallint[], $10::text[], $11::text[], $12::smallint[], $13::text[], $14::text[])
    AS part (priority, "group", subject, kind, low, high), {in_execs}
UNION SELECT part."group"
FROM unnest($15::smallint[], $16::text[], $17::text[], $18::smallint[], $19::text[], $20::bigint[])
    AS part (priority, "group", subject, kind, exec, floor), {in_queue}

-- name: subjects_above
WITH RECURSIVE head (name, n, "group", high) AS (
    SELECT found.name, 1::bigint, part."group", high
    FROM unnest($3::smallint[], $4::text[], $5::text[], $6::text[]) AS part (priority, "group", low, high), LATERAL (
        SELECT subject AS name FROM tasuki_jobrun AS job
        WHERE ready = 1 AND job.priority = $1::smallint AND job."group" = part."group" AND subject >= low AND subject < high
        ORDER BY subject LIMIT 1) AS found
    UNION ALL
    SELECT found.name, n + 1, head."group", high FROM head, LATERAL (
        SELECT subject AS name FROM tasuki_jobrun AS job
        WHERE ready = 1 AND priority = $1 AND job."group" = head."group" AND subject > head.name AND subject < high
        ORDER BY subject LIMIT 1) AS found
    WHERE n < $2::bigint
)
SELECT name FROM head
UNION SELECT part.subject
FROM unnest($7::smallint[], $8::text[], $9::text[], $10::smallint[], $11::text[], $12::text[])
    AS part (priority, "group", subject, kind, low, high), {in_execs}
UNION SELECT part.subject
FROM unnest($13::smallint[], $14::text[], $15::text[], $16::smallint[], $17::text[], $18::bigint[])
    AS part (priority, "group", subject, kind, exec, floor), {in_queue}

-- name: ready_below
-- The oldest ready job of a queue among the ids of a range.
SELECT id FROM tasuki_jobrun
WHERE ready = 1 AND priority = $1::smallint AND "group" = $2::text AND subject = $3::text AND kind = $4::smallint
  AND exec = $5::text AND id > $6::bigint AND id <= $7::bigint
ORDER BY id LIMIT 1

-- part: granted
-- The terms, $1 … $10, are the same in all statements that grant.
    state = 'ASSIGNED', ready = 0, attempt = job.attempt + 1, version = job.version + 1,
    lease_id = $1::text || job.id, assigned_worker_id = $2::text, incarnation = $3::text, lease_expires_at = $4::float8,
    lease_ttl_s = $5::float8, on_disconnect = $6::text, reconnect_grace_s = $7::float8, assigned_at = $8::float8,
    leader_epoch = coalesce($9::bigint, leader_epoch), lease_owner = $10::text, started_at = NULL,
    exit_code = NULL, error_code = NULL, error_summary = '', permanent = 0,
    result = NULL, result_sha256 = NULL, result_size_bytes = NULL, meta = NULL, progress = NULL, progress_text = '',
    continuation_state = 'NONE', continuation_check_started_at = NULL, continuation_check_deadline_at = NULL

-- name: claim_of_queue
-- The oldest jobs of one queue, behind row $16, that no other server is about to lease.
WITH picked AS MATERIALIZED (
    SELECT id, state, result_sha256 FROM tasuki_jobrun
    WHERE ready = 1 AND priority = $11::smallint AND "group" = $12::text AND subject = $13::text AND kind = $14::smallint
      AND exec = $15::text AND id > $16::bigint AND (not_after IS NULL OR not_after >= $8)
    ORDER BY id LIMIT $17::bigint FOR UPDATE SKIP LOCKED
)
UPDATE tasuki_jobrun AS job SET {granted}
FROM picked WHERE job.id = picked.id
RETURNING job.id, idempotency_key, spec, submitter, attempt - 1, picked.state, picked.result_sha256

-- name: next_of_queues
-- The next $7 of each queue, by id, behind the one that was seen last; jobs that are too late to start at $8 are left for `late`.
SELECT place::bigint, head.id
FROM unnest($3::text[], $4::smallint[], $5::text[], $6::bigint[]) WITH ORDINALITY AS queue (subject, kind, exec, seen, place)
CROSS JOIN LATERAL (
    SELECT id FROM tasuki_jobrun
    WHERE ready = 1 AND priority = $1::smallint AND "group" = $2::text AND subject = queue.subject AND kind = queue.kind
      AND exec = queue.exec AND id > queue.seen AND (not_after IS NULL OR not_after >= $8::float8)
    ORDER BY id LIMIT $7::bigint) AS head

-- name: claim_of_rows
-- The first $12 of these rows that are still ready and that no other server is about to lease.
WITH picked AS MATERIALIZED (
    SELECT id, state, result_sha256 FROM tasuki_jobrun
    WHERE id = ANY($11::bigint[]) AND ready + 0 = 1 AND (not_after IS NULL OR not_after >= $8)
    ORDER BY id LIMIT $12::bigint FOR UPDATE SKIP LOCKED
)
UPDATE tasuki_jobrun AS job SET {granted}
FROM picked WHERE job.id = picked.id
RETURNING job.id, idempotency_key, spec, submitter, attempt - 1, picked.state, picked.result_sha256

-- name: named
SELECT id, idempotency_key, spec, submitter, attempt, state, result_sha256, "group", ready, lease_expires_at,
       not_after, subject
FROM tasuki_jobrun WHERE idempotency_key = $1::text FOR UPDATE

-- name: grant
UPDATE tasuki_jobrun AS job SET {granted}
WHERE id = ANY($11::bigint[]) AND ready + 0 = 1 AND (not_after IS NULL OR not_after >= $8)

-- name: take_from_lost
UPDATE tasuki_jobrun SET ready = 1, losses = $3::integer, version = version + 1, lease_expires_at = NULL
WHERE id = $1::bigint AND version = $2::bigint AND state IN ('ASSIGNED', 'RUNNING') AND lease_expires_at <= $4::float8

-- name: fetch
-- Runs that were assigned ahead and may start, for the same triples as in `held`. $1 the lease clock, $2 the margin, $3 the wall clock.
UPDATE tasuki_jobrun SET ready = 0, version = version + 1, lease_expires_at = $1::float8 + lease_ttl_s + $2::float8
WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED' AND ready + 0 = 4 AND lease_expires_at > $1 AND not_before <= $3::float8
  AND assigned_worker_id = ANY($4::text[])
  AND (assigned_worker_id, incarnation, lease_owner) IN (SELECT * FROM unnest($4, $5::text[], $6::text[]))

-- name: set_ahead
UPDATE tasuki_jobrun AS job SET
    state = new.state, ready = new.ready, attempt = new.attempt, version = job.version + 1, lease_id = new.lease_id,
    assigned_worker_id = new.worker_id, incarnation = new.incarnation, lease_expires_at = new.expires_at,
    lease_ttl_s = coalesce(new.ttl_s, lease_ttl_s), on_disconnect = new.on_disconnect, reconnect_grace_s = new.grace_s, assigned_at = new.assigned_at, lease_owner = new.owner,
    leader_epoch = $1::bigint
FROM unnest($2::bigint[], $3::bigint[], $4::text[], $5::smallint[], $6::bigint[], $7::text[], $8::text[], $9::text[],
            $10::float8[], $11::float8[], $12::text[], $13::float8[], $14::float8[], $15::text[])
     AS new (id, version, state, ready, attempt, lease_id, worker_id, incarnation,
             expires_at, ttl_s, on_disconnect, grace_s, assigned_at, owner)
WHERE job.id = new.id AND job.version = new.version AND job.ready + 0 > 2

-- name: held
-- For all triples of worker_id ($1), incarnation ($2) and owner ($3), in one walk over the live leases.
SELECT assigned_worker_id, incarnation, lease_owner, idempotency_key, spec, submitter, lease_id, attempt, lease_expires_at,
       on_disconnect, reconnect_grace_s, ready
FROM tasuki_jobrun
WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED' AND assigned_worker_id = ANY($1::text[])
  AND (assigned_worker_id, incarnation, lease_owner) IN (SELECT * FROM unnest($1, $2::text[], $3::text[]))
ORDER BY lease_expires_at, id


-- ------------------------------------------------------------------------------------------------ start, renew, release

-- name: start
UPDATE tasuki_jobrun AS job SET state = 'RUNNING', started_at = $1::float8, version = version + 1
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[])
     AS claim (id, job_id, lease_id, worker_id, incarnation, attempt, owner)
WHERE job.id = claim.id AND idempotency_key = job_id AND job.lease_id = claim.lease_id AND assigned_worker_id = worker_id
  AND job.incarnation = claim.incarnation AND job.attempt = claim.attempt AND lease_owner = owner AND state = 'ASSIGNED'
RETURNING idempotency_key, job.lease_id, assigned_worker_id, job.incarnation, job.attempt, lease_owner, cancel_requested

-- name: renew
UPDATE tasuki_jobrun AS job SET
    lease_expires_at = $1::float8 + ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END, lease_ttl_s = ttl_s
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::float8[])
     AS claim (id, job_id, lease_id, worker_id, incarnation, attempt, owner, ttl_s)
WHERE job.id = claim.id AND idempotency_key = job_id AND job.lease_id = claim.lease_id AND assigned_worker_id = worker_id
  AND job.incarnation = claim.incarnation AND job.attempt = claim.attempt AND lease_owner = owner
  AND state IN ('ASSIGNED', 'RUNNING')
RETURNING idempotency_key, job.lease_id, assigned_worker_id, job.incarnation, job.attempt, lease_owner, cancel_requested

-- name: tell_progress
UPDATE tasuki_jobrun AS job SET progress = claim.progress, progress_text = claim.text
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::float8[], $9::text[])
     AS claim (id, job_id, lease_id, worker_id, incarnation, attempt, owner, progress, text)
WHERE job.id = claim.id AND idempotency_key = job_id AND job.lease_id = claim.lease_id AND assigned_worker_id = worker_id
  AND job.incarnation = claim.incarnation AND job.attempt = claim.attempt AND lease_owner = owner
  AND state IN ('ASSIGNED', 'RUNNING')

-- name: tell_continuation
-- $1 the wall clock. 0 seconds: its worker may go on.
UPDATE tasuki_jobrun AS job SET
    continuation_state = CASE WHEN confirm_s > 0 THEN 'CONFIRMING' ELSE 'NONE' END,
    continuation_check_started_at = CASE WHEN confirm_s > 0 THEN $1::float8 END,
    continuation_check_deadline_at = CASE WHEN confirm_s > 0 THEN $1::float8 + confirm_s END
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::float8[])
     AS claim (id, job_id, lease_id, worker_id, incarnation, attempt, owner, confirm_s)
WHERE job.id = claim.id AND idempotency_key = job_id AND job.lease_id = claim.lease_id AND assigned_worker_id = worker_id
  AND job.incarnation = claim.incarnation AND job.attempt = claim.attempt AND lease_owner = owner
  AND state IN ('ASSIGNED', 'RUNNING')

-- name: resume
-- If another server is granting the job at this moment, this waits for it, and then finds nothing to resume.
UPDATE tasuki_jobrun AS job SET
    state = 'RUNNING', ready = 0, version = job.version + 1, started_at = coalesce(job.started_at, $2::float8),
    lease_expired_at = NULL, lease_ttl_s = ttl_s,
    lease_expires_at = $1::float8 + ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
FROM unnest($3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::text[], $10::float8[])
     AS claim (id, job_id, lease_id, worker_id, incarnation, attempt, owner, ttl_s)
WHERE job.id = claim.id AND idempotency_key = job_id AND job.lease_id = claim.lease_id AND assigned_worker_id = worker_id
  AND job.incarnation = claim.incarnation AND job.attempt = claim.attempt AND lease_owner = owner AND state = 'ORPHANED'
RETURNING idempotency_key, job.lease_id, assigned_worker_id, job.incarnation, job.attempt, lease_owner, cancel_requested

-- name: release
UPDATE tasuki_jobrun AS job SET
    state = 'PENDING', ready = CASE ready WHEN 3 THEN 3 ELSE 1 END, version = job.version + 1, lease_id = '',
    lease_expired_at = lease_expires_at, lease_expires_at = NULL
FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS claim (id, version, lease_id)
WHERE job.id = claim.id AND job.version = claim.version AND job.lease_id = claim.lease_id AND state = 'ASSIGNED'


-- name: leases_of
SELECT idempotency_key FROM tasuki_jobrun
WHERE lease_expires_at IS NOT NULL AND ($1::text = '' OR lease_owner = $1::text)
  AND ($2::text = '' OR assigned_worker_id = $2::text)
ORDER BY lease_expires_at, id LIMIT $3::bigint


-- ------------------------------------------------------------------------------------------------ finish, fail, reap

-- name: finish_plain
UPDATE tasuki_jobrun AS job SET
    state = 'SUCCEEDED', version = version + 1, lease_expires_at = NULL, finished_at = $1::float8,
    started_at = coalesce(job.started_at, report.started_at), exit_code = report.exit_code, result = report.result,
    result_sha256 = report.result_sha256, result_size_bytes = length(report.result)
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::float8[], $9::bigint[], $10::bytea[],
            $11::text[])
     AS report (id, job_id, lease_id, worker_id, attempt, owner, started_at, exit_code, result, result_sha256)
WHERE job.id = report.id AND idempotency_key = job_id AND job.lease_id = report.lease_id AND assigned_worker_id = worker_id
  AND job.attempt = report.attempt AND lease_owner = owner AND state IN ('ASSIGNED', 'RUNNING')
RETURNING job.id, "group"

-- name: finish_full
UPDATE tasuki_jobrun AS job SET
    state = 'SUCCEEDED', version = version + 1, lease_expires_at = NULL, finished_at = $1::float8,
    started_at = coalesce(job.started_at, report.started_at), exit_code = report.exit_code, result = report.result,
    result_sha256 = report.result_sha256, result_size_bytes = report.result_size_bytes, error_code = report.error_code,
    error_summary = report.message, meta = report.meta
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::float8[], $9::bigint[], $10::bytea[],
            $11::text[], $12::bigint[], $13::text[], $14::text[], $15::bytea[])
     AS report (id, job_id, lease_id, worker_id, attempt, owner, started_at, exit_code, result, result_sha256,
                result_size_bytes, error_code, message, meta)
WHERE job.id = report.id AND idempotency_key = job_id AND job.lease_id = report.lease_id AND assigned_worker_id = worker_id
  AND job.attempt = report.attempt AND lease_owner = owner AND state IN ('ASSIGNED', 'RUNNING')
RETURNING job.id, "group"

-- name: settle
UPDATE tasuki_jobrun AS job SET
    state = new.state, ready = new.ready, not_before = new.not_before, version = job.version + 1,
    lease_id = new.lease_id, lease_expires_at = NULL, lease_expired_at = was_expires_at,
    failures = new.failures, losses = new.losses,
    started_at = new.started_at, finished_at = new.finished_at, leader_epoch = new.leader_epoch,
    exit_code = new.exit_code, error_code = new.error_code, error_summary = new.error_summary, permanent = new.permanent,
    result = new.result, result_sha256 = new.result_sha256, result_size_bytes = new.result_size_bytes, meta = new.meta,
    replaced_report = new.replaced_report
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::float8[],
            $8::text[], $9::smallint[], $10::float8[], $11::text[], $12::integer[], $13::integer[], $14::float8[], $15::float8[],
            $16::bigint[], $17::bigint[], $18::text[], $19::text[], $20::smallint[], $21::bytea[], $22::text[], $23::bigint[],
            $24::bytea[], $25::bytea[])
     AS new (id, was_state, was_version, was_attempt, was_lease_id, was_worker_id, was_expires_at,
             state, ready, not_before, lease_id, failures, losses, started_at, finished_at,
             leader_epoch, exit_code, error_code, error_summary, permanent, result, result_sha256, result_size_bytes,
             meta, replaced_report)
WHERE job.id = new.id AND job.state = was_state AND job.version = was_version AND attempt = was_attempt
  AND job.lease_id = was_lease_id AND assigned_worker_id IS NOT DISTINCT FROM was_worker_id
  AND lease_expires_at IS NOT DISTINCT FROM was_expires_at

-- name: add_incidents
INSERT INTO tasuki_incident (job_id, at, kind, attempt, worker_id, actor, reason)
SELECT * FROM unnest($1::bigint[], $2::float8[], $3::text[], $4::bigint[], $5::text[], $6::text[], $7::text[])

-- name: count
INSERT INTO tasuki_counter AS counter (shard, "group", state, n)
SELECT $1::smallint, delta.* FROM unnest($2::text[], $3::text[], $4::bigint[]) AS delta
ON CONFLICT ("group", state, shard) DO UPDATE SET n = counter.n + excluded.n


-- ------------------------------------------------------------------------------------------------ the leader

-- name: epoch
-- The fence: shared between the leader's transactions; a takeover waits until this transaction has ended.
SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = $1::text FOR SHARE

-- name: epoch_seen
SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = $1::text

-- name: take_over
INSERT INTO tasuki_scopeepoch AS known (scope, epoch, holder, taken_over_at)
VALUES ($1::text, $2::bigint, $3::text, $4::float8)
ON CONFLICT (scope) DO UPDATE SET epoch = excluded.epoch, holder = excluded.holder, taken_over_at = excluded.taken_over_at
WHERE known.epoch < excluded.epoch

-- name: record_once
-- A row of a scope that is no leader's: $2 what was recorded first stays.
INSERT INTO tasuki_scopeepoch (scope, epoch, holder) VALUES ($1::text, 0, $2::text) ON CONFLICT (scope) DO NOTHING

-- name: taken_over_at
SELECT taken_over_at FROM tasuki_scopeepoch WHERE scope = $1::text

-- name: renew_all
-- $1 the lease clock with the margin, $2 the same at the takeover before. Leases that only that takeover renewed are left.
-- SKIP LOCKED: no transaction of an application keeps a leader from taking over.
WITH leased AS MATERIALIZED (
    SELECT id FROM tasuki_jobrun
    WHERE lease_expires_at IS NOT NULL AND ready + 0 < 3
      AND lease_expires_at > $2::float8 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
    ORDER BY id FOR UPDATE SKIP LOCKED
)
UPDATE tasuki_jobrun AS job SET
    lease_expires_at = $1::float8 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
FROM leased WHERE job.id = leased.id

-- name: not_renewed
-- A row if others have some of these leases locked; then it waits a little: turns of servers last for milliseconds.
SELECT pg_sleep(0.05) FROM (
    SELECT FROM tasuki_jobrun
    WHERE lease_expires_at IS NOT NULL
      AND lease_expires_at > $2::float8 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
      AND lease_expires_at < $1::float8 + lease_ttl_s + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END
    LIMIT 1
) AS locked

-- name: leases_over
-- Rows that another server is writing at this moment (a renewal, a finish) are left for the next call.
SELECT id FROM tasuki_jobrun
WHERE lease_expires_at IS NOT NULL AND lease_expires_at > $1::float8 AND lease_expires_at <= $2::float8 AND ready + 0 <> 3
ORDER BY lease_expires_at, id LIMIT $3::bigint FOR UPDATE SKIP LOCKED

-- name: late
SELECT id FROM tasuki_jobrun WHERE not_after IS NOT NULL AND ready > 0 AND not_after < $1::float8 AND ready < 3
ORDER BY not_after, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED

-- name: delayed_due
SELECT id, subject, kind, exec FROM tasuki_jobrun WHERE ready = 2 AND not_before > $1::float8 AND not_before <= $2::float8
ORDER BY not_before, id LIMIT $3::bigint FOR UPDATE SKIP LOCKED

-- name: promote
UPDATE tasuki_jobrun SET ready = 1, version = version + 1 WHERE id = ANY($1::bigint[]) AND ready + 0 = 2

-- name: old
SELECT id, state, "group", created_at, finished_at FROM tasuki_jobrun WHERE id > $1::bigint ORDER BY id LIMIT $2::bigint

-- name: still_old
SELECT id FROM tasuki_jobrun WHERE id = ANY($1::bigint[]) AND finished_at < $2::float8 ORDER BY id FOR UPDATE SKIP LOCKED

-- name: prune_jobs
DELETE FROM tasuki_jobrun WHERE id = ANY($1::bigint[])

-- name: prune_incidents
DELETE FROM tasuki_incident WHERE job_id = ANY($1::bigint[])

-- name: prune_logs
DELETE FROM tasuki_logchunk WHERE job_id = ANY($1::bigint[])

-- name: prune_events
DELETE FROM tasuki_event WHERE id IN (
    SELECT id FROM tasuki_event WHERE id IN (SELECT id FROM tasuki_event ORDER BY id LIMIT $1::bigint) AND processed_at < $2::float8
    FOR UPDATE SKIP LOCKED)

-- name: job_to_archive
SELECT id FROM tasuki_jobrun WHERE id = $1::bigint AND version = $2::integer FOR UPDATE

-- name: forget_log
DELETE FROM tasuki_jobblob WHERE job_id = $1::bigint AND role = 'log'

-- name: add_log
INSERT INTO tasuki_jobblob (job_id, sha256, role) VALUES ($1::bigint, $2::text, 'log')

-- name: set_log_ref
-- An address that the application wrote stays.
UPDATE tasuki_jobrun SET log_ref = $2::text WHERE id = $1::bigint AND (log_ref = '' OR log_ref LIKE 'blob:%')

-- name: delete_log_chunks
DELETE FROM tasuki_logchunk WHERE id = ANY($1::bigint[])

-- name: prune_notes
DELETE FROM tasuki_definitionstate WHERE definition_id IN (
    SELECT definition_id FROM tasuki_definitionstate AS state
    WHERE waits_for = '' AND next_at IS NULL AND NOT EXISTS (SELECT 1 FROM tasuki_jobdefinition WHERE id = state.definition_id)
    FOR UPDATE SKIP LOCKED)

-- name: prune_rollups
DELETE FROM tasuki_minuterollup WHERE id IN (
    SELECT id FROM tasuki_minuterollup WHERE minute < $2::float8 ORDER BY minute LIMIT $1::bigint)

-- name: prune_blobs
DELETE FROM tasuki_jobblob WHERE job_id = ANY($1::bigint[])

-- name: take_counters
-- Takes the counters of all shards, except rows that are being written; values other than 0 are added to this writer's shard again.
DELETE FROM tasuki_counter WHERE id IN (
    SELECT id FROM tasuki_counter WHERE "group" = ANY($1::text[]) ORDER BY id FOR UPDATE SKIP LOCKED)
RETURNING "group", state, n

-- name: take_deltas
DELETE FROM tasuki_counter WHERE id IN (
    SELECT id FROM tasuki_counter WHERE shard IS NULL ORDER BY id LIMIT $1::bigint FOR UPDATE SKIP LOCKED)
RETURNING "group", state, n

-- name: next_lease_over
SELECT min(lease_expires_at) FROM tasuki_jobrun WHERE lease_expires_at IS NOT NULL

-- name: next_delayed
SELECT min(not_before) FROM tasuki_jobrun WHERE ready = 2 AND not_before > $1::float8


-- ------------------------------------------------------------------------------------------------ definitions and events

-- part: definition
definition.id, name, enabled, type, event_type, command_name, CAST(default_args_json AS text), schedule_type, schedule_value, time_zone,
queue, timeout_seconds, max_retries, retry_backoff_seconds, concurrency_policy, definition.changed_at,
fired_until, next_at, plan, state.changed_at, last_run_id, waits_for, problem
FROM tasuki_jobdefinition AS definition LEFT JOIN tasuki_definitionstate AS state ON state.definition_id = definition.id

-- name: due_definitions
SELECT {definition}
WHERE CASE WHEN enabled AND type = 'time'
           THEN next_at <= $1::float8 OR fired_until > $2::float8 OR plan IS DISTINCT FROM schedule_type || ' ' || schedule_value || ' ' || time_zone
                OR state.changed_at IS DISTINCT FROM definition.changed_at
                OR (next_at <= $4::float8 AND problem = '' AND NOT EXISTS (
                    SELECT 1 FROM tasuki_jobrun
                    WHERE idempotency_key = 'd' || definition.id || '-' || CAST(next_at AS bigint)))
           ELSE next_at IS NOT NULL OR plan <> '' END
ORDER BY next_at NULLS FIRST, definition.id LIMIT $3::bigint

-- name: definitions_for_events
SELECT {definition} WHERE (enabled AND type = 'event') OR definition.id = ANY($1::bigint[]) ORDER BY definition.id

-- name: new_events
SELECT id, event_type, CAST(payload_json AS text), created_at, job_definition_id FROM tasuki_event
WHERE processed_at IS NULL ORDER BY id LIMIT $1::bigint FOR UPDATE SKIP LOCKED

-- name: events_processed
UPDATE tasuki_event SET processed_at = $1::float8 WHERE id = ANY($2::bigint[]) AND processed_at IS NULL

-- name: events_refused
UPDATE tasuki_event AS event SET problem = refused.problem FROM unnest($1::bigint[], $2::text[]) AS refused (id, problem)
WHERE event.id = refused.id

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
UPDATE tasuki_jobrun AS job SET
    job_definition_id = run.definition_id, scheduled_for = run.scheduled_for, leader_epoch = epoch,
    ready = coalesce(new_ready, ready)
FROM unnest($1::text[], $2::bigint[], $3::float8[], $4::bigint[], $5::smallint[])
     AS run (job_id, definition_id, scheduled_for, epoch, new_ready)
WHERE idempotency_key = job_id AND state = 'PENDING'

-- name: waiting_over
SELECT definition_id, last_run_id, job.id, subject, kind, exec FROM tasuki_definitionstate AS state
LEFT JOIN tasuki_jobrun AS job ON idempotency_key = last_run_id AND job.state = 'PENDING' AND ready + 0 = 0
WHERE waits_for <> '' AND NOT EXISTS (
    SELECT 1 FROM tasuki_jobrun AS earlier
    WHERE earlier.idempotency_key = waits_for AND earlier.state IN ('PENDING', 'ASSIGNED', 'RUNNING', 'ORPHANED'))
FOR UPDATE OF state SKIP LOCKED

-- name: forget_waiting
UPDATE tasuki_definitionstate SET waits_for = '' WHERE definition_id = ANY($1::bigint[])

-- name: make_ready
UPDATE tasuki_jobrun SET ready = 1, version = version + 1
WHERE id = ANY($1::bigint[]) AND state = 'PENDING' AND ready + 0 = 0

-- name: lock_notes
SELECT definition_id, last_run_id, waits_for FROM tasuki_definitionstate WHERE definition_id = ANY($1::bigint[])
ORDER BY definition_id FOR UPDATE SKIP LOCKED

-- name: ahead_among
SELECT idempotency_key, body_hash FROM tasuki_jobrun WHERE idempotency_key = ANY($1::text[]) AND ready + 0 = 3

-- name: next_of_nothing
SELECT definition_id, next_at, problem FROM tasuki_definitionstate AS state
WHERE next_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM tasuki_jobdefinition WHERE id = definition_id)
FOR UPDATE SKIP LOCKED

-- name: forget_next
UPDATE tasuki_definitionstate SET next_at = NULL WHERE definition_id = ANY($1::bigint[])

-- name: runs_ahead
SELECT idempotency_key, subject, kind, exec, ready, assigned_worker_id, incarnation, attempt FROM (
    SELECT idempotency_key, subject, kind, exec, ready, assigned_worker_id, incarnation, attempt, scheduled_for FROM tasuki_jobrun
    WHERE lease_expires_at IS NOT NULL AND state = 'ASSIGNED' AND ready + 0 > 2
    UNION ALL
    SELECT idempotency_key, subject, kind, exec, ready, '', '', 0, scheduled_for
    FROM tasuki_definitionstate JOIN tasuki_jobrun AS job ON idempotency_key = 'd' || definition_id || '-' || CAST(next_at AS bigint)
    WHERE next_at IS NOT NULL AND problem = '' AND job.state = 'PENDING' AND ready + 0 = 3) AS found
ORDER BY scheduled_for, idempotency_key LIMIT $1::bigint

-- name: lock_free_runs
SELECT idempotency_key FROM tasuki_jobrun WHERE idempotency_key = ANY($1::text[]) ORDER BY id FOR UPDATE SKIP LOCKED

-- name: notes_of_runs
SELECT idempotency_key, state.definition_id, last_run_id, waits_for FROM tasuki_jobrun
JOIN tasuki_jobdefinition AS definition ON definition.id = job_definition_id
JOIN tasuki_definitionstate AS state ON state.definition_id = definition.id
WHERE idempotency_key = ANY($1::text[]) AND NOT (concurrency_policy = 'allow' OR (concurrency_policy = '' AND type = 'event'))
ORDER BY state.definition_id FOR UPDATE OF state

-- name: run_again
UPDATE tasuki_definitionstate AS state SET last_run_id = job_id, waits_for = ''
FROM unnest($1::bigint[], $2::text[]) AS run (definition_id, job_id) WHERE state.definition_id = run.definition_id

-- name: save_firing
INSERT INTO tasuki_definitionstate (definition_id, fired_until, next_at, plan, changed_at, last_run_id, waits_for, problem)
SELECT * FROM unnest($1::bigint[], $2::float8[], $3::float8[], $4::text[], $5::float8[], $6::text[], $7::text[], $8::text[])
ON CONFLICT (definition_id) DO UPDATE SET
    fired_until = excluded.fired_until, next_at = excluded.next_at, plan = excluded.plan, changed_at = excluded.changed_at,
    last_run_id = excluded.last_run_id, waits_for = excluded.waits_for, problem = excluded.problem

-- name: next_nominal
SELECT min(next_at) FROM tasuki_definitionstate AS state JOIN tasuki_jobdefinition AS definition ON definition.id = definition_id
WHERE enabled AND type = 'time'

-- name: started_in_time
UPDATE tasuki_jobrun SET not_after = NULL
WHERE idempotency_key = ANY($1::text[]) AND job_definition_id IS NOT NULL AND not_after IS NOT NULL


-- ------------------------------------------------------------------------------------------------ readers

-- name: rows_to_judge
SELECT {columns_but_result} FROM tasuki_jobrun WHERE idempotency_key = ANY($1::text[]) ORDER BY id FOR UPDATE

-- name: rows_seen
SELECT {columns_but_result} FROM tasuki_jobrun WHERE idempotency_key = ANY($1::text[])

-- name: rows_by_key
SELECT {columns} FROM tasuki_jobrun WHERE idempotency_key = ANY($1::text[])

-- name: rows_by_id
SELECT {columns} FROM tasuki_jobrun WHERE id = ANY($1::bigint[])

-- name: incidents
SELECT at, kind, attempt, worker_id, actor, reason FROM tasuki_incident
WHERE job_id = (SELECT id FROM tasuki_jobrun WHERE idempotency_key = $1::text) ORDER BY id

-- name: alive_among
SELECT idempotency_key FROM tasuki_jobrun
WHERE idempotency_key = ANY($1::text[]) AND state IN ('PENDING', 'ASSIGNED', 'RUNNING', 'ORPHANED')

-- name: counts
SELECT "group", state, sum(n)::bigint FROM tasuki_counter GROUP BY "group", state HAVING sum(n) <> 0

-- name: place
SELECT id, priority, "group", subject, kind, exec FROM tasuki_jobrun WHERE idempotency_key = $1::text AND ready + 0 = 1

-- name: head_of_queue
SELECT idempotency_key FROM tasuki_jobrun
WHERE ready = 1 AND priority = $1::smallint AND "group" = $2::text AND subject = $3::text AND kind = $4::smallint AND exec = $5::text
ORDER BY id LIMIT $6::bigint

-- name: ahead
SELECT count(*) FROM (
    SELECT 1 FROM tasuki_jobrun
    WHERE ready = 1 AND priority = $2::smallint AND "group" = $3::text AND subject = $4::text AND kind = $5::smallint
      AND exec = $6::text AND id < $1::bigint
    LIMIT $7::bigint) AS ahead

-- name: blob_owners
SELECT owner FROM (
    SELECT idempotency_key AS owner, min(blob.id) AS place, 0 AS kind
    FROM tasuki_jobblob AS blob JOIN tasuki_jobrun AS job ON job.id = blob.job_id WHERE blob.sha256 = $1::text GROUP BY 1
    UNION ALL
    SELECT 'cache:' || cache_id, min(id), 1 FROM tasuki_cachefile WHERE sha256 = $1::text GROUP BY 1) AS owners
ORDER BY kind, place LIMIT $2::bigint

-- name: id_range
SELECT (SELECT min(id) FROM tasuki_jobrun), (SELECT max(id) FROM tasuki_jobrun)

-- name: created_from_id
SELECT id, created_at FROM tasuki_jobrun WHERE id >= $1::bigint ORDER BY id LIMIT 1

-- name: find_by_array
SELECT {found} FROM tasuki_jobrun
WHERE array_id IS NOT NULL AND array_id = :array_id::text AND id >= :low::bigint AND id < :high::bigint {and}
ORDER BY id DESC LIMIT :most::bigint

-- name: find_failed
SELECT {found} FROM tasuki_jobrun WHERE error_code IS NOT NULL AND id < :high::bigint {and} ORDER BY id DESC LIMIT :most::bigint

-- name: find_leased
-- Sorts only the live leases: without MATERIALIZED the planner would walk all jobs by id to avoid the sort.
WITH leased AS MATERIALIZED (
    SELECT {found} FROM tasuki_jobrun WHERE lease_expires_at IS NOT NULL AND id < :high::bigint {and}
)
SELECT * FROM leased ORDER BY id DESC LIMIT :most::bigint

-- name: find_by_id
SELECT {found} FROM tasuki_jobrun WHERE id >= :low::bigint AND id < :high::bigint {and} ORDER BY id DESC LIMIT :most::bigint


-- ------------------------------------------------------------------------------------------------ tokens

-- name: add_token
INSERT INTO tasuki_token ({token})
VALUES ($1::text, $2::text, $3::text, $4::text, $5::text::jsonb, $6::text, $7::float8, $8::text, $9::float8, $10::float8,
    $11::text, $12::text)
ON CONFLICT DO NOTHING

-- name: token
SELECT {token_as_read} FROM tasuki_token WHERE sha256 = $1::text

-- name: tokens
SELECT {token_as_read} FROM tasuki_token ORDER BY id

-- name: unrevoked_among
SELECT token_id FROM tasuki_token WHERE token_id = ANY($1::text[]) AND revoked_at IS NULL

-- name: add_audit
INSERT INTO tasuki_audit (at, actor, action, target, detail) VALUES ($1::float8, $2::text, $3::text, $4::text, $5::text)

-- name: audit
SELECT id, at, actor, action, target, detail FROM tasuki_audit WHERE id < $2::bigint ORDER BY id DESC LIMIT $1::bigint

-- name: revoke_token
UPDATE tasuki_token SET revoked_at = $2::float8, revoked_by = $3::text WHERE token_id = $1::text AND revoked_at IS NULL


-- ------------------------------------------------------------------------------------------------ pauses

-- name: paused_patterns
-- Read by every lease. FOR KEY SHARE locks no row here, only the table, against `lock_pauses`: once a pause is stored, no lease
-- that has not seen it is under way. The snapshot of a statement is taken after its lock.
SELECT pattern FROM tasuki_subjectpause
WHERE NOT EXISTS (SELECT FROM tasuki_subjectpause WHERE FALSE FOR KEY SHARE)

-- name: lock_pauses
-- Waits for all leases under way, and lets the next ones wait; readers do not.
LOCK TABLE tasuki_subjectpause IN EXCLUSIVE MODE

-- name: pauses
SELECT pattern, since, actor, reason FROM tasuki_subjectpause ORDER BY pattern

-- name: add_pause
INSERT INTO tasuki_subjectpause (pattern, since, actor, reason)
VALUES ($1::text, $2::float8, $3::text, $4::text) ON CONFLICT DO NOTHING

-- name: remove_pause
DELETE FROM tasuki_subjectpause WHERE pattern = $1::text


-- ------------------------------------------------------------------------------------------------ marks of turns

-- name: mark
INSERT INTO tasuki_turnmark (writer, turn, at) VALUES ($1::text, $2::bigint, $3::float8)
ON CONFLICT (writer) DO UPDATE SET turn = excluded.turn, at = excluded.at

-- name: last_mark
-- Writes, so that it waits for a transaction that still holds the row, or is about to insert it.
INSERT INTO tasuki_turnmark AS known (writer, turn, at) VALUES ($1::text, 0, extract(epoch FROM clock_timestamp()))
ON CONFLICT (writer) DO UPDATE SET at = excluded.at
RETURNING known.turn

-- name: forget_mark
DELETE FROM tasuki_turnmark WHERE writer = $1::text


-- ------------------------------------------------------------------------------------------------ blobs
-- Locks: a writer of a reference holds FOR KEY SHARE on the blob's row until it commits, collection FOR UPDATE, and these exclude
-- each other; touching a row takes neither. A writer that waited for a row that was then condemned finds that in the recheck.

-- name: stored_blobs
SELECT sha256, size_bytes FROM tasuki_blob
WHERE sha256 = ANY($1::text[]) AND stored = 1 AND condemned = 0 ORDER BY sha256 FOR KEY SHARE

-- name: blob_places
SELECT sha256, size_bytes, generation, stored FROM tasuki_blob
WHERE sha256 = ANY($1::text[]) AND stored = 1 AND condemned = 0

-- name: touch_blobs
WITH live AS MATERIALIZED (
    SELECT id FROM tasuki_blob WHERE sha256 = ANY($2::text[]) AND condemned = 0 ORDER BY sha256 FOR NO KEY UPDATE)
UPDATE tasuki_blob AS blob SET touched_at = $1::float8 FROM live WHERE blob.id = live.id
RETURNING sha256, size_bytes, generation, stored

-- name: place_blobs
INSERT INTO tasuki_blob (touched_at, sha256, size_bytes, generation)
SELECT $1::float8, sha256, size_bytes,
       greatest($2::integer, (SELECT max(generation) + 1 FROM tasuki_blob AS known WHERE known.sha256 = new.sha256))
FROM unnest($3::text[], $4::bigint[]) AS new (sha256, size_bytes)
ON CONFLICT DO NOTHING

-- name: blobs_stored
WITH live AS MATERIALIZED (
    SELECT blob.id, place.size_bytes
    FROM tasuki_blob AS blob
    JOIN unnest($2::text[], $3::integer[], $4::bigint[]) AS place (sha256, generation, size_bytes)
      ON blob.sha256 = place.sha256 AND blob.generation = place.generation
    WHERE condemned = 0 ORDER BY blob.sha256 FOR NO KEY UPDATE OF blob)
UPDATE tasuki_blob AS blob SET
    stored = 1, touched_at = $1::float8, size_bytes = CASE stored WHEN 1 THEN blob.size_bytes ELSE live.size_bytes END
FROM live WHERE blob.id = live.id
RETURNING sha256, generation

-- name: condemned_blobs
SELECT sha256, size_bytes, generation, stored FROM tasuki_blob WHERE condemned = 1 ORDER BY touched_at, id LIMIT $1::bigint

-- name: blob_bytes
SELECT coalesce(sum(size_bytes), 0)::bigint FROM tasuki_blob WHERE condemned = 0

-- name: blobs_by_age
SELECT id, touched_at, size_bytes,
    EXISTS (SELECT 1 FROM tasuki_jobblob AS used WHERE used.sha256 = tasuki_blob.sha256)
    OR EXISTS (SELECT 1 FROM tasuki_cachefile AS used WHERE used.sha256 = tasuki_blob.sha256)
FROM tasuki_blob WHERE condemned = 0 AND (touched_at, id) > ($1::float8, $2::bigint) AND touched_at < $3::float8
ORDER BY touched_at, id LIMIT $4::bigint

-- name: lock_blobs
SELECT id FROM tasuki_blob WHERE id = ANY($1::bigint[]) AND condemned = 0 AND touched_at < $2::float8
ORDER BY id FOR UPDATE SKIP LOCKED

-- name: condemn_blobs
-- After `lock_blobs`, never in one statement with it: only then does it see every reference that was written before the lock.
UPDATE tasuki_blob SET condemned = 1
WHERE id = ANY($1::bigint[]) AND condemned = 0
  AND NOT EXISTS (SELECT 1 FROM tasuki_jobblob AS used WHERE used.sha256 = tasuki_blob.sha256)
  AND NOT EXISTS (SELECT 1 FROM tasuki_cachefile AS used WHERE used.sha256 = tasuki_blob.sha256)
RETURNING id, sha256, size_bytes, generation, stored

-- name: forget_blobs
DELETE FROM tasuki_blob AS blob USING unnest($1::text[], $2::integer[]) AS place (sha256, generation)
WHERE blob.sha256 = place.sha256 AND blob.generation = place.generation AND condemned = 1


-- ------------------------------------------------------------------------------------------------ caches

-- name: cache_target
SELECT target FROM tasuki_cachefile WHERE cache_id = $1::text ORDER BY id LIMIT 1

-- name: lock_cache
-- Until the transaction ends, also where the cache has no row yet. Only the next statement sees what was committed before.
SELECT pg_advisory_xact_lock(hashtextextended($1::text, 0))

-- name: cache_names
SELECT name FROM tasuki_cachefile WHERE cache_id = $1::text

-- name: cached_files
SELECT cache_id, name, sha256, size_bytes, target, owner, added_at FROM tasuki_cachefile
WHERE cache_id = $1::text AND name = ANY($2::text[])

-- name: cache
SELECT name, sha256, size_bytes, target, owner, added_at FROM tasuki_cachefile WHERE cache_id = $1::text AND name > $2::text
ORDER BY name LIMIT $3::bigint

-- name: caches
SELECT known.cache_id, files, total_bytes, target, owner, added_at
FROM (SELECT cache_id, count(*) AS files, sum(size_bytes)::bigint AS total_bytes, min(id) AS first_id FROM tasuki_cachefile
      WHERE cache_id > $1::text GROUP BY cache_id ORDER BY cache_id LIMIT $2::bigint) AS known
JOIN tasuki_cachefile ON tasuki_cachefile.id = first_id ORDER BY known.cache_id

-- name: add_cached_files
INSERT INTO tasuki_cachefile (cache_id, target, owner, added_at, name, sha256, size_bytes)
SELECT $1::text, $2::text, $3::text, $4::float8, new.name, new.sha256, new.size_bytes
FROM unnest($5::text[], $6::text[], $7::bigint[]) AS new (name, sha256, size_bytes)

-- name: remove_cache
DELETE FROM tasuki_cachefile WHERE cache_id = $1::text AND target = $2::text


-- ------------------------------------------------------------------------------------------------ statistics

-- name: add_rollups
INSERT INTO tasuki_minuterollup (minute, server_id, data)
SELECT new.minute, new.server_id, new.data FROM unnest($1::bigint[], $2::text[], $3::bytea[]) AS new (minute, server_id, data)
ON CONFLICT DO NOTHING

-- name: rollups
SELECT data FROM tasuki_minuterollup WHERE minute >= $1::bigint AND minute < $2::bigint ORDER BY minute, server_id
