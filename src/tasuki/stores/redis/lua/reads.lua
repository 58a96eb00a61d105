-- The verbs that only read, and `complete`, which adds to answers the large values that can be read again (specs, payloads,
-- results): they are not kept with the turn.

local function each(answers, show)
  local shown = {}
  for i, answer in ipairs(answers) do
    shown[i] = answer and show(answer)
  end
  return shown
end

-- Makes a grant, with spec and payload, of {id, lease_id, attempt, ttl_s}.
function complete.grants(answers)
  local names, shown = {}, {}
  for _, answer in ipairs(answers) do
    if answer then
      names[#names + 1] = of('spec', answer[1])
      names[#names + 1] = of('payload', answer[1])
    end
  end
  local values = read_many(names)
  local position = 0
  for i, answer in ipairs(answers) do
    if answer then
      shown[i] = { answer[1], answer[2], answer[3], answer[4], values[position + 1] or '', values[position + 2] or '' }
      position = position + 2
    else
      shown[i] = false
    end
  end
  return shown
end

complete.assign = complete.grants

-- Makes flat grants (id, lease_id, attempt, spec, payload, …) of (id, lease_id, attempt, …).
local function flat_grants(answer)
  local names, size, shown, payloads = {}, 0, {}, {}
  for i = 1, #answer, 3 do
    local id = answer[i]
    local job = jobs.load(id)
    size = size + 1
    names[size] = of('spec', id)
    if job and job.payload then
      size = size + 1
      names[size], payloads[id] = of('payload', id), true
    end
  end
  local values, position = read_many(names), 0
  for i = 1, #answer, 3 do
    local place = (i - 1) / 3 * 5
    shown[place + 1], shown[place + 2], shown[place + 3] = answer[i], answer[i + 1], answer[i + 2]
    shown[place + 4], shown[place + 5] = values[position + 1] or '', payloads[answer[i]] and values[position + 2] or ''
    position = position + (payloads[answer[i]] and 2 or 1)
  end
  return shown
end

function complete.lease(answers)
  return each(answers, flat_grants)
end

-- Returns all parts of a Job, without `with_results` without the bytes of the result; false if there is no such job.
function complete.job(id, with_results)
  local job = jobs.load(id)
  if not job then
    return false
  end
  local names = { of('job', id), of('spec', id), of('payload', id), of('outcome', id), of('summary', id), of('freqs', id) }
  names[7] = with_results and of('result', id) or nil
  local row = redis.call('MGET', unpack(names)) -- of a key of another type it makes nothing, not an error
  row[7], row[8] = row[7] or false, job.lease_id and leases.expires_at(job) or false
  return row
end

-- Adds the job that existed before to {'known', id}.
function complete.submit(answers)
  return each(answers, function(answer)
    if type(answer) == 'table' and answer[1] == 'known' then
      return { 'known', complete.job(answer[2], false) }
    end
    return answer
  end)
end

-- get(count, job_id, …) -> for each the answer of complete.job
-- Reads every key of the jobs. An outsider's job without a record gets its {app}:job:{id}.

reads.get = function()
  local answers = {}
  for i, id in ipairs(take_list()) do
    local job = complete.job(id, true)
    if not job and outsiders.load(id) then
      jobs.flush()
      job = complete.job(id, true)
    end
    answers[i] = job
  end
  return answers
end

-- find(the seq to begin below or '', count, 1 if texts are wanted)
--   -> for each {job_id, record, spec, outcome}
-- The newest first. Reads {app}:jobs, {app}:job:{id}, {app}:outcome:{id}. The caller applies the filter.

reads.find = function()
  local below, count, with_texts = take(3)
  local highest = below == '' and '+inf' or '(' .. below
  local ids = redis.call('ZREVRANGEBYSCORE', key.jobs, highest, '-inf', 'LIMIT', 0, count)
  local answer = {}
  for _, id in ipairs(ids) do
    answer[#answer + 1] = {
      id,
      redis.call('GET', of('job', id)),
      redis.call('GET', of('spec', id)),
      with_texts == '1' and redis.call('GET', of('outcome', id)),
    }
  end
  return answer
end

-- incidents(job_id) -> a list of msgpack
-- Reads {app}:incidents:{id}.

reads.incidents = function()
  return redis.call('LRANGE', of('incidents', take(1)), 0, -1)
end

-- counts() -> {counter}:{group}, number, …
-- Reads {app}:counts.

reads.counts = function()
  jobs.flush_counts()
  return redis.call('HGETALL', key.counts)
end

-- ready_ahead(job_id) -> how many jobs are before it, or false if it is not ready
-- Reads {app}:job:{id} and its queue.

reads.ready_ahead = function()
  local job = outsiders.load(take(1))
  local ahead = job and queues.is_waiting(job) and queues.ahead_of(job)
  return ahead and tostring(ahead) or false
end

-- top_band() -> the highest priority of which a job is ready, or false
-- Reads {app}:queues:{priority} and {app}:queue.

reads.top_band = function()
  local priority = queues.priorities()[1]
  return priority and tostring(priority) or false
end

-- ready_queues(priority, member of its index to go on after or '', limit)
--   -> {for each queue {priority, member, subject or '' if it is paused, kind}; subject and kind of {app}:queue, or false if it
--   is empty or paused}
-- Reads {app}:queues:{priority}, {app}:queue and {app}:paused.

reads.ready_queues = function()
  local priority, after, limit = take(3)
  return { queues.page(tonumber(priority), after, tonumber(limit)) }
end

-- ready_jobs(subject, its group, limit of each queue, limit of queues) -> job_ids
-- Reads {app}:paused, {app}:queues:{priority}, {app}:queue and {app}:queue:{priority}:{group}:{kind}:{subject}.

reads.ready_jobs = function()
  local subject, group, limit, most = take(4)
  return queues.is_paused(subject) and {} or queues.oldest_of(subject, group, tonumber(limit), tonumber(most))
end

-- ended_among(count, job_id, …) -> the jobs that are terminal or do not exist
-- Reads {app}:job:{id}.

reads.ended_among = function()
  local ended = {}
  for _, id in ipairs(take_list()) do
    local job = jobs.load(id)
    if not job or TERMINAL[job.state] then
      ended[#ended + 1] = id
    end
  end
  return ended
end
