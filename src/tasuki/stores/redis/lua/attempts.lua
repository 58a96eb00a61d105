-- Attempts: their outcomes, their leases, how they begin and end.
--
-- An outcome is in {app}:outcome:{id}, and in {app}:result|summary|freqs:{id} for parts that have a key of their own. Here it is
-- { packed = msgpack, r = bytes, s = text, f = text, blob = sha256 of a result that is a blob, blob_bytes = its size }, and p for
-- what outsiders read instead of a blob's bytes.

local PARTS = { 'r', 's', 'f', 'p' }
local KEYS_OF_PARTS = { r = 'result', s = 'summary', f = 'freqs', p = 'result' }

-- Writes the outcome; with a ttl if the job ends with it.
function outcomes.write(job, ended, changes, ttl_s)
  outcomes.clear(job, changes)
  put(of('outcome', job.id), ended.packed)
  ended.p = ended.blob
    and job.shown
    and string.format('{"tasuki_blob":{"sha256":"%s","size_bytes":%s}}', ended.blob, ended.blob_bytes)
  local flags = 'o'
  for i = 1, #PARTS do
    local part = PARTS[i]
    if ended[part] then
      local name = of(KEYS_OF_PARTS[part], job.id)
      if ttl_s then
        write('SET', name, ended[part], 'EX', ttl_s)
      else
        put(name, ended[part])
      end
      flags = flags .. part
    end
  end
  if ended.blob then
    blobs.refer(ended.blob, job.id)
    changes.result_blob = ended.blob
  end
  changes.outcome = flags
end

function outcomes.clear(job, changes)
  if not job.outcome then
    return
  end
  drop(of('outcome', job.id))
  for part, kind in pairs(KEYS_OF_PARTS) do
    if string.find(job.outcome, part, 2, true) then
      drop(of(kind, job.id))
    end
  end
  if job.result_blob and not string.find(jobs.facts(job).inputs or '', job.result_blob, 1, true) then
    blobs.unrefer(job.result_blob, job.id)
  end
  changes.outcome = false
  changes.result_blob = false
end

-- Returns an outcome that the store makes itself.
function outcomes.of_store(error_code, message)
  return { packed = cmsgpack.pack({ error_code = error_code, message = message }) }
end

-- Returns the message or code of a packed outcome, nil if it has none.
function outcomes.message_of(packed)
  -- This reader of msgpack does not know bytes, which the worker's own notes may have; then the message is lost, not the turn.
  local readable, outcome = pcall(cmsgpack.unpack, packed)
  return readable and (outcome.message or outcome.error_code) or nil
end

-- Returns the message or code of the job's outcome, nil if there is none.
function outcomes.summary(job)
  return job.outcome and outcomes.message_of(redis.call('GET', of('outcome', job.id))) or nil
end

-- A lease is the right to run one attempt. The job's record has its holder, {app}:lease:index the time when it may be taken from
-- its worker. Outsiders may read {app}:lease:{id}. The lease of an ORPHANED job is in no index.

-- Returns when the lease may be taken from its worker.
function leases.over_at(id)
  return tonumber(redis.call('ZSCORE', key.index, id) or 0)
end

-- Returns until when the worker holds the lease; with `keep` it may be taken only later.
function leases.expires_at(job)
  return job.expires_at or text(leases.over_at(job.id))
end

local ends = {} -- ttl_s -> when a lease ends that is granted now

local function count_from_now(job)
  local expires_at = ends[job.ttl_s]
  if not expires_at then
    expires_at = text(now.lease + tonumber(job.ttl_s) + LEASE_MARGIN_S)
    ends[job.ttl_s] = expires_at
  end
  if job.keep then
    jobs.set(job, { expires_at = expires_at })
    rank(key.index, text(tonumber(expires_at) + tonumber(job.reconnect_grace_s)), job.id)
  else
    rank(key.index, expires_at, job.id)
  end
  return expires_at
end

-- Begins the lease that was written into the record.
function leases.begin(job)
  local expires_at = count_from_now(job)
  if job.shown then
    local holder = job.assigned_worker_id
    write_hash(of('lease', job.id), 'worker_id', holder, 'lease_id', job.lease_id, 'expires_at', expires_at)
  end
end

function leases.extend(job, ttl_s)
  if job.ttl_s ~= ttl_s then
    jobs.set(job, { ttl_s = ttl_s })
  end
  if job.is_extended then
    flush_ranks()
  end
  job.is_extended = true
  local expires_at = count_from_now(job)
  if job.shown then
    write_hash(of('lease', job.id), 'expires_at', expires_at)
  end
