-- The verbs that grant work.

-- lease(live worker lists, count of terms, these, count of requests, then for each worker_id, prefix of its lease_ids, the number
--   of its terms, count of job_ids, these, count of what is said of chosen jobs, for each job_id, priority, group)
--   -> for each job_id, lease_id, attempt, spec, payload, …
-- Reads {app}:paused, {app}:queues:{priority}, {app}:served, {app}:queue and {app}:queue:{priority}:{group}:{kind}:{subject}; of
-- each granted job it writes {app}:job|lease|status:{id} and {app}:lease:index, and deletes
-- {app}:outcome|result|summary|freqs:{id} of the attempt before.

local function read_patterns()
  local patterns = {}
  for _ = 1, take_number() do
    local name = take(1)
    patterns[name] = take_list()
  end
  return patterns
end

local function read_live_workers()
  local lists = {}
  for i = 1, take_number() do
    lists[i] = read_patterns()
  end
  return lists
end

-- Reads the terms that several requests may have in common. `kinds` are those that the worker offers, with their execs,
-- `whole` the kinds of which it offers every exec, but for jobs of its own user those that are `named_elsewhere`, by patterns.
local function read_terms(lists)
  local terms = {}
  for i = 1, take_number() do
    local incarnation, owner, ttl_s, on_disconnect, reconnect_grace_s, whole = take(6)
    local kinds, has_kind = take_list(), {}
    for _, kind in ipairs(kinds) do
      has_kind[kind] = true
    end
    terms[i] = {
      incarnation = incarnation,
      owner = owner,
      ttl_s = ttl_s,
      on_disconnect = on_disconnect,
      reconnect_grace_s = reconnect_grace_s,
      has_grace = tonumber(reconnect_grace_s) ~= 0,
      whole = whole,
      kinds = kinds,
      has_kind = has_kind,
      named_elsewhere = read_patterns(),
      limit = take_number(),
      live_workers = lists[take_number()],
      patterns = take_list(),
      routed = take_list(),
    }
  end
  return terms
end

-- Reads one request. Its terms become those of the worker that asks, so requests are read one at a time.
local function read_request(terms)
  local worker_id, lease_prefix = take(2)
  local request = terms[take_number()]
  request.worker_id, request.lease_prefix, request.granted = worker_id, lease_prefix, 0
  request.job_ids = take_list()
  request.chosen = take_list()
  return request
end

-- Returns { id, seq, queue } of the first jobs of a queue after the first `skip`, the oldest first.
local function head_of(queue, skip, count)
  local found = {}
  if queue.is_list then
    for i, job in ipairs(outsiders.peek(skip, count)) do
      found[i] = { job.id, tonumber(job.seq), queue }
    end
  else
    local flat = redis.call('ZRANGE', queue.name, skip, skip + count - 1, 'WITHSCORES')
    for i = 1, #flat, 2 do
      found[(i + 1) / 2] = { flat[i], tonumber(flat[i + 1]), queue }
    end
  end
  return found
end

local function older_first(one, other)
  return one[2] < other[2]
end

