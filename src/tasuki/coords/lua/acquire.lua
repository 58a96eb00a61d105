-- acquire(scope, holder, ttl_s, floor, lock_max_s) -> {1, epoch}, or {0, holder, seconds left} if it is held
-- {app}:lock:{scope}. The epoch is one more than the last of the scope, or than the floor.

local scope, holder, ttl_s, floor, lock_max_s = unpack(ARGV, 1, 5)
local lock = read_lock(scope)
if is_held(lock, tonumber(lock_max_s)) then
  return { 0, lock.holder, text(lock.expires_at - now) }
end
local epoch = math.max(lock.epoch, tonumber(floor)) + 1
redis.call('HSET', of('lock', scope), 'epoch', text(epoch), 'holder', holder, 'expires_at', text(now + tonumber(ttl_s)))
return { 1, text(epoch) }
