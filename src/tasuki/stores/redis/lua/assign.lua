-- assign(epoch, count, then for each job_id, worker_id, incarnation, ttl_s, on_disconnect, reconnect_grace_s, lease_id)
--   -> for each a grant or false
-- Reads {app}:epoch; writes what lease does.

local function assign(epoch, id, worker_id, incarnation, ttl_s, on_disconnect, reconnect_grace_s, lease_id)
  local job = own_jobs.load(id)
  if not job or not queues.is_waiting(job) or rules.is_late(job.not_after, now.wall) then
    return false
  end
  local to = {
    worker_id = worker_id,
    incarnation = incarnation,
    ttl_s = ttl_s,
    on_disconnect = on_disconnect,
    reconnect_grace_s = reconnect_grace_s,
    has_grace = tonumber(reconnect_grace_s) ~= 0,
    lease_id = lease_id,
  }
  attempts.grant(job, to, epoch)
  return { id, lease_id, job.attempt, ttl_s }
end

verbs.assign = function()
  local epoch = take(1)
  check_epoch(epoch)
  local answers = {}
  for i = 1, take_number() do
    answers[i] = assign(epoch, take(7))
  end
  return answers
end
