-- The verbs of the leader.

-- take_over(holder, epoch) -> 1, or 0 if the epoch is not higher than every one before
-- {app}:epoch; {app}:lease:{id} and {app}:lease:index of every live lease, which counts as renewed now by its own ttl, except a
-- lease that the takeover before renewed and its worker has not renewed since.

verbs.take_over = function()
  local holder, epoch = take(2)
  if tonumber(epoch) <= tonumber(redis.call('HGET', key.epoch, 'epoch') or 0) then
    return '0'
  end
  local earlier = tonumber(redis.call('HGET', key.epoch, 'taken_over_at') or '')
  write('HSET', key.epoch, 'epoch', epoch, 'holder', holder, 'taken_over_at', text(now.lease))
  for _, id in ipairs(redis.call('ZRANGE', key.index, 0, -1)) do
    local job = jobs.load(id)
    if job and job.ttl_s and (not earlier or earlier > now.lease or leases.renewed_since(job, earlier)) then
      leases.extend(job, job.ttl_s)
    end
  end
  return '1'
end

-- reap(epoch, limit) -> a list of {job_id, state, worker_id, attempt, reason, group}
-- Reads {app}:epoch and {app}:lease:index, whose entries without a lease it removes; for each expired lease the keys of fail.

verbs.reap = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local reaped = {}
  for _, entry in ipairs(jobs.first_of(key.index, text(now.lease), tonumber(limit))) do
    local job = entry.job
    if LEASED[job.state] then
      local disposition = attempts.disposition_of_loss(job)
      attempts.finish(job, disposition, nil, { leader_epoch = epoch })
      reaped[#reaped + 1] = { job.id, disposition.state, job.assigned_worker_id, job.attempt, disposition.reason, job.group }
    else
      unrank(key.index, job.id)
    end
  end
  return reaped
end

-- skip(epoch, limit) -> {job_id, group} of each job that ended SKIPPED
-- Reads {app}:epoch and {app}:late; for each job past its not_after the keys of cancel.

verbs.skip = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local skipped = {}
  for i, entry in ipairs(jobs.first_of(key.late, '(' .. text(now.wall), tonumber(limit))) do
    local job = entry.job
    local last_failure = job.outcome and (outcomes.summary(job) or 'failed')
    local message = rules.too_late(job.not_after, last_failure)
    jobs.add_incident(job, 'skipped', '', '', message)
    jobs.finish(job, 'skip', { leader_epoch = epoch }, outcomes.of_store('TOO_LATE', message), message)
    skipped[i] = { job.id, job.group }
  end
  return skipped
end

-- promote(epoch, limit) -> how many
-- Reads {app}:epoch; moves due jobs from {app}:delay to their queue; gives jobs that outsiders pushed into {app}:queue since the
-- last call their {app}:job:{id}, and counts them among those that became ready.

verbs.promote = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local count = outsiders.record_new(tonumber(limit))
  for _, entry in ipairs(jobs.first_of(key.delay, text(now.wall), tonumber(limit))) do
    local job = entry.job
    if not job.delayed then
      unrank(key.delay, job.id)
    elseif not jobs.has_payload(job) then
      outsiders.wait_for_payload(job)
    else
      jobs.change(job, {})
      count = count + 1
    end
  end
  return tostring(count)
end

-- prune(before, epoch, limit) -> how many
-- Reads {app}:epoch and {app}:ended; deletes every key of each job that ended before that time. {app}:rollups.

verbs.prune = function()
  local before, epoch, limit = take(3)
  check_epoch(epoch)
  local oldest = '(' .. text(now.wall - ROLLUPS_KEPT_S)
  for _, packed in ipairs(redis.call('ZRANGEBYSCORE', key.rollups, '-inf', oldest, 'LIMIT', 0, limit)) do
    write('ZREM', key.rollups, packed)
  end
  local doomed = jobs.first_of(key.ended, '(' .. before, tonumber(limit))
  for _, entry in ipairs(doomed) do
    jobs.delete(entry.job)
  end
  return tostring(#doomed)
end

-- add_rollups(count, then for each minute, packed rollup) -> for each '1'
-- {app}:rollups.

verbs.add_rollups = function()
  return for_each(function(minute, packed)
    write('ZADD', key.rollups, minute, packed)
    return '1'
  end, 2)
end

-- rollups(since, until) -> packed rollups, by minute
-- Reads {app}:rollups.

reads.rollups = function()
  local since, before = take(2)
  return redis.call('ZRANGEBYSCORE', key.rollups, since, '(' .. before)
end

-- pause(count, then for each pattern, actor, reason, '1' to resume it) -> for each done, as_before or too_many
-- {app}:paused.

verbs.pause = function()
  return for_each(function(pattern, actor, reason, resume)
    if (redis.call('HEXISTS', key.paused, pattern) == 1) ~= (resume == '1') then
      return 'as_before'
    end
    if resume == '1' then
      write('HDEL', key.paused, pattern)
    elseif redis.call('HLEN', key.paused) >= PAUSES_MAX then
      return 'too_many'
    else
      write('HSET', key.paused, pattern, cmsgpack.pack({ now.text, actor, reason }))
    end
    queues.pauses_changed()
    return 'done'
  end, 4)
end

-- paused() -> pattern, msgpack of [since, actor, reason], …
-- Reads {app}:paused.

reads.paused = function()
  return redis.call('HGETALL', key.paused)
end

-- epoch() -> {epoch, holder}
-- Reads {app}:epoch.

reads.epoch = function()
  local row = redis.call('HMGET', key.epoch, 'epoch', 'holder')
  return { row[1] or '0', row[2] or '' }
end

-- next_due() -> {when the next lease is over or false, when the next delayed job may run or false}
-- Reads {app}:lease:index and {app}:delay.

reads.next_due = function()
  local lease = redis.call('ZRANGE', key.index, 0, 0, 'WITHSCORES')
  local delay = redis.call('ZRANGE', key.delay, 0, 0, 'WITHSCORES')
  return { lease[2] or false, delay[2] or false }
end
