-- The verbs of workers. Reports, of finish and fail, are first all job_ids, then for each the arguments of `read_report`. They are
-- accepted only from the holder of the current lease; an exact repeat of the report that ended the attempt is known by its key.

local ended = { packed = '', r = nil, s = nil, f = nil, blob = nil, blob_bytes = nil }
local report = { id = '', worker_id = '', lease_id = '', attempt = '', owner = '', started_at = '', report_key = '', ended = ended }

-- Reads a report into the one table, where it stays until the next is read.
local function read_report(id, with_failure)
  report.id = id
  report.worker_id, report.lease_id, report.attempt, report.owner = take(4)
  report.started_at, report.report_key = take(2)
  local packed, letters = take(2)
  ended.packed, ended.r, ended.s, ended.f, ended.blob, ended.blob_bytes = packed, nil, nil, nil, nil, nil
  for i = 1, #letters do
    local letter = string.sub(letters, i, i)
    if letter == 'b' then
      ended.blob, ended.blob_bytes = take(2)
    else
      ended[letter] = take(1)
    end
  end
  if with_failure then
    report.error_code, report.permanent, report.what, report.retry_in_s = take(4)
  end
  return report
end

-- Return whether a fenced report becomes an incident: the first of its attempt, from a worker that had it. A report of anybody
-- else, however often it comes, leaves nothing behind in a job that is not theirs.
local function belongs_to_story(job, report)
  local attempt, current = tonumber(report.attempt), tonumber(job.attempt or 0)
  if attempt < 1 or attempt > current or (attempt == current and report.worker_id ~= job.assigned_worker_id) then
    return false
  end
  local had = attempt == current
  for _, packed in ipairs(redis.call('LRANGE', of('incidents', job.id), 0, -1)) do
    local incident = cmsgpack.unpack(packed)
    if incident[3] == attempt then
      if incident[2] == 'fenced' then
        return false
      end
      had = had or incident[4] == report.worker_id
    end
  end
  return had
end

local function repeated_or_fenced(job, report)
  if job.report_key == report.report_key then
    return { 'repeated', job.state, '', job.group }
  end
  local reason = string.format(
    'attempt %s of worker %s does not hold the lease; attempt %s is %s',
    report.attempt, report.worker_id, job.attempt or '0', job.state
  )
  if belongs_to_story(job, report) then
    jobs.add_incident(job, 'fenced', report.worker_id, '', reason, report.attempt)
  end
  return { 'fenced', job.state, reason, job.group }
end

local function record(report, apply)
  local job = jobs.load(report.id)
  if not job then
    return { 'fenced', false, 'there is no such job' }
  end
  if not leases.is(job, report.worker_id, nil, report.lease_id, report.attempt, report.owner) then
    return repeated_or_fenced(job, report)
  end
  local blob, blob_bytes = report.ended.blob, report.ended.blob_bytes
  if blob and not blobs.is_stored(blob, blob_bytes) then
    local missing = string.format('its result, blob %s of %s bytes, is not stored; bring it again', blob, blob_bytes)
    return { 'blob_missing', job.state, missing, job.group }
  end
  local reason = apply(job, report)
  return reason and { 'recorded', job.state, reason, job.group } or job.group
end

-- Records all reports. `apply(job, report)` changes the job, and returns the reason if there is one. Failures come with an error
-- code, whether they are permanent, a description, and the delay that they ask for.
local function record_all(apply, with_failure)
  local ids, answers = take_list(), {}
  jobs.preload(ids)
  for i, id in ipairs(ids) do
    answers[i] = record(read_report(id, with_failure), apply)
  end
  return answers
end

-- finish(reports) -> for each the group of its job: it is recorded; or {repeated, fenced or blob_missing; state or false; reason; group}
-- {app}:job|status:{id}, {app}:outcome|result|summary|freqs:{id}, {app}:ended, {app}:owners:{sha256}; deletes {app}:lease:{id}
-- and its entry in {app}:lease:index. The TTL of payload, status and results starts. Fenced: {app}:incidents:{id}.

verbs.finish = function()
  return record_all(function(job, report)
    local was = job.state
    if LEASED[was] then
      unrank(key.index, job.id)
    else
      jobs.leave(job)
    end
    if job.shown then
      drop(of('lease', job.id))
    end
    outcomes.write(job, report.ended, job, job.shown and RESULT_TTL_S)
    if job.result_blob then
      job.has_rare = 1
    end
    -- Field by field: this is done for every job, and a table of changes costs as much as all the rest.
    job.state = rules.after(was, 'succeed')
    job.report_key, job.started_at, job.finished_at = report.report_key, job.started_at or given(report.started_at), now.text
    job.lease_id, job.incarnation, job.owner, job.ttl_s, job.delayed = nil, nil, nil, nil, nil
    job.keep, job.reconnect_grace_s, job.expires_at = nil, nil, nil
    rank(key.ended, now.text, job.id)
    jobs.touch(job)
    jobs.recount(job.group, was, job.state)
    jobs.publish_status(job, '')
    jobs.expire(job)
  end)
end

