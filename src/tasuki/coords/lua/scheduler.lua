-- The scripts of the coordination on the keys scheduler:… (coords/scheduler_redis.py). Each has one key, and so works on Redis Cluster.

-- name: take
-- KEYS[1] a lock; ARGV holder, ttl in ms, longest ttl in ms -> {1}, or {0, holder, ms left}
local left = redis.call('PTTL', KEYS[1])
if left == -1 or left > tonumber(ARGV[3]) then -- written by hand, or before the clock was set back
  redis.call('DEL', KEYS[1])
end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return { 1 }
end
return { 0, redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]) }

-- name: next
-- KEYS[1] a number that only grows; ARGV floor -> the next one
local number = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], string.format('%.0f', number))
return number

-- name: hold
-- KEYS[1] a lock; ARGV holder, ttl in ms, 0 to release it, longest ttl in ms -> 1, or 0 if it is not the holder's
local left = redis.call('PTTL', KEYS[1])
if redis.call('GET', KEYS[1]) ~= ARGV[1] or left < 0 or left > tonumber(ARGV[3]) then
  return 0
end
if ARGV[2] == '0' then
  return redis.call('DEL', KEYS[1])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])

-- name: flag
-- KEYS[1] the flag of a worker; ARGV value, seconds to keep it, 0 for ever -> 1, or 0 if it is there. A person's takes the place
-- of a leader's, which is 1.
local before = redis.call('GET', KEYS[1])
if before and before ~= '' and before ~= '0' and (before ~= '1' or ARGV[1] == '1') then
  return 0
end
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
return 1

-- name: tell
-- KEYS[1] a member; ARGV ttl in ms, kind, incarnation, schema_version, version, info
local before = redis.call('HMGET', KEYS[1], 'incarnation', 'version')
if before[1] ~= ARGV[3] or before[2] ~= ARGV[5] then
  redis.call('HSET', KEYS[1], 'kind', ARGV[2], 'incarnation', ARGV[3], 'schema_version', ARGV[4], 'version', ARGV[5],
    'info', ARGV[6])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])

-- name: show
-- KEYS[1] a worker; ARGV ttl in ms, field, value, … -> 1 if it was told not to lead
local degraded = redis.call('HGET', KEYS[1], 'degrade_leader')
redis.call('HSET', KEYS[1], 'degrade_leader', '0', unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return (degraded and degraded ~= '0' and degraded ~= '') and 1 or 0

-- name: leave
-- KEYS[1] a member; ARGV incarnation -> 1 if that one was there
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])

-- name: clock
-- KEYS[1] a key, whose server is asked -> {seconds, microseconds}
return redis.call('TIME')
