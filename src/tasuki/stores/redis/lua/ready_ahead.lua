-- ready_ahead(job_id) -> how many stand before it, or false if it is not ready
-- Reads {app}:job:{id} and its queue.

reads.ready_ahead = function()
  local job = own_jobs.load(take(1))
  return job and queues.is_waiting(job) and tostring(queues.ahead_of(job)) or false
end
