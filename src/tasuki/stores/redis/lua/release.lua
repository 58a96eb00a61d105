-- release(reason, count, then for each job_id, worker_id, incarnation, lease_id, attempt, the outcome if it was to be canceled)
--   -> for each 1 or 0
-- {app}:job|status|incidents:{id}, its queue; {app}:lease:{id} and {app}:lease:index are gone. A canceled one ends: see cancel.

local function release(reason, id, worker_id, incarnation, lease_id, attempt, packed)
  local job = jobs.load(id)
  local is_holder = job and leases.is(job, worker_id, incarnation, lease_id, attempt)
  local state = is_holder and rules.after(job.state, 'release')
  if not state then
    return '0'
  end
  if job.cancel_requested then
    jobs.tell(job, 'canceled', worker_id, '', reason)
    jobs.finish(job, 'cancel', {}, { packed = packed }, reason)
    return '1'
  end
  jobs.tell(job, 'released', worker_id, '', reason)
  local changes = { state = state }
  leases.ended(job, changes)
  jobs.change(job, changes, reason)
  return '1'
end

verbs.release = function()
  local reason = take(1)
  local answers = {}
  for i = 1, take_number() do
    answers[i] = release(reason, take(6))
  end
  return answers
end
