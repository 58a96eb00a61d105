-- Every write goes through here. Three things follow from that:
--   What a turn writes can be taken back inside the script that tried it. A turn that nobody has to take back (`undo` is nil, the
--   rule) pays nothing for this.
--   Strings and sorted sets are written after each verb, many in one command: a command costs more than what it writes.
--   Of several writes to one place only the last is made.

local undo = nil -- what to call to take the writes back, the latest last
local remembered = {} -- keys whose old value is in `undo`
local strings = {} -- key -> value, or false to delete it
local ranks = {} -- sorted set -> member -> score, or false to take it out

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
  strings[name] = nil
  if first == nil then
    return redis.call(command, name)
  end
  return redis.call(command, name, first, ...)
end

-- After the verb: SET and DEL.
local function put(name, value)
  strings[name] = value
end

local function drop(name)
  strings[name] = false
end

-- After the verb: ZADD and ZREM.
local function rank(name, score, member)
  local members = ranks[name]
  if not members then
    members = {}
    ranks[name] = members
  end
  members[member] = score
end

local function unrank(name, member)
  rank(name, false, member)
end

-- The command with all arguments, which come in pieces of `step` that belong together.
local function in_pieces(command, name, arguments, step)
  local width = COMMAND_MAX - COMMAND_MAX % step
  for first = 1, #arguments, width do
    local last = math.min(first + width - 1, #arguments)
    if name then
      redis.call(command, name, unpack(arguments, first, last))
    else
      redis.call(command, unpack(arguments, first, last))
    end
  end
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
  for name, members in pairs(ranks) do
    local added, gone, size, gone_size = {}, {}, 0, 0 -- counted here: Lua searches for the end of a list
    for member, score in pairs(members) do
      if undo then
        remember_member(name, member)
      end
      if score then
        added[size + 1], added[size + 2] = score, member
        size = size + 2
      else
        gone_size = gone_size + 1
        gone[gone_size] = member
      end
    end
    in_pieces('ZADD', name, added, 2)
    in_pieces('ZREM', name, gone, 1)
  end
  ranks = {}
end

local function flush_strings()
  local set, gone, size, gone_size = {}, {}, 0, 0
  for name, value in pairs(strings) do
    if undo then
      remember(name)
    end
    if value then
      set[size + 1], set[size + 2] = name, value
      size = size + 2
    else
      gone_size = gone_size + 1
      gone[gone_size] = name
    end
  end
  in_pieces('MSET', nil, set, 2)
  in_pieces('DEL', nil, gone, 1)
  strings = {}
end

local function take_back()
  for i = #undo, 1, -1 do
    undo[i]()
  end
end

local function next_of(what)
  return write('HINCRBY', key.sequence, what, 1)
end
