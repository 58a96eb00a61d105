-- Where ready jobs wait: one queue for each priority, kind and subject, so that neither jobs nor patterns that do not fit cost
-- anything. The queue of the app's own subject is the list {app}:queue; all others are sorted sets by seq.

local queues, jobs = {}, {}

local bands = {} -- priority -> {kind}:{subject} -> queue, as far as this script has looked
local emptied = {} -- queues that a job was taken from; swept after each verb

function queues.is_own(facts)
  return facts.subject == OWN.subject and facts.kind == OWN.kind and tonumber(facts.priority) == OWN.priority
end

local own = { name = key.queue, is_list = true, group = OWN.group, subject = OWN.subject, kind = OWN.kind }

local function queue_of(priority, group, kind, subject)
  return {
    name = key.queue .. ':' .. priority .. ':' .. group .. ':' .. kind .. ':' .. subject,
    index = prefix .. 'queues:' .. priority,
    field = kind .. ':' .. subject,
    priority = priority,
    group = group,
    kind = kind,
    subject = subject,
  }
end

-- All queues of a priority that may hold a job, by {kind}:{subject}.
local function band_of(priority)
  priority = tostring(priority)
  local band = bands[priority]
  if not band then
    band = {}
    local flat = redis.call('HGETALL', prefix .. 'queues:' .. priority)
    for i = 1, #flat, 2 do
      band[flat[i]] = queue_of(priority, flat[i + 1], string.sub(flat[i], 1, 1), string.sub(flat[i], 3))
    end
    if tonumber(priority) == OWN.priority then
      band[OWN.kind .. ':' .. OWN.subject] = own
    end
    bands[priority] = band
  end
  return band
end

-- No record yet: an outsider pushed it, or the verb that runs has just stored it. Both are younger than any that comes back.
local function seq_at(position)
  local id = redis.call('LINDEX', own.name, position)
  local job = jobs.load(id)
  return tonumber(job and job.seq or math.huge), id
end

-- The list is in order of age, the oldest last. A job that comes back finds its place by bisection.
local function add_to_list(job)
  local seq = tonumber(job.seq)
  local low, high = 0, redis.call('LLEN', own.name) -- the first position that holds an older job lies between them
  if high == 0 or seq_at(0) < seq then
    write('LPUSH', own.name, job.id)
    return
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if seq_at(middle) < seq then
      high = middle
    else
      low = middle + 1
    end
  end
  local _, younger = seq_at(low - 1)
  write('LINSERT', own.name, 'AFTER', younger, job.id)
end

-- The queue of jobs of these facts; it is made known if it is new.
function queues.of(facts, group)
  if queues.is_own(facts) then
    return own
  end
  local band = band_of(facts.priority)
  local field = facts.kind .. ':' .. facts.subject
  local queue = band[field]
  if not queue then
    queue = queue_of(facts.priority, group, facts.kind, facts.subject)
    band[field] = queue
    write('HSET', queue.index, field, queue.group)
  end
  return queue
end

-- A new job is the youngest. That is not looked up: the records of those that one verb stores are written after it, all at once.
function queues.add_new(queue, seq, id)
  if queue.is_list then
    write('LPUSH', queue.name, id)
  else
    rank(queue.name, seq, id)
  end
end

-- A job that comes back.
function queues.add(job)
  local queue = queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    add_to_list(job)
  else
    rank(queue.name, job.seq, job.id)
  end
end

-- `job.queue` is known of jobs that were found in it.
function queues.remove(job)
  local queue = job.queue or queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    write('LREM', own.name, -1, job.id)
  else
    unrank(queue.name, job.id)
    emptied[queue.name] = queue
  end
end

-- After each verb: queues that hold nothing are not looked at again.
function queues.sweep()
  for name, queue in pairs(emptied) do
    if redis.call('EXISTS', name) == 0 then
      write('HDEL', queue.index, queue.field)
      bands[queue.priority][queue.field] = nil
    end
  end
  emptied = {}
end

function queues.is_waiting(job)
  return READY[job.state] and not job.delayed
end

-- How many ready jobs stand before it in its queue.
function queues.ahead_of(job)
  local queue = queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    return redis.call('LLEN', queue.name) - 1 - redis.call('LPOS', queue.name, job.id, 'RANK', -1)
  end
  return redis.call('ZRANK', queue.name, job.id)
end

-- The highest priority of which a job waits.
function queues.top_band()
  for priority = PRIORITY_MAX, 0, -1 do
    for _, queue in pairs(band_of(priority)) do
      if not queue.is_list or redis.call('LLEN', queue.name) > 0 then
        return priority
      end
    end
  end
  return false
end
