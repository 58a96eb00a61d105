-- Functions that the scripts of the coordination share. Its keys, below the prefix of the app (the store's own are in stores/lua):
--   {app}:beats          ZSET  member_id by its last beat
--   {app}:member:{id}    HASH  kind, incarnation, schema_version, version, info
--   {app}:lock:{scope}   HASH  epoch (the last one given out), holder, expires_at. No TTL: the epoch must stay
--   {app}:degrade        present: the leader is to step down
--   {app}:led            time of the last turn that the store took of a leader
--   {app}:detached       HASH  worker_id -> JSON of at, actor, reason
-- Times are Redis TIME in seconds. Two hosts' clocks are never compared.

local key = { beats = APP .. ':beats', detached = APP .. ':detached' }

local function of(kind, name)
  return APP .. ':' .. kind .. ':' .. name
end

-- Without loss: Lua's own way to write a number keeps 14 digits.
local function text(number)
  return string.format('%.17g', number)
end

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function read_lock(scope)
  local row = redis.call('HMGET', of('lock', scope), 'epoch', 'holder', 'expires_at')
  return { epoch = tonumber(row[1] or 0), holder = row[2], expires_at = tonumber(row[3] or 0) }
end

-- One that seems to last longer than any lock may was written before the clock was set back.
local function is_held(lock, lock_max_s)
  return now < lock.expires_at and lock.expires_at <= now + lock_max_s
end
