-- Queues of ready jobs, and which queues a worker is served from in which order.
--
-- There is one queue for each priority, kind and subject, so that neither jobs nor patterns that do not fit cost anything. The
-- queue of the app's own subject is the list {app}:queue; all others are sorted sets by seq, and members of {app}:queues:{priority}
-- in the order of group, subject and kind: the subjects that a pattern can match are a range there.

local emptied = {} -- queues that a job was taken from; swept after each verb
local indexed = {} -- names of queues that this script has put into the index
local came_back = {} -- {kind}:{subject} of the queues that jobs came back to in this turn

function queues.is_own(facts)
  return facts.subject == OWN.subject and facts.kind == OWN.kind and tonumber(facts.priority) == OWN.priority
end

local own = { name = key.queue, is_list = true, group = OWN.group, subject = OWN.subject, kind = OWN.kind }

local function index_of(priority)
  return prefix .. 'queues:' .. priority
end

local function queue_of(priority, group, kind, subject)
  return {
    name = key.queue .. ':' .. priority .. ':' .. group .. ':' .. kind .. ':' .. subject,
    index = index_of(priority),
    member = group .. '\0' .. subject .. '\0' .. kind,
    group = group,
    kind = kind,
    subject = subject,
  }
end

local function queue_of_facts(facts, group)
  return queues.is_own(facts) and own or queue_of(facts.priority, group, facts.kind, facts.subject)
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
  came_back[(queue or own).kind .. ':' .. (queue or own).subject] = true
end

-- Returns {kind}:{subject} of the queues that jobs came back to.
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

local function is_own_ready(priority)
  return priority == OWN.priority and redis.call('EXISTS', own.name) == 1
end

