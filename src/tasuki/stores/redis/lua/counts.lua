-- counts() -> {counter}:{group}, number, …
-- Reads {app}:counts.

reads.counts = function()
  jobs.flush_counts()
  return redis.call('HGETALL', key.counts)
end
