-- State and functions that all verbs of a turn share: clocks, arguments, epoch, writes.

local verbs, reads, complete = {}, {}, {} -- by name: verbs that write, verbs that read, what completes an answer (reads.lua)
local blobs, queues, fair, jobs, outcomes, leases, attempts, outsiders = {}, {}, {}, {}, {}, {}, {}, {}

local now = { lease = 0, wall = 0, text = '0' } -- `text` is the wall clock
local at = 0 -- the argument that was read last

-- Returns the next `count` arguments.
local function take(count)
  at = at + count
  return unpack(ARGV, at - count + 1, at)
end

local function take_number()
  at = at + 1
  return tonumber(ARGV[at])
end

-- Returns a list of arguments: the next one is their count.
local function take_list()
  local list = {}
  for i = 1, take_number() do
    list[i] = ARGV[at + i]
  end
  at = at + #list
  return list
end

-- Calls `verb` once for each item of a batch, with the item's `width` arguments, and returns the answers.
local function for_each(verb, width)
  local answers = {}
  for i = 1, take_number() do
    answers[i] = verb(take(width))
  end
  return answers
end

-- Returns nil for '', which stands for an argument that is missing.
local function given(text)
  return text ~= '' and text or nil
end

-- Returns a number as a text that loses nothing.
local function text(number)
  return string.format('%.17g', number)
end

local successors = {}

-- Returns the number after this one (nil: after 0); both are texts.
local function plus_one(number)
  local successor = successors[number or '0']
  if not successor then
    successor = tostring((number or 0) + 1)
    successors[number or '0'] = successor
  end
  return successor
end

-- Raised by a leader's verb whose epoch does not lead; main.lua rolls the turn back and answers so.
local STALE = { 'stale' }

local function check_epoch(epoch)
  local current = redis.call('HGET', key.epoch, 'epoch') or '0'
  if current ~= epoch then
    error(STALE)
  end
end

-- Every write goes through the functions below. So a turn can be rolled back inside the script that tried it; a turn that never
-- has to be (`undo` is nil, the rule) pays nothing for this. And strings and sorted sets are written after each verb, many in one
-- command: a command costs more than the data it writes.

local undo = nil -- functions that roll the writes back, the latest last
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

-- Writes that wait for the end of the verb, in flat lists whose length is counted: they are filled for every job, and a table by
-- name costs twice as much. A key may be put several times, the last one counts; deletions come after all else.
local puts, put_size = {}, 0 -- key, value, …
local dropped, has_dropped = {}, false -- key -> true
local ranks = {} -- sorted set -> { added = { member, score, … }, added_size, gone = { member, … }, gone_size }

-- Writes at once. Sorted sets grow with the number of jobs: of them only the one member is remembered, never the whole set.
local function write(command, name, ...)
  if undo then
    if command == 'ZADD' or command == 'ZREM' then
      local first, second = ...
      remember_member(name, command == 'ZADD' and second or first)
    else
      remember(name)
    end
  end
  if has_dropped then
    dropped[name] = nil
  end
  return redis.call(command, name, ...)
end

local NOTICES_MAX = 20

local notices = {} -- sentences for the server's log

local cut = {} -- positions of the lease requests that ended at the bound of walks.lua

local function notice(sentence)
  notices[math.min(#notices, NOTICES_MAX) + 1] = #notices < NOTICES_MAX and sentence or 'and more of this kind'
end

-- HSET at once, of a key that outsiders know: one of another type is replaced.
local function write_hash(name, ...)
  if undo then
    remember(name)
  end
  if has_dropped then
    dropped[name] = nil
  end
  local answer = redis.pcall('HSET', name, ...)
  if type(answer) ~= 'table' then
    return
  end
  if string.find(answer.err, 'WRONGTYPE', 1, true) then
    notice(name .. ' was no hash; it was replaced by one')
    redis.call('DEL', name)
  end
  redis.call('HSET', name, ...)
end

-- Moves keys of outsiders aside that have another type than they must have, before anything is written: no verb may fail halfway.
local function move_misplaced_keys()
  for short, wanted in pairs(SHARED_TYPES) do
    local name = prefix .. short
    local found = redis.call('TYPE', name)['ok']
    if found ~= wanted and found ~= 'none' then
      local aside = prefix .. 'misplaced:' .. short
      redis.call('RENAME', name, aside)
      notice(string.format('%s is a %s and must be a %s; it was renamed to %s', name, found, wanted, aside))
    end
  end
end

-- SET after the verb.
local function put(name, value)
  puts[put_size + 1], puts[put_size + 2] = name, value
  put_size = put_size + 2
  if has_dropped then
    dropped[name] = nil
  end
end

-- DEL after the verb.
local function drop(name)
  dropped[name], has_dropped = true, true
end

-- Calls the command with the first `size` arguments, of which `step` belong together, in pieces that Lua can unpack.
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

-- Puts the last ones first: most come in order, and Redis looks for the position in a small set from its beginning.
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

-- ZADD after the verb. The same member must not be added twice, unless it was removed in between.
local function rank(name, score, member)
  local waiting = ranks[name] or rank_of(name)
  if waiting.gone_size > 0 then
    flush_rank(name, waiting)
  end
  local added, size = waiting.added, waiting.added_size
  added[size + 1], added[size + 2] = member, score
  waiting.added_size = size + 2
end

-- ZREM after the verb.
local function unrank(name, member)
  local waiting = ranks[name] or rank_of(name)
  local size = waiting.gone_size + 1
  waiting.gone[size] = member
  waiting.gone_size = size
end

-- Returns how many of these keys exist.
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

local function roll_back()
  for i = #undo, 1, -1 do
    undo[i]()
  end
end

-- Returns the next number of a counter.
local function next_of(counter)
  return write('HINCRBY', key.sequence, counter, 1)
end
