-- reap(epoch, limit) -> a list of {job_id, state, worker_id, attempt, reason} Reads {app}:epoch and {app}:lease:index, whose
-- entries without a lease it drops; of each lease that is over it writes what fail does.

verbs.reap = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local reaped = {}
  for _, entry in ipairs(jobs.first_of(key.index, text(now.lease), tonumber(limit))) do
    local job = entry.job
    if LEASED[job.state] then
      local verdict = attempts.loss(job)
      attempts.settle(job, verdict, nil, { leader_epoch = epoch })
      reaped[#reaped + 1] = { job.id, verdict.state, job.assigned_worker_id, job.attempt, verdict.reason }
    else
      unrank(key.index, job.id)
    end
  end
  return reaped
end
