-- beat(member_id, incarnation, version, kind, schema_version, info, timeout_s, forget_after_s, forget_batch, id, version seen, …)
--   -> a list of {member_id, kind, incarnation, schema_version, version, info or false}, and the detached worker_ids
-- Writes {app}:beats, and {app}:member:{id} only if incarnation or version are not the stored ones: info may be large. Removes a
-- few of the members that have been dead for long. Reads {app}:detached.

local member_id, incarnation, version, kind, schema_version, info = unpack(ARGV, 1, 6)
local timeout_s, forget_after_s, forget_batch = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])

local before = redis.call('HMGET', of('member', member_id), 'incarnation', 'version')
if before[1] ~= incarnation or before[2] ~= version then
  redis.call('HSET', of('member', member_id), 'incarnation', incarnation, 'version', version, 'kind', kind,
    'schema_version', schema_version, 'info', info)
end
redis.call('ZADD', key.beats, text(now), member_id)

for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.beats, '-inf', '(' .. text(now - forget_after_s), 'LIMIT', 0, forget_batch)) do
  redis.call('ZREM', key.beats, id)
  redis.call('DEL', of('member', id))
end

local seen = {}
for i = 10, #ARGV, 2 do
  seen[ARGV[i]] = ARGV[i + 1]
end

local live = {}
-- A beat from the future was written before the clock was set back, and is no sign of life.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.beats, '(' .. text(now - timeout_s), '(' .. text(now + timeout_s))) do
  local row = redis.call('HMGET', of('member', id), 'kind', 'incarnation', 'schema_version', 'version')
  if row[1] then -- else it was deleted by hand: its next beat writes it again
    local new_info = seen[id] ~= row[4] and redis.call('HGET', of('member', id), 'info')
    live[#live + 1] = { id, row[1], row[2], row[3], row[4], new_info }
  end
end
return { live, redis.call('HKEYS', key.detached) }
