-- Queues of ready jobs, and which queues a worker is served from in which order.
--
-- There is one queue for each priority, subject, kind and exec, so that neither jobs nor patterns that do not fit cost anything. The
-- queue of the app's own subject is the list {app}:queue; all others are sorted sets by seq, and members of
-- {app}:queues:{priority} in the order of group, subject and kind: the subjects that a pattern can match are a range there.

local emptied = {} -- queues that a job was taken from; swept after each verb
local indexed = {} -- names of queues that this script has put into the index
local came_back = {} -- subject and kind, NUL between, of the queues that jobs came back to in this turn

function queues.is_own(facts)
  return facts.subject == OWN.subject and facts.kind == OWN.kind and tonumber(facts.priority) == OWN.priority
end

queues.own = { name = key.queue, is_list = true, group = OWN.group, subject = OWN.subject, kind = OWN.kind }
local own = queues.own

function queues.index_of(priority)
  return prefix .. 'queues:' .. priority
end

function queues.queue_of(priority, group, kind, subject)
  local number, exec = string.match(kind, '^(%d):?(.*)$')
  return {
    name = key.queue .. ':' .. priority .. ':' .. group .. ':' .. number .. ':' .. subject .. (exec ~= '' and '\0' .. exec or ''),
    index = queues.index_of(priority),
    member = group .. '\0' .. subject .. '\0' .. kind,
    group = group,
    kind = kind,
    subject = subject,
  }
end

local function queue_of_facts(facts, group)
  return queues.is_own(facts) and own or queues.queue_of(facts.priority, group, facts.kind, facts.subject)
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

-- Returns the queue of jobs with these facts, which is to get one: it is put into the index.
function queues.of(facts, group)
  local queue = queue_of_facts(facts, group)
  if not queue.is_list and not indexed[queue.name] then
    indexed[queue.name] = true
    write('ZADD', queue.index, 0, queue.member)
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
  queues.came_back_to(queue)
  if queue.is_list then
    add_to_list(job)
  else
    rank(queue.name, job.seq, job.id)
  end
end

-- Notes for the server that jobs came back to a queue.
function queues.came_back_to(queue)
  came_back[queue.subject .. '\0' .. queue.kind] = true
end

-- Returns subject and kind of the queues that jobs came back to.
function queues.all_came_back_to()
  local found = {}
  for name in pairs(came_back) do
    found[#found + 1] = name
  end
  return found
end

-- Removes a job. `job.queue` is set for jobs that were found in it.
function queues.remove(job)
  local queue = job.queue or queue_of_facts(jobs.facts(job), job.group)
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
      write('ZREM', queue.index, queue.member)
      indexed[name] = nil
    end
  end
  emptied = {}
end

function queues.is_waiting(job)
  return READY[job.state] and not job.delayed
end

-- Returns how many ready jobs are before it in its queue, false if somebody took it out.
function queues.ahead_of(job)
  local queue = queue_of_facts(jobs.facts(job), job.group)
  if queue.is_list then
    local place = redis.call('LPOS', queue.name, job.id, 'RANK', -1)
    return place and redis.call('LLEN', queue.name) - 1 - place
  end
  return redis.call('ZRANK', queue.name, job.id)
end

function queues.is_own_ready(priority)
  return priority == OWN.priority and redis.call('EXISTS', own.name) == 1
end

-- Returns the priorities of which a job waits, the highest first.
function queues.priorities()
  local found = {}
  for priority = PRIORITY_MAX, 0, -1 do
    if redis.call('EXISTS', queues.index_of(priority)) == 1 or queues.is_own_ready(priority) then
      found[#found + 1] = priority
    end
  end
  return found
end

function queues.read_member(member)
  return string.match(member, '^([^%z]*)%z([^%z]*)%z(.*)$')
end

-- Returns up to `limit` queues after a place, each as priority, member of the index, subject ('' if it is paused) and kind; and,
-- whatever the place, the list if it has an entry: outsiders fill it without a turn.
function queues.page(priority, after, limit)
  local found = {}
  for each = priority, 0, -1 do
    local low = each == priority and after ~= '' and '(' .. after or '-'
    for _, member in ipairs(redis.call('ZRANGEBYLEX', queues.index_of(each), low, '+', 'LIMIT', 0, limit - #found)) do
      local _, subject, kind = queues.read_member(member)
      found[#found + 1] = { tostring(each), member, queues.is_paused(subject) and '' or subject, kind }
    end
    if #found == limit then
      break
    end
  end
  return found, queues.is_own_ready(OWN.priority) and not queues.is_paused(own.subject) and { own.subject, own.kind }
end

-- Returns the oldest `limit` jobs of each queue of a subject, of `most` queues of each priority.
function queues.oldest_of(subject, group, limit, most)
  local found, place = {}, group .. '\0' .. subject .. '\0'
  local low, high = '[' .. place, '(' .. group .. '\0' .. subject .. '\1'
  for priority = PRIORITY_MAX, 0, -1 do
    for _, member in ipairs(redis.call('ZRANGEBYLEX', queues.index_of(priority), low, high, 'LIMIT', 0, most)) do
      local _, _, kind = queues.read_member(member)
      local queue = queues.queue_of(priority, group, kind, subject)
      for _, id in ipairs(redis.call('ZRANGE', queue.name, 0, limit - 1)) do
        found[#found + 1] = id
      end
    end
    if subject == own.subject and priority == OWN.priority then
      local ids = redis.call('LRANGE', own.name, -limit, -1)
      for i = #ids, 1, -1 do
        found[#found + 1] = ids[i]
      end
    end
  end
  return found
end

-- The rules of core.subject and stores.common, on the store's own queues and its own memory of which groups were served.

local tokens = {} -- subject or pattern -> its tokens

function fair.tokens_of(subject)
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
  local wanted, there = fair.tokens_of(pattern), fair.tokens_of(subject)
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

-- Returns the groups in order: never served ones first, by name; then by how long ago they were served.
local function in_order(groups)
  local waiting, score = {}, {}
  for group in pairs(groups) do
    waiting[#waiting + 1] = group
  end
  local scores = #waiting > 0 and redis.call('ZMSCORE', key.served, unpack(waiting)) or {}
  for i, group in ipairs(waiting) do
    score[group] = tonumber(scores[i] or 0)
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
    local still_live, before = {}, taken
    for place, group in ipairs(live) do
      local wanted = quota + (place <= extra and 1 or 0)
      local got = wanted > 0 and serve(group, wanted) or 0
      taken = taken + got
      dealt[group] = dealt[group] + got
      if got == wanted then
        still_live[#still_live + 1] = group
      end
    end
    live = taken > before and by_dealt(still_live, dealt) or still_live
  end
  for _, group in ipairs(by_dealt(known, dealt)) do
    if dealt[group] > 0 then
      mark(group)
    end
  end
  return taken
end
