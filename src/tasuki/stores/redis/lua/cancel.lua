-- cancel(count, then for each job_id, actor, reason, the outcome if it is canceled at once)
--   -> for each {state or false, 1 if it was asked of its worker, worker_id, lease_id}
-- A waiting job ends: {app}:job|outcome|status:{id}, its queue or {app}:delay, {app}:late, {app}:ended, {app}:lease:{id} of an
-- orphan. A leased one: {app}:job:{id} cancel_requested. Both: {app}:incidents:{id}.

local function cancel(id, actor, reason, packed)
  local job = own_jobs.load(id)
  if not job then
    return { false }
  end
  if TERMINAL[job.state] then
    return { job.state }
  end
  if READY[job.state] then
    jobs.tell(job, 'canceled', '', actor, reason)
    jobs.finish(job, 'cancel', {}, { packed = packed }, reason)
    return { job.state }
  end
  if not job.cancel_requested then
    jobs.tell(job, 'cancel_requested', job.assigned_worker_id, actor, reason)
    jobs.change(job, { cancel_requested = '1' })
  end
  return { job.state, '1', job.assigned_worker_id, job.lease_id }
end

verbs.cancel = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = cancel(take(4))
  end
  return answers
end
