-- Queues of ready jobs, and which queues a worker is served from in which order.
--
-- There is one queue for each priority, kind and subject, so that neither jobs nor patterns that do not fit cost anything. The
-- queue of the app's own subject is the list {app}:queue; all others are sorted sets by seq.

local known = {} -- priority -> {kind}:{subject} -> queue, as far as this script has looked
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

-- Returns all queues of a priority that may hold a job, by {kind}:{subject}.
function queues.of_priority(priority)
  priority = tostring(priority)
  local found = known[priority]
  if not found then
    found = {}
    local flat = redis.call('HGETALL', prefix .. 'queues:' .. priority)
    for i = 1, #flat, 2 do
      found[flat[i]] = queue_of(priority, flat[i + 1], string.sub(flat[i], 1, 1), string.sub(flat[i], 3))
    end
    if tonumber(priority) == OWN.priority then
      found[OWN.kind .. ':' .. OWN.subject] = own
    end
    known[priority] = found
  end
  return found
end

-- A job without a record was pushed by an outsider or has just been stored by this verb: younger than any job that comes back.
local function seq_at(position)
  local id = redis.call('LINDEX', own.name, position)
  local job = jobs.load(id)
  return tonumber(job and job.seq or math.huge), id
end

-- The list is in order of age, the oldest last. The position of a job that comes back is found by bisection.
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

-- Returns the queue of jobs with these facts, and indexes it if it is new.
function queues.of(facts, group)
  if queues.is_own(facts) then
    return own
  end
  local others = queues.of_priority(facts.priority)
  local field = facts.kind .. ':' .. facts.subject
  local queue = others[field]
  if not queue then
    queue = queue_of(facts.priority, group, facts.kind, facts.subject)
    others[field] = queue
    write('HSET', queue.index, field, queue.group)
  end
  return queue
end

-- Adds a new job, which is the youngest. Its seq is not looked up: the records that one verb stores are written after it.
function queues.add_new(queue, seq, id)
  if queue.is_list then
    write('LPUSH', queue.name, id)
  else
    rank(queue.name, seq, id)
  end
end

-- Adds a job that comes back.
function queues.add(job)
  local queue = queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    add_to_list(job)
  else
    rank(queue.name, job.seq, job.id)
  end
end

-- Removes a job. `job.queue` is set for jobs that were found in it.
function queues.remove(job)
  local queue = job.queue or queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    write('LREM', own.name, -1, job.id)
  else
    unrank(queue.name, job.id)
    emptied[queue.name] = queue
  end
end

-- Removes empty queues from the index, after each verb.
function queues.sweep()
  for name, queue in pairs(emptied) do
    if redis.call('EXISTS', name) == 0 then
      write('HDEL', queue.index, queue.field)
      known[queue.priority][queue.field] = nil
    end
  end
  emptied = {}
end

function queues.is_waiting(job)
  return READY[job.state] and not job.delayed
end

-- Returns how many ready jobs are before it in its queue, false if somebody took it out.
function queues.ahead_of(job)
  local queue = queues.of(jobs.facts(job), job.group)
  if queue.is_list then
    local place = redis.call('LPOS', queue.name, job.id, 'RANK', -1)
    return place and redis.call('LLEN', queue.name) - 1 - place
  end
  return redis.call('ZRANK', queue.name, job.id)
end

-- Returns the highest priority of which a job waits.
function queues.top_priority()
  for priority = PRIORITY_MAX, 0, -1 do
    for _, queue in pairs(queues.of_priority(priority)) do
      if not queue.is_list or redis.call('LLEN', queue.name) > 0 then
        return priority
      end
    end
  end
  return false
end

-- The rules of core.subject and stores.common, on the store's own queues and its own memory of which groups were served.

local tokens = {} -- subject or pattern -> its tokens

local function tokens_of(subject)
  local found = tokens[subject]
  if not found then
    found = {}
    for token in string.gmatch(subject, '[^.]+') do
      found[#found + 1] = token
    end
    tokens[subject] = found
  end
  return found
end

function fair.matches(pattern, subject)
  local wanted, there = tokens_of(pattern), tokens_of(subject)
  local count = #wanted
  if wanted[count] == '>' then
    count = count - 1
    if #there <= count then
      return false
    end
  elseif #there ~= count then
    return false
  end
  for i = 1, count do
    if wanted[i] ~= '*' and wanted[i] ~= there[i] then
      return false
    end
  end
  return true
end

local function any_matches(patterns, subject)
  for _, pattern in ipairs(patterns) do
    if fair.matches(pattern, subject) then
      return true
    end
  end
  return false
end

-- Returns whether the request may be served from the queue: it takes the kind, a pattern matches, and the subject is not left to
-- another live worker that it names.
local function may_take(request, queue)
  if not string.find(request.kinds, queue.kind, 1, true) or not any_matches(request.patterns, queue.subject) then
    return false
  end
  local names = tokens_of(queue.subject)
  local last = names[#names]
  return last == request.worker_id or not any_matches(request.live_workers[last] or {}, queue.subject)
end

-- Returns the queues of one priority that the request may be served from, by group.
function fair.groups(request, of_priority)
  local groups = {}
  for _, queue in pairs(of_priority) do
    if may_take(request, queue) then
      groups[queue.group] = groups[queue.group] or {}
      table.insert(groups[queue.group], queue)
    end
  end
  return groups
end

-- Returns the groups in order: never served ones first, by name; then by how long ago they were served.
local function in_order(groups)
  local waiting, score = {}, {}
  for group in pairs(groups) do
    waiting[#waiting + 1] = group
    score[group] = tonumber(redis.call('ZSCORE', key.served, group) or 0)
  end
  table.sort(waiting, function(one, other)
    if score[one] ~= score[other] then
      return score[one] < score[other]
    end
    return one < other
  end)
  return waiting
end

-- Sorts groups by how much they were dealt. Lua's sort is not stable, so the position decides between equals.
local function by_dealt(names, dealt)
  local place = {}
  for i, group in ipairs(names) do
    place[group] = i
  end
  table.sort(names, function(one, other)
    if dealt[one] ~= dealt[other] then
      return dealt[one] < dealt[other]
    end
    return place[one] < place[other]
  end)
  return names
end

local function mark(group)
  write('ZADD', key.served, next_of('served'), group)
  if redis.call('ZCARD', key.served) > REMEMBERED_GROUPS_MAX then
    write('ZREM', key.served, redis.call('ZRANGE', key.served, 0, 0)[1])
  end
end

-- Deals up to `limit` grants evenly. `serve(group, n)` returns how many of a group's n grants were used; fewer: it has no more.
function fair.deal(groups, limit, serve)
  local live, dealt, taken = in_order(groups), {}, 0
  local known = {}
  for i, group in ipairs(live) do
    known[i], dealt[group] = group, 0
  end
  while #live > 0 and taken < limit do
    local open = limit - taken
    local quota, extra = math.floor(open / #live), open % #live
    local still_live = {}
    for place, group in ipairs(live) do
      local wanted = quota + (place <= extra and 1 or 0)
      local got = wanted > 0 and serve(group, wanted) or 0
      taken = taken + got
      dealt[group] = dealt[group] + got
      if got == wanted then
        still_live[#still_live + 1] = group
      end
    end
    live = by_dealt(still_live, dealt)
  end
  for _, group in ipairs(by_dealt(known, dealt)) do
    if dealt[group] > 0 then
      mark(group)
    end
  end
  return taken
end
