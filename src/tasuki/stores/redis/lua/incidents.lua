-- incidents(job_id) -> a list of msgpack
-- Reads {app}:incidents:{id}.

reads.incidents = function()
  return redis.call('LRANGE', of('incidents', take(1)), 0, -1)
end