-- fail(reports) -> for each {recorded, repeated, fenced or blob_missing; state or false; reason; group}
-- {app}:job|status|incidents|outcome|retry_count:{id}; then its queue or {app}:delay, or, without a retry, {app}:dlq and
-- {app}:ended; deletes {app}:lease:{id} and its entry in {app}:lease:index.

verbs.fail = function()
  return record_all(function(job, report)
    local facts, permanent = jobs.facts(job), report.permanent == '1'
    local asked_s = tonumber(given(report.retry_in_s))
    local disposition = rules.after_failure(job.state, job, facts, report.error_code, permanent, report.what, asked_s)
    local changes = { report_key = report.report_key, started_at = job.started_at or given(report.started_at) }
    attempts.finish(job, disposition, report.ended, changes)
    return disposition.reason
  end, true)
end

-- start(count, then for each job_id, worker_id, incarnation, lease_id, attempt, owner, ttl_s) -> for each go_on, cancel or lost
-- {app}:job|status:{id}; of an orphan also its queue, {app}:lease:{id}, {app}:lease:index, {app}:incidents:{id}.

local function start(id, worker_id, incarnation, lease_id, attempt, owner, ttl_s)
  local job = jobs.load(id)
  if not job or not leases.is(job, worker_id, incarnation, lease_id, attempt, owner) then
    return 'lost'
  end
  if job.state == 'ASSIGNED' then
    jobs.change(job, { state = rules.after(job.state, 'start'), started_at = now.text })
  elseif job.state == 'ORPHANED' then
    attempts.resume(job, ttl_s)
  end
  return job.cancel_requested and 'cancel' or 'go_on'
end

verbs.start = function()
  return for_each(start, 7)
end

-- renew(count, then for each job_id, worker_id, incarnation, lease_id, attempt, owner, ttl_s, progress or '')
--   -> for each go_on, cancel or lost
-- {app}:lease:{id}, {app}:lease:index, {app}:job:{id} progress; of an orphan also the keys of start.

local function renew(id, worker_id, incarnation, lease_id, attempt, owner, ttl_s, progress)
  local job = jobs.load(id)
  if not job or not leases.is(job, worker_id, incarnation, lease_id, attempt, owner) then
    return 'lost'
  end
  if job.state == 'ORPHANED' then
    attempts.resume(job, ttl_s)
  else
    leases.extend(job, ttl_s)
  end
  if progress ~= '' then
    jobs.set(job, { progress = progress })
  end
  return job.cancel_requested and 'cancel' or 'go_on'
end

verbs.renew = function()
  return for_each(renew, 8)
end

-- release(reason, count, then for each job_id, worker_id, incarnation, lease_id, attempt, owner, the outcome if it was to be
--   canceled, whether the lease must be over)
--   -> for each 1 or 0
-- Reads {app}:lease:index; {app}:job|status|incidents:{id}, its queue; deletes {app}:lease:{id}, {app}:lease:index. A canceled job ends: see cancel.

local function release(reason, id, worker_id, incarnation, lease_id, attempt, owner, packed, must_be_over)
  local job = jobs.load(id)
  local is_holder = job and leases.is(job, worker_id, incarnation, lease_id, attempt, owner)
  local state = is_holder and rules.after(job.state, 'release')
  if not state then
    return '0'
  end
  if must_be_over == '1' then
    flush_ranks()
    if leases.over_at(id) - LEASE_MARGIN_S > now.lease then
      return '0'
    end
  end
  if job.cancel_requested then
    jobs.add_incident(job, 'canceled', worker_id, '', reason)
    jobs.finish(job, 'cancel', {}, { packed = packed }, reason)
    return '1'
  end
  jobs.add_incident(job, 'released', worker_id, '', reason)
  local changes = { state = state }
  leases.remove(job, changes)
  jobs.change(job, changes, reason)
  return '1'
end

verbs.release = function()
  local reason = take(1)
  return for_each(function(...)
    return release(reason, ...)
  end, 8)
end

-- end_leases(limit, count, then for each owner or '', worker_id or '', reason) -> for each how many of its leases ended
-- Reads {app}:lease:index; for each lease of the holder the keys of release or fail.

local function end_leases(limit, owner, worker_id, reason)
  local ids, ended = redis.call('ZRANGE', key.index, 0, -1), 0
  jobs.preload(ids)
  for _, id in ipairs(ids) do
    local job = jobs.load(id)
    local is_holder = job and (owner == '' or job.owner == owner) and (worker_id == '' or job.assigned_worker_id == worker_id)
    if is_holder and LEASED[job.state] and ended < limit then
      ended = ended + 1
      if job.state == 'ASSIGNED' then
        local canceled = outcomes.of_store('CANCELED', 'canceled; ' .. job.assigned_worker_id .. ' had not started it')
        release(reason, id, job.assigned_worker_id, job.incarnation, job.lease_id, job.attempt, job.owner or '', canceled.packed)
      else
        job.keep = nil
        attempts.finish(job, attempts.disposition_of_loss(job), nil, {})
      end
    end
  end
  return tostring(ended)
end

verbs.end_leases = function()
  local limit = take_number()
  flush_ranks()
  return for_each(function(...)
    return end_leases(limit, ...)
  end, 3)
end
