-- What every verb of a turn shares: the clocks, the arguments, the epoch.

local now = { lease = 0, wall = 0, text = '0' } -- `text` is the wall clock
local at = 0 -- the argument that was read last

-- The next `count` arguments.
local function take(count)
  at = at + count
  return unpack(ARGV, at - count + 1, at)
end

local function take_number()
  at = at + 1
  return tonumber(ARGV[at])
end

-- The next argument is a count; that many follow.
local function take_list()
  local list = {}
  for i = 1, take_number() do
    list[i] = ARGV[at + i]
  end
  at = at + #list
  return list
end

-- An argument that may be missing is sent as ''.
local function given(text)
  return text ~= '' and text or nil
end

-- Numbers as texts that lose nothing.
local function text(number)
  return string.format('%.17g', number)
end

local successors = {}

-- The number after this one, or after none; both are texts.
local function plus_one(number)
  local successor = successors[number or '0']
  if not successor then
    successor = tostring((number or 0) + 1)
    successors[number or '0'] = successor
  end
  return successor
end

-- Raised by a leader's verb of an epoch that does not lead; `main` takes the turn back and says so.
local STALE = { 'stale' }

local function check_epoch(epoch)
  local current = redis.call('HGET', key.epoch, 'epoch') or '0'
  if current ~= epoch then
    error(STALE)
  end
end
