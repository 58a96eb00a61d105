-- Walks over the index of queues, for requests with patterns.
--
-- One call of lease looks at IN_VAIN_MAX names in vain, then only for subjects that a pattern names. In a priority with more than
-- GROUPS_AT_ONCE groups each request serves some of them, and the next request the following ones; so it is with the subjects of
-- a group, QUEUES_AT_ONCE of which are compared by age.

local own, index_of, queue_of = queues.own, queues.index_of, queues.queue_of
local read_member, is_own_ready = queues.read_member, queues.is_own_ready

local IN_VAIN_MAX = 512 -- some 3 ms
local GROUPS_AT_ONCE = 128
local QUEUES_AT_ONCE = 64
local REMEMBERED_WALKS_MAX = 10000

local in_vain, is_cut = 0, false

local paused = nil -- patterns of {app}:paused, once they were read

-- Returns the patterns that are paused. They are read again after a verb that changed them.
local function paused_patterns()
  paused = paused or redis.call('HKEYS', key.paused)
  return paused
end

function queues.pauses_changed()
  paused = nil
end

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

local function matches_any(patterns, subject)
  for _, pattern in ipairs(patterns or {}) do
    if fair.matches(pattern, subject) then
      return true
    end
  end
  return false
end

-- Returns whether the jobs of a subject are granted to nobody.
function queues.is_paused(subject)
  return matches_any(paused_patterns(), subject)
end

