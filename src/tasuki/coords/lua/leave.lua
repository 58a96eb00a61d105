-- leave(member_id, incarnation) -> nothing
-- Removes {app}:member:{id} and its beat, if that incarnation is still the one that beats.

local member_id, incarnation = ARGV[1], ARGV[2]
if redis.call('HGET', of('member', member_id), 'incarnation') == incarnation then
  redis.call('DEL', of('member', member_id))
  redis.call('ZREM', key.beats, member_id)
end
return false