-- Returns the priorities of which a job waits, the highest first.
function queues.priorities()
  local found = {}
  for priority = PRIORITY_MAX, 0, -1 do
    if redis.call('EXISTS', index_of(priority)) == 1 or is_own_ready(priority) then
      found[#found + 1] = priority
    end
  end
  return found
end

local function read_member(member)
  return string.match(member, '^([^%z]*)%z([^%z]*)%z(.*)$')
end

-- Returns up to `limit` queues after a place, each as priority, member of the index, subject and kind; and, whatever the place,
-- the list if it has an entry: outsiders fill it without a turn.
function queues.page(priority, after, limit)
  local found = {}
  for each = priority, 0, -1 do
    local low = each == priority and after ~= '' and '(' .. after or '-'
    for _, member in ipairs(redis.call('ZRANGEBYLEX', index_of(each), low, '+', 'LIMIT', 0, limit - #found)) do
      local _, subject, kind = read_member(member)
      found[#found + 1] = { tostring(each), member, subject, kind }
    end
    if #found == limit then
      break
    end
  end
  return found, is_own_ready(OWN.priority) and { own.subject, own.kind }
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

-- Returns whether a live worker other than the one that asks is named by the subject, which is then left to it.
local function leaves(request, subject)
  local names = tokens_of(subject)
  local last = names[#names]
  for _, pattern in ipairs(last ~= request.worker_id and request.live_workers[last] or {}) do
    if fair.matches(pattern, subject) then
      return true
    end
  end
  return false
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

-- Walks over the index. One call of lease looks at IN_VAIN_MAX names in vain, then only for subjects that a pattern names. In a
-- priority with more than GROUPS_AT_ONCE groups each request serves some of them, and the next request the following ones; so it
-- is with the subjects of a group, QUEUES_AT_ONCE of which are compared by age.

local IN_VAIN_MAX = 512 -- some 3 ms
local GROUPS_AT_ONCE = 128
local QUEUES_AT_ONCE = 64
local REMEMBERED_WALKS_MAX = 10000

local in_vain, is_cut = 0, false

function queues.begin_lease()
  in_vain = 0
end

function queues.begin_request()
  is_cut = false
end

-- Returns whether a walk of the request ended before its end.
function queues.is_cut()
  return is_cut
end

function queues.looked_in_vain(count)
  in_vain = in_vain + count
end

function queues.may_walk()
  is_cut = is_cut or in_vain >= IN_VAIN_MAX
  return in_vain < IN_VAIN_MAX
end

local function group_of(subject)
  local rest = string.match(subject, '^job%.assign%.(.*)') or string.match(subject, '^job%.submit%.(.*)') or subject
  return string.match(rest, '^[^.]*')
end

local OPEN = { ['job'] = true, ['job.assign'] = true, ['job.submit'] = true } -- the token that names the group comes later

-- Returns the range that holds the subjects that a pattern matches: group (nil: any), low, high, and `needs_match` if it holds others.
function queues.range_of(pattern)
  if not string.find(pattern, '[*>]') then
    return { pattern = pattern, is_literal = true, group = group_of(pattern), low = pattern .. '\0', high = pattern .. '\1' }
  end
  local prefix = string.match(pattern, '^(.-)%.?[*>]')
  if prefix == '' then
    return { pattern = pattern, low = '', high = '\255', needs_match = pattern ~= '>' }
  end
  local group = not OPEN[prefix] and group_of(prefix .. '.x') or nil
  return { pattern = pattern, group = group, low = prefix .. '.', high = prefix .. '/', needs_match = pattern ~= prefix .. '.>' }
end

-- Sorts the patterns of a request by the group that they are about; once for all requests that have them in common.
local function sort_patterns(request)
  if not request.of_group then
    request.of_group, request.of_any = {}, {}
    for _, pattern in ipairs(request.patterns) do
      local range = queues.range_of(pattern)
      if range.group then
        request.of_group[range.group] = request.of_group[range.group] or {}
      end
      table.insert(request.of_group[range.group] or request.of_any, range)
    end
  end
end

-- A walk over the members of an index between two bounds. It begins where the last one of its name was cut short, and wraps around.
local function begin_walk(name, index, low, high)
  local start = redis.call('HGET', key.walks, name)
  local ranges = start and { { start, high }, { low, '(' .. string.sub(start, 2) } } or { { low, high } }
  return { name = name, index = index, ranges = ranges, start = start }
end

-- Returns up to `count` members. With `whole_group` one of each group: the walk goes on behind the group.
local function go_on(walk, count, whole_group)
  local found = {}
  while #walk.ranges > 0 and #found < count do
    local range, wanted = walk.ranges[1], whole_group and 1 or count - #found
    local some = redis.call('ZRANGEBYLEX', walk.index, range[1], range[2], 'LIMIT', 0, wanted)
    for _, member in ipairs(some) do
      found[#found + 1] = member
    end
    if #some < wanted then
      table.remove(walk.ranges, 1)
    else
      range[1] = '[' .. (whole_group and read_member(some[1]) .. '\1' or some[#some] .. '\0')
    end
  end
  return found
end

-- Lets the next walk of that name begin where this one is, unless it is over.
local function leave_walk(walk)
  if #walk.ranges > 0 then
    if not walk.start and redis.call('HLEN', key.walks) >= REMEMBERED_WALKS_MAX then
      write('DEL', key.walks)
    end
    write('HSET', key.walks, walk.name, walk.ranges[1][1])
  elseif walk.start then
    write('HDEL', key.walks, walk.name)
  end
end

local function bounds_of(group, range)
  return '[' .. group .. '\0' .. range.low, '(' .. group .. '\0' .. range.high
end

-- Returns the groups that patterns of the request name and that have a queue in the range of one. They are looked for once for all
-- requests that have these patterns: in a call of lease nothing becomes ready.
local function named_groups(request, priority)
  request.named = request.named or {}
  local found = request.named[priority]
  if not found then
    found = {}
    for group, ranges in pairs(request.of_group) do
      found[group] = group == own.group and is_own_ready(priority) or nil
      for _, range in ipairs(ranges) do
        local low, high = bounds_of(group, range)
        if found[group] or #redis.call('ZRANGEBYLEX', index_of(priority), low, high, 'LIMIT', 0, 1) > 0 then
          found[group] = true
          break
        end
      end
    end
    request.named[priority] = found
  end
  local copy = {}
  for group in pairs(found) do
    copy[group] = true
  end
  return copy
end

-- Calls `visit` with the groups of a priority that may have jobs for the request, some at a time, until it returns true.
function queues.each_groups(request, priority, visit)
  sort_patterns(request)
  local named = named_groups(request, priority)
  if #request.of_any > 0 and queues.may_walk() then
    local walk = begin_walk(priority, index_of(priority), '-', '+')
    if is_own_ready(priority) then
      named[own.group] = true
    end
    repeat
      local groups = {}
      for _, member in ipairs(go_on(walk, GROUPS_AT_ONCE, true)) do
        local group = read_member(member)
        groups[group], named[group] = true, nil
      end
      if visit(groups) then
        leave_walk(walk)
        return
      end
    until #walk.ranges == 0 or not queues.may_walk()
    leave_walk(walk)
  end
  visit(named)
end

-- Calls `visit` with the queues of a group that the request may be served from, some at a time, until it returns true.
function queues.each_window(request, priority, group, visit)
  local index, walks, seen, waiting = index_of(priority), {}, {}, {}

  local function add(queue)
    if seen[queue.name] then
      return
    end
    seen[queue.name] = true
    if string.find(request.kinds, queue.kind, 1, true) and not leaves(request, queue.subject) then
      waiting[#waiting + 1] = queue
    else
      in_vain = in_vain + 1
    end
  end

  local function add_members(members, range)
    for _, member in ipairs(members) do
      local _, subject, kind = read_member(member)
      if range.needs_match and not fair.matches(range.pattern, subject) then
        in_vain = in_vain + 1
      else
        add(queue_of(priority, group, kind, subject))
      end
    end
  end

  local has_own = group == own.group and is_own_ready(priority)
  for _, ranges in ipairs({ request.of_group[group] or {}, request.of_any }) do
    for _, range in ipairs(ranges) do
      local low, high = bounds_of(group, range)
      if has_own and fair.matches(range.pattern, own.subject) then
        add(own)
      end
      if range.is_literal then
        add_members(redis.call('ZRANGEBYLEX', index, low, high), range)
      elseif queues.may_walk() then
        walks[#walks + 1] = begin_walk(table.concat({ priority, group, range.pattern }, '\0'), index, low, high)
        walks[#walks].range = range
      end
    end
  end
  local is_over, is_done = false, false
  repeat
    is_over = true
    for _, walk in ipairs(walks) do
      add_members(go_on(walk, QUEUES_AT_ONCE), walk.range)
      is_over = is_over and #walk.ranges == 0
    end
    local window = waiting
    waiting = {}
    is_done = #window > 0 and visit(window)
  until is_over or is_done or not queues.may_walk()
  for _, walk in ipairs(walks) do
    leave_walk(walk)
  end
end