-- Returns whether the jobs of a subject are not for the worker that asks: they are paused, the subject names another one, or a
-- routing policy decides about them.
local function leaves(request, subject)
  if queues.is_paused(subject) then
    return true
  end
  local only = string.match('.' .. subject, '^.*%.@([^@]+)$')
  if only then
    return only ~= request.worker_id
  end
  local names = fair.tokens_of(subject)
  local last = names[#names]
  if matches_any(request.live_workers[last], subject) then
    return last ~= request.worker_id
  end
  return matches_any(request.routed, subject)
end

-- Returns whether the worker that asks offers what the jobs of a queue need, and they are not left to one that has the program.
local function offers(request, queue)
  if request.has_kind[queue.kind] then
    return true
  end
  local number, exec = string.sub(queue.kind, 1, 1), string.sub(queue.kind, 3)
  return string.find(request.whole, number, 1, true)
    and not (number == LOCAL_COMMAND and matches_any(request.named_elsewhere[exec], queue.subject))
end

local function group_of(subject)
  local rest = string.match(subject, '^job%.assign%.(.*)') or string.match(subject, '^job%.submit%.(.*)') or subject
  local group = string.match(rest, '^[^.]*')
  return string.sub(group, 1, 1) == '@' and '@' or group
end

local OPEN = { ['job'] = true, ['job.assign'] = true, ['job.submit'] = true } -- the token that names the group comes later

-- Returns the range of the subjects that a pattern matches: group (nil: any), low, high; `needs_match` if it holds others too.
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

-- Adds a pattern to a range, whose tree finds out which of them matches by the tokens of a subject.
local function add_pattern(range, pattern)
  range.patterns = range.patterns or {}
  table.insert(range.patterns, pattern)
  range.tree = range.tree or {}
  local node = range.tree
  for _, token in ipairs(fair.tokens_of(pattern)) do
    node[token] = node[token] or {}
    node = node[token]
  end
  node[''] = {}
end

local function is_below(node, tokens, i)
  if i > #tokens then
    return node[''] ~= nil
  end
  local exact, any = node[tokens[i]], node['*']
  return node['>'] ~= nil or (exact and is_below(exact, tokens, i + 1)) or (any and is_below(any, tokens, i + 1)) or false
end

-- Returns whether a pattern of the range matches the subject. The number of its patterns does not matter.
local function is_match(range, subject)
  return is_below(range.tree, fair.tokens_of(subject), 1)
end

-- Sorts the patterns of a request by the group that they are about, those of the same range as one; once for all requests that
-- have them in common.
local function sort_patterns(request)
  if not request.of_group then
    request.of_group, request.of_any = {}, {}
    local shared = {}
    for _, pattern in ipairs(request.patterns) do
      local range = queues.range_of(pattern)
      local place = range.needs_match and (range.group or '') .. '\0' .. range.low
      if place and shared[place] then
        add_pattern(shared[place], pattern)
      else
        add_pattern(range, pattern)
        if place then
          shared[place] = range
        end
        if range.group then
          request.of_group[range.group] = request.of_group[range.group] or {}
        end
        table.insert(request.of_group[range.group] or request.of_any, range)
      end
    end
    for _, range in pairs(shared) do
      if #range.patterns > 1 then -- the name of its walk
        range.pattern = redis.sha1hex(table.concat(range.patterns, ' '))
      end
    end
  end
end

-- Begins a walk over the members of an index between two bounds, where the last one of its name was cut short; it wraps around.
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

-- Returns whether a text comes before another by its bytes, as in an index; Lua compares by the server's locale.
local function is_before(one, other)
  for i = 1, math.min(#one, #other) do
    local left, right = string.byte(one, i), string.byte(other, i)
    if left ~= right then
      return left < right
    end
  end
  return #one < #other
end

-- Cuts the subjects of a group that are paused as a range (render.>) out of a walk, however many they are. Bounds of such a walk
-- are '[low' and '(high'.
local function jump_over_paused(walk, group)
  for _, pattern in ipairs(paused_patterns()) do
    local range = queues.range_of(pattern)
    if not range.needs_match then
      local low, high, left = group .. '\0' .. range.low, group .. '\0' .. range.high, {}
      for _, one in ipairs(walk.ranges) do
        local first, last = string.sub(one[1], 2), string.sub(one[2], 2)
        local before, behind = is_before(low, last) and low or last, is_before(first, high) and high or first
        if is_before(first, before) then
          left[#left + 1] = { one[1], '(' .. before }
        end
        if is_before(behind, last) then
          left[#left + 1] = { '[' .. behind, one[2] }
        end
      end
      walk.ranges = left
    end
  end
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

-- Returns the groups that patterns of the request name and that have a queue in the range of one. They are looked for once for
-- all requests that have these patterns: in a call of lease nothing becomes ready.
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
  for i = 1, #request.chosen, 3 do
    if tonumber(request.chosen[i + 1]) == tonumber(priority) then
      named[request.chosen[i + 2]] = true
    end
  end
  if #request.of_any > 0 and queues.may_walk() then
    local walk = begin_walk(priority, index_of(priority), '-', '+')
    local groups = {}
    if is_own_ready(priority) then -- it is in no index, and served with the first groups, evenly
      groups[own.group], named[own.group] = true, nil
    end
    repeat
      for _, member in ipairs(go_on(walk, GROUPS_AT_ONCE, true)) do
        local group = read_member(member)
        groups[group], named[group] = true, nil
      end
      if visit(groups) then
        leave_walk(walk)
        return
      end
      groups = {}
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
    if offers(request, queue) and not leaves(request, queue.subject) then
      waiting[#waiting + 1] = queue
    else
      in_vain = in_vain + 1
    end
  end

  local function add_members(members, range)
    for _, member in ipairs(members) do
      local _, subject, kind = read_member(member)
      if range.needs_match and not is_match(range, subject) then
        in_vain = in_vain + 1
      else
        add(queue_of(priority, group, kind, subject))
      end
    end
  end

  -- Looks for the queues of one subject that the worker offers, however many others it has.
  local function add_literal(range)
    local members, place = {}, group .. '\0' .. range.pattern .. '\0'
    for i, kind in ipairs(request.kinds) do
      members[i] = place .. kind
    end
    for i, score in ipairs(#members > 0 and redis.call('ZMSCORE', index, unpack(members)) or {}) do
      if score then
        add(queue_of(priority, group, request.kinds[i], range.pattern))
      end
    end
    for kind in string.gmatch(request.whole, '%d') do
      local name = table.concat({ priority, group, range.pattern, kind }, '\0')
      walks[#walks + 1] = begin_walk(name, index, '[' .. place .. kind .. ':', '(' .. place .. kind .. ';')
      walks[#walks].range = range
    end
  end

  local has_own = group == own.group and is_own_ready(priority)
  for _, ranges in ipairs({ request.of_group[group] or {}, request.of_any }) do
    for _, range in ipairs(ranges) do
      local low, high = bounds_of(group, range)
      if has_own and is_match(range, own.subject) then
        add(own)
      end
      if range.is_literal then
        if not queues.is_paused(range.pattern) then
          add_literal(range)
        end
      elseif queues.may_walk() then
        walks[#walks + 1] = begin_walk(table.concat({ priority, group, range.pattern }, '\0'), index, low, high)
        walks[#walks].range = range
        jump_over_paused(walks[#walks], group)
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
