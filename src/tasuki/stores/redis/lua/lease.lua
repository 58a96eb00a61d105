-- lease(live worker lists, count of wishes, these, count of requests, then for each worker_id, prefix of its lease_ids, the number
--   of its wish, count of job_ids, these)
--   -> for each job_id, lease_id, attempt, spec, payload, …
-- Reads {app}:queues:{priority}, {app}:served, {app}:queue and {app}:queue:{priority}:{group}:{kind}:{subject}; of each granted
-- job it writes {app}:job|lease|status:{id} and {app}:lease:index, and takes away {app}:outcome|result|summary|freqs:{id} of the
-- attempt before.

local function read_live_workers()
  local lists = {}
  for i = 1, take_number() do
    local live = {}
    for _ = 1, take_number() do
      local worker_id = take(1)
      live[worker_id] = take_list()
    end
    lists[i] = live
  end
  return lists
end

-- What several requests may have in common.
local function read_wishes(lists)
  local wishes = {}
  for i = 1, take_number() do
    local incarnation, ttl_s, on_disconnect, reconnect_grace_s, kinds = take(5)
    wishes[i] = {
      incarnation = incarnation,
      ttl_s = ttl_s,
      on_disconnect = on_disconnect,
      reconnect_grace_s = reconnect_grace_s,
      has_grace = tonumber(reconnect_grace_s) ~= 0,
      kinds = kinds,
      limit = take_number(),
      live_workers = lists[take_number()],
      patterns = take_list(),
    }
  end
  return wishes
end

-- One at a time: the wish becomes that of the worker that asks.
local function read_request(wishes)
  local worker_id, lease_prefix = take(2)
  local request = wishes[take_number()]
  request.worker_id, request.lease_prefix, request.granted = worker_id, lease_prefix, 0
  request.job_ids = take_list()
  return request
end

-- The jobs at the head of a queue after the first `skip`, the oldest first.
local function head_of(queue, skip, count)
  local found
  if queue.is_list then
    found = own_jobs.peek(skip, count)
  else
    flush_ranks()
    local ids = redis.call('ZRANGE', queue.name, skip, skip + count - 1)
    jobs.preload(ids)
    found = {}
    for i, id in ipairs(ids) do
      found[i] = jobs.load(id)
    end
  end
  for _, job in ipairs(found) do
    job.queue = queue
  end
  return found
end

local function older_first(one, other)
  return tonumber(one.seq) < tonumber(other.seq)
end

-- The oldest jobs of several queues; and for each queue how many of its own are among them, if it may have more.
local function candidates_of(waiting, late, count)
  local found, open = {}, {}
  for i, queue in ipairs(waiting) do
    local head = head_of(queue, late[queue.name] or 0, count)
    if #head == count then
      open[queue.name] = count
    end
    if i == 1 then
      found = head
    else
      for _, job in ipairs(head) do
        found[#found + 1] = job
      end
    end
  end
  if #waiting > 1 then
    table.sort(found, older_first)
  end
  return found, open
end

-- Its answer is flat: a table for each grant would cost as much as the grant.
local function grant_to(request, job, grants)
  local count = request.granted
  request.lease_id = request.lease_prefix .. string.format('%06x', count)
  attempts.grant(job, request)
  local size = 3 * count
  grants[size + 1], grants[size + 2], grants[size + 3] = job.id, request.lease_id, job.attempt
  request.granted = count + 1
end

-- Up to `count` jobs of one group. Jobs that are too late stay where they are, for the leader to skip.
local function serve(request, waiting, count, grants)
  local late, wanted = {}, request.granted + count
  repeat
    local found, open = candidates_of(waiting, late, wanted - request.granted)
    local is_open = false
    for _, job in ipairs(found) do
      local name = job.queue.name
      if rules.is_late(job.not_after, now.wall) then
        late[name] = (late[name] or 0) + 1
      else
        grant_to(request, job, grants)
      end
      open[name] = open[name] and open[name] - 1
      if open[name] == 0 or request.granted == wanted then
        is_open = request.granted < wanted -- behind the late ones may stand older jobs than the next one of another queue
        break
      end
    end
  until not is_open
  return count - (wanted - request.granted)
end

local function lease_next(request)
  local grants = {}
  for priority = PRIORITY_MAX, 0, -1 do
    if request.granted >= request.limit then
      break
    end
    local groups = fair.groups(request, band_of(priority))
    fair.deal(groups, request.limit - request.granted, function(group, count)
      return serve(request, groups[group], count, grants)
    end)
  end
  return grants
end

-- A lease that is over, asked for by job_id before the reaper came: the loss counts. False if that ended the job.
local function take_from_lost(job, by)
  local verdict = attempts.loss(job)
  if TERMINAL[verdict.state] then
    attempts.settle(job, verdict, nil, {})
    return false
  end
  jobs.tell(job, 'taken_over', job.assigned_worker_id, '', verdict.reason .. '; taken over by ' .. by)
  jobs.show_retries(job, verdict.failures + verdict.losses)
  jobs.change(job, { losses = tostring(verdict.losses) })
  return true
end

local function may_be_granted(job, request)
  if rules.is_late(job.not_after, now.wall) then
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
    local job = own_jobs.load(id)
    if job and may_be_granted(job, request) then
      grant_to(request, job, grants)
    end
  end
  return grants
end

verbs.lease = function()
  local wishes = read_wishes(read_live_workers())
  local answers = {}
  for i = 1, take_number() do
    local request = read_request(wishes)
    answers[i] = #request.job_ids > 0 and lease_named(request) or lease_next(request)
  end
  return answers
end
