-- Every write goes through here. Two things follow from that:
--   What a turn writes can be taken back inside the script that tried it. A turn that nobody has to take back (`undo` is nil, the
--   rule) pays nothing for this.
--   Strings and sorted sets are written after each verb, many in one command: a command costs more than what it writes.

local undo = nil -- what to call to take the writes back, the latest last
local remembered = {} -- keys whose old value is in `undo`

local COMMAND_MAX = 2000 -- arguments of one command; Lua cannot unpack many more at once

local function remember_member(name, member)
  local score = redis.call('ZSCORE', name, member)
  undo[#undo + 1] = function()
    if score then
      redis.call('ZADD', name, score, member)
    else
      redis.call('ZREM', name, member)
    end
  end
end

local function remember(name)
  if remembered[name] then
    return
  end
  remembered[name] = true
  local dump, left_ms = redis.call('DUMP', name), redis.call('PTTL', name)
  undo[#undo + 1] = function()
    if dump then
      redis.call('RESTORE', name, math.max(0, left_ms), dump, 'REPLACE')
    else
      redis.call('DEL', name)
    end
  end
end

-- What waits for the end of the verb. Flat lists whose length is counted: they are filled for every job, and a table by name costs
-- twice as much. A key may be put several times, the last one counts; what is deleted is deleted after all else.
local puts, put_size = {}, 0 -- key, value, …
local dropped, has_dropped = {}, false -- key -> true
local ranks = {} -- sorted set -> { added = { member, score, … }, added_size, gone = { member, … }, gone_size }

-- At once. Sorted sets grow with the number of jobs: of them only the one member is remembered, never the whole.
local function write(command, name, first, ...)
  if undo then
    if command == 'ZADD' then
      remember_member(name, (...))
    elseif command == 'ZREM' then
      remember_member(name, first)
    else
      remember(name)
    end
  end
  if has_dropped then
    dropped[name] = nil
  end
  if first == nil then
    return redis.call(command, name)
  end
  return redis.call(command, name, first, ...)
end

-- After the verb: SET and DEL.
local function put(name, value)
  puts[put_size + 1], puts[put_size + 2] = name, value
  put_size = put_size + 2
  if has_dropped then
    dropped[name] = nil
  end
end

local function drop(name)
  dropped[name], has_dropped = true, true
end

-- The command with the first `size` arguments, which come in pieces of `step` that belong together.
local function in_pieces(command, name, arguments, size, step)
  local width = COMMAND_MAX - COMMAND_MAX % step
  for first = 1, size, width do
    local last = math.min(first + width - 1, size)
    if name then
      redis.call(command, name, unpack(arguments, first, last))
    else
      redis.call(command, unpack(arguments, first, last))
    end
  end
end

-- The last ones first: most come in order, and Redis looks for the place in a small set from its beginning.
local function reverse(list, size)
  for i = 1, math.floor(size / 2) do
    local j = size + 1 - i
    list[i], list[j] = list[j], list[i]
  end
end

local function flush_rank(name, waiting)
  local added, added_size, gone, gone_size = waiting.added, waiting.added_size, waiting.gone, waiting.gone_size
  if undo then
    for i = 1, added_size, 2 do
      remember_member(name, added[i])
    end
    for i = 1, gone_size do
      remember_member(name, gone[i])
    end
  end
  waiting.added_size, waiting.gone_size = 0, 0
  reverse(added, added_size)
  in_pieces('ZADD', name, added, added_size, 2)
  in_pieces('ZREM', name, gone, gone_size, 1)
end

local function rank_of(name)
  local waiting = ranks[name]
  if not waiting then
    waiting = { added = {}, added_size = 0, gone = {}, gone_size = 0 }
    ranks[name] = waiting
  end
  return waiting
end

-- After the verb: ZADD and ZREM. Not twice the same member, unless it was taken out in between.
local function rank(name, score, member)
  local waiting = ranks[name] or rank_of(name)
  if waiting.gone_size > 0 then
    flush_rank(name, waiting)
  end
  local added, size = waiting.added, waiting.added_size
  added[size + 1], added[size + 2] = member, score
  waiting.added_size = size + 2
end

local function unrank(name, member)
  local waiting = ranks[name] or rank_of(name)
  local size = waiting.gone_size + 1
  waiting.gone[size] = member
  waiting.gone_size = size
end

-- How many of these keys there are.
local function count_existing(names)
  local count = 0
  for first = 1, #names, COMMAND_MAX do
    count = count + redis.call('EXISTS', unpack(names, first, math.min(first + COMMAND_MAX - 1, #names)))
  end
  return count
end

-- MGET of any number of keys.
local function read_many(names)
  if #names <= COMMAND_MAX then
    return #names > 0 and redis.call('MGET', unpack(names)) or {}
  end
  local values = {}
  for first = 1, #names, COMMAND_MAX do
    for i, value in ipairs(redis.call('MGET', unpack(names, first, math.min(first + COMMAND_MAX - 1, #names)))) do
      values[first + i - 1] = value
    end
  end
  return values
end

local function flush_ranks()
  for name, waiting in pairs(ranks) do
    flush_rank(name, waiting)
  end
end

local function flush_strings()
  if undo then
    for i = 1, put_size, 2 do
      remember(puts[i])
    end
  end
  in_pieces('MSET', nil, puts, put_size, 2)
  put_size = 0
  if has_dropped then
    local names, size = {}, 0
    for name in pairs(dropped) do
      if undo then
        remember(name)
      end
      size = size + 1
      names[size] = name
    end
    in_pieces('DEL', nil, names, size, 1)
    dropped, has_dropped = {}, false
  end
end

local function take_back()
  for i = #undo, 1, -1 do
    undo[i]()
  end
end

local function next_of(what)
  return write('HINCRBY', key.sequence, what, 1)
end