-- Returns the oldest jobs of several queues, as head_of, and for each queue that may have more how many of its own are in it.
local function candidates_of(waiting, late, count)
  flush_ranks()
  local found, open, ids = {}, {}, {}
  local share = math.min(count, math.ceil(2 * count / #waiting) + 1) -- a queue that has more of the oldest is read again
  for _, queue in ipairs(waiting) do
    local head = head_of(queue, late[queue.name] or 0, share)
    if #head == share then
      open[queue.name] = share
    end
    for _, entry in ipairs(head) do
      found[#found + 1] = entry
    end
  end
  if #waiting > 1 then
    table.sort(found, older_first)
  end
  for i = 1, math.min(count, #found) do
    ids[i] = found[i][1]
  end
  jobs.preload(ids)
  return found, open
end

-- Grants a job and adds it to the flat answer: a table for each grant would cost as much as the grant.
local function grant_to(request, job, grants)
  local count = request.granted
  request.lease_id = request.lease_prefix .. string.format('%06x', count)
  attempts.grant(job, request)
  local size = 3 * count
  grants[size + 1], grants[size + 2], grants[size + 3] = job.id, request.lease_id, job.attempt
  request.granted = count + 1
end

-- Grants up to `count` jobs of one group. Jobs that are too late stay where they are, for the leader to skip.
local function serve(request, waiting, count, grants)
  local late, wanted = {}, request.granted + count
  repeat
    local found, open = candidates_of(waiting, late, wanted - request.granted)
    local is_open = false
    for _, entry in ipairs(found) do
      local job, name = jobs.load(entry[1]), entry[3].name
      if not job then -- somebody deleted its record
        unrank(name, entry[1])
      elseif rules.is_late(job.not_after, now.wall) then
        late[name] = (late[name] or 0) + 1
      else
        job.queue = entry[3]
        grant_to(request, job, grants)
      end
      open[name] = open[name] and open[name] - 1
      if open[name] == 0 or request.granted == wanted then
        is_open = request.granted < wanted -- behind the late ones may be older jobs than the next one of another queue
        break
      end
    end
  until not is_open
  return count - (wanted - request.granted)
end

local function is_paused(job)
  return queues.is_paused(jobs.facts(job).subject)
end

-- Grants up to `count` jobs of one group that are chosen for the worker.
local function take_chosen(request, priority, group, count, grants)
  local wanted = request.granted + count
  for i = 1, #request.chosen, 3 do
    if tonumber(request.chosen[i + 1]) == tonumber(priority) and request.chosen[i + 2] == group and request.granted < wanted then
      local job = outsiders.load(request.chosen[i])
      if job and queues.is_waiting(job) and not rules.is_late(job.not_after, now.wall) and not is_paused(job) then
        grant_to(request, job, grants)
      end
    end
  end
end

-- Grants up to `count` jobs of one group.
local function take_from_group(request, priority, group, count, grants)
  local before = request.granted
  take_chosen(request, priority, group, count, grants)
  if request.granted - before == count then
    return count
  end
  queues.each_window(request, priority, group, function(waiting)
    if serve(request, waiting, count - (request.granted - before), grants) == 0 then
      queues.looked_in_vain(#waiting)
    end
    return request.granted - before == count
  end)
  if request.granted == before then
    queues.looked_in_vain(1)
  end
  return request.granted - before
end

local function lease_next(request, priorities)
  local grants = {}
  for _, priority in ipairs(priorities) do
    if request.granted >= request.limit then
      break
    end
    queues.each_groups(request, priority, function(groups)
      fair.deal(groups, request.limit - request.granted, function(group, count)
        return take_from_group(request, priority, group, count, grants)
      end)
      return request.granted >= request.limit
    end)
  end
  return grants
end

-- Takes over an expired lease that the reaper has not ended yet: it counts as a loss. False if that ended the job.
local function take_from_lost(job, by)
  local disposition = attempts.disposition_of_loss(job)
  if TERMINAL[disposition.state] then
    attempts.finish(job, disposition, nil, {})
    return false
  end
  jobs.add_incident(job, 'taken_over', job.assigned_worker_id, '', disposition.reason .. '; taken over by ' .. by)
  jobs.publish_retries(job, disposition.failures + disposition.losses)
  jobs.change(job, { losses = tostring(disposition.losses) })
  return true
end

local function may_be_granted(job, request)
  if rules.is_late(job.not_after, now.wall) or is_paused(job) then
    return false
  end
  if LEASED[job.state] then
    flush_ranks()
    return leases.over_at(job.id) <= now.lease and take_from_lost(job, request.worker_id)
  end
  return queues.is_waiting(job)
end

local function lease_named(request)
  local grants = {}
  for _, id in ipairs(request.job_ids) do
    if request.granted >= request.limit then
      break
    end
    local job = outsiders.load(id)
    if job and may_be_granted(job, request) then
      grant_to(request, job, grants)
    end
  end
  return grants
end

verbs.lease = function()
  local terms = read_terms(read_live_workers())
  local answers, priorities = {}, queues.priorities()
  queues.begin_lease()
  for i = 1, take_number() do
    local request = read_request(terms)
    queues.begin_request()
    answers[i] = #request.job_ids > 0 and lease_named(request) or lease_next(request, priorities)
    if queues.is_cut() and request.granted < request.limit then
      cut[#cut + 1] = tostring(i - 1)
    end
  end
  return answers
end

-- assign(epoch, count, then for each job_id, worker_id, incarnation, owner, ttl_s, on_disconnect, reconnect_grace_s, lease_id)
--   -> for each a grant or false
-- Reads {app}:epoch; writes the same keys as lease.

local function assign(epoch, id, worker_id, incarnation, owner, ttl_s, on_disconnect, reconnect_grace_s, lease_id)
  local job = outsiders.load(id)
  if not job or not queues.is_waiting(job) or rules.is_late(job.not_after, now.wall) or is_paused(job) then
    return false
  end
  local to = {
    worker_id = worker_id,
    incarnation = incarnation,
    owner = owner,
    ttl_s = ttl_s,
    on_disconnect = on_disconnect,
    reconnect_grace_s = reconnect_grace_s,
    has_grace = tonumber(reconnect_grace_s) ~= 0,
    lease_id = lease_id,
  }
  attempts.grant(job, to, epoch)
  return { id, lease_id, job.attempt, ttl_s }
end

verbs.assign = function()
  local epoch = take(1)
  check_epoch(epoch)
  return for_each(function(...)
    return assign(epoch, ...)
  end, 8)
end

-- held(count, then for each worker_id, incarnation, owner) -> for each a list of grants with the ttl that is left
-- Reads {app}:lease:index, {app}:lease:{id}, {app}:job:{id}, {app}:spec|payload:{id}.

reads.held = function()
  local holders, found = {}, {}
  for i = 1, take_number() do
    holders[i] = table.concat({ take(3) }, '\n')
    found[holders[i]] = {}
  end
  for _, entry in ipairs(#holders > 0 and jobs.first_of(key.index, '+inf', 2 ^ 31) or {}) do
    local job = entry.job
    local grants = job.state == 'ASSIGNED'
      and found[table.concat({ job.assigned_worker_id, job.incarnation, job.owner or '' }, '\n')]
    local expires_at = grants and tonumber(leases.expires_at(job))
    if grants and expires_at > now.lease then
      -- The rest of the lease, not the whole: this does not renew.
      local left_s = math.max(0, expires_at - LEASE_MARGIN_S - now.lease)
      grants[#grants + 1] = { job.id, job.lease_id, job.attempt, text(left_s) }
    end
  end
  local answers = {}
  for i, holder in ipairs(holders) do
    answers[i] = complete.grants(found[holder])
  end
  return answers
end
