-- renew(count, then for each job_id, worker_id, incarnation, lease_id, attempt, ttl_s, progress or '') -> for each go_on, cancel
-- or lost {app}:lease:{id}, {app}:lease:index, {app}:job:{id} progress; of an orphan also what start writes.

local function renew(id, worker_id, incarnation, lease_id, attempt, ttl_s, progress)
  local job = jobs.load(id)
  if not job or not leases.is(job, worker_id, incarnation, lease_id, attempt) then
    return 'lost'
  end
  if job.state == 'ORPHANED' then
    attempts.resume(job, ttl_s)
  else
    leases.extend(job, ttl_s)
  end
  if progress ~= '' then
    jobs.set(job, { progress = progress })
  end
  return job.cancel_requested and 'cancel' or 'go_on'
end

verbs.renew = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = renew(take(7))
  end
  return answers
end
