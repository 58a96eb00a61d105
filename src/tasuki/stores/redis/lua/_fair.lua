-- Which queues a worker is served from, and in which order groups get their turn: the rules of core.subject and core.fair, on the
-- store's own queues and its own memory of who was served.

local fair = {}

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

-- Whether the request may be served from the queue: it takes the kind, a pattern matches, and the subject is not left to another
-- live worker that it names.
local function may_take(request, queue)
  if not string.find(request.kinds, queue.kind, 1, true) or not any_matches(request.patterns, queue.subject) then
    return false
  end
  local names = tokens_of(queue.subject)
  local last = names[#names]
  return last == request.worker_id or not any_matches(request.live_workers[last] or {}, queue.subject)
end

-- The queues of a band that the request may be served from, by group.
function fair.groups(request, band)
  local groups = {}
  for _, queue in pairs(band) do
    if may_take(request, queue) then
      groups[queue.group] = groups[queue.group] or {}
      table.insert(groups[queue.group], queue)
    end
  end
  return groups
end

-- Never served groups first, by name; then by how long ago they were served.
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

-- Lua's sort does not keep the order of equals: the place decides.
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

-- Up to `limit` places, dealt evenly. `serve(group, n)` says how many of a group's n places were used; fewer: it has no more.
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
