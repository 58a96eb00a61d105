-- set_expiry(scope, holder, epoch, ttl_s, lock_max_s) -> 1, or 0 if the lock is not held by this holder under this epoch
-- {app}:lock:{scope}. Renews (ttl_s) and releases (0): the epoch stays.

local scope, holder, epoch, ttl_s, lock_max_s = unpack(ARGV, 1, 5)
local lock = read_lock(scope)
if lock.holder ~= holder or lock.epoch ~= tonumber(epoch) or not is_held(lock, tonumber(lock_max_s)) then
  return 0
end
redis.call('HSET', of('lock', scope), 'expires_at', text(now + tonumber(ttl_s)))
return 1
