-- next_due() -> {when the next lease is over or false, when the next delayed job may run or false}
-- Reads {app}:lease:index and {app}:delay.

reads.next_due = function()
  local lease = redis.call('ZRANGE', key.index, 0, 0, 'WITHSCORES')
  local delay = redis.call('ZRANGE', key.delay, 0, 0, 'WITHSCORES')
  return { lease[2] or false, delay[2] or false }
end