end

-- Returns whether its worker got or renewed the lease after this time.
function leases.renewed_since(job, at)
  local expires_at = at + tonumber(job.ttl_s) + LEASE_MARGIN_S
  return leases.over_at(job.id) > expires_at + TAKEOVER_TIE_S + (job.keep and tonumber(job.reconnect_grace_s) or 0)
end

-- Removes the lease from the fields of a record.
function leases.remove(job, changes)
  if job.lease_id then
    if job.shown then
      drop(of('lease', job.id))
    end
    changes.lease_id, changes.incarnation, changes.owner, changes.ttl_s = false, false, false, false
    changes.keep, changes.reconnect_grace_s, changes.expires_at = false, false, false
  end
end

-- Returns whether this is the current lease. Reports come without the incarnation.
function leases.is(job, worker_id, incarnation, lease_id, attempt, owner)
  return job.lease_id == lease_id
    and job.assigned_worker_id == worker_id
    and job.attempt == attempt
    and (job.owner or '') == owner
    and (incarnation == nil or job.incarnation == incarnation)
end

-- Grants the job to `to.worker_id`: one attempt more, a new lease.
function attempts.grant(job, to, epoch)
  local was = job.state
  if not LEASED[was] then
    jobs.leave(job)
  end
  if job.outcome then
    local changes = {}
    outcomes.clear(job, changes)
    jobs.set(job, changes)
  end
  -- Field by field: this is done for every job, and a table of changes costs as much as all the rest.
  job.state = rules.after(was, 'grant')
  job.attempt = plus_one(job.attempt)
  job.assigned_worker_id, job.assigned_at = to.worker_id, now.text
  job.lease_id, job.incarnation, job.owner, job.ttl_s = to.lease_id, to.incarnation, to.owner, to.ttl_s
  job.started_at, job.report_key, job.progress, job.delayed = nil, nil, nil, nil
  job.keep, job.reconnect_grace_s, job.expires_at = nil, nil, nil
  if to.on_disconnect == 'keep' or to.has_grace or epoch then
    local keep = to.on_disconnect == 'keep' and '1'
    jobs.set(job, { keep = keep, reconnect_grace_s = to.reconnect_grace_s, leader_epoch = epoch or job.leader_epoch })
  end
  jobs.touch(job)
  jobs.recount(job.group, was, job.state)
  if WORDS[was] ~= WORDS[job.state] or was == 'ORPHANED' then
    jobs.publish_status(job, '')
  end
  leases.begin(job)
end

-- Ends an attempt as the disposition says. Without an outcome the store makes one for the lost worker.
function attempts.finish(job, disposition, ended, changes)
  changes.failures = disposition.failures > 0 and tostring(disposition.failures)
  changes.losses = disposition.losses > 0 and tostring(disposition.losses)
  jobs.add_incident(job, rules.kinds[disposition.event], job.assigned_worker_id, '', disposition.reason)
  jobs.publish_retries(job, disposition.failures + disposition.losses)
  if TERMINAL[disposition.state] then
    if disposition.event ~= 'cancel' then
      changes.dead = '1'
      write('LPUSH', key.dlq, job.id)
    end
    ended = ended or outcomes.of_store(disposition.event == 'cancel' and 'CANCELED' or 'LOST', disposition.reason)
    return jobs.finish(job, disposition.event, changes, ended, disposition.reason)
  end
  changes.state = disposition.state
  changes.not_before = disposition.delay_s > 0 and text(now.wall + disposition.delay_s)
  changes.delayed = changes.not_before and '1'
  if ended then
    outcomes.write(job, ended, changes)
  end
  if disposition.event ~= 'orphan' then -- an orphan's worker may still finish
    leases.remove(job, changes)
  end
  jobs.change(job, changes, disposition.reason)
end

function attempts.disposition_of_loss(job)
  return rules.after_loss(job.state, job, jobs.facts(job), job.assigned_worker_id)
end

-- Makes an orphan run again whose worker is back before another was granted the job.
function attempts.resume(job, ttl_s)
  jobs.add_incident(job, 'resumed', job.assigned_worker_id, '', RESUMED)
  jobs.change(job, { state = rules.after(job.state, 'resume'), started_at = job.started_at or now.text }, '')
  leases.extend(job, ttl_s)
end
