-- start(count, then for each job_id, worker_id, incarnation, lease_id, attempt, ttl_s) -> for each go_on, cancel or lost
-- {app}:job|status:{id}; of an orphan also its queue, {app}:lease:{id}, {app}:lease:index, {app}:incidents:{id}.

local function start(id, worker_id, incarnation, lease_id, attempt, ttl_s)
  local job = jobs.load(id)
  if not job or not leases.is(job, worker_id, incarnation, lease_id, attempt) then
    return 'lost'
  end
  if job.state == 'ASSIGNED' then
    jobs.change(job, { state = rules.after(job.state, 'start'), started_at = now.text })
  elseif job.state == 'ORPHANED' then
    attempts.resume(job, ttl_s)
  end
  return job.cancel_requested and 'cancel' or 'go_on'
end

verbs.start = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = start(take(6))
  end
  return answers
end
