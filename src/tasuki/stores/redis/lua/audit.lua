-- audit(limit) -> a list of msgpack, the newest first
-- Reads {app}:audit.

reads.audit = function()
  return redis.call('LRANGE', key.audit, 0, take_number() - 1)
end
