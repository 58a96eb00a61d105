-- held(count, then for each worker_id, incarnation) -> for each a list of grants with the ttl that is left
-- Reads {app}:lease:index, {app}:lease:{id}, {app}:job:{id}, {app}:spec|payload:{id}.

reads.held = function()
  local holders, found = {}, {}
  for i = 1, take_number() do
    local worker_id, incarnation = take(2)
    holders[i] = worker_id .. '\n' .. incarnation
    found[holders[i]] = {}
  end
  for _, entry in ipairs(#holders > 0 and jobs.first_of(key.index, '+inf', ALL) or {}) do
    local job = entry.job
    local grants = job.state == 'ASSIGNED' and found[job.assigned_worker_id .. '\n' .. job.incarnation]
    local expires_at = grants and tonumber(leases.expires_at(job))
    if grants and expires_at > now.lease then
      -- What is left, not the whole: this does not renew.
      local left_s = math.max(0, expires_at - LEASE_MARGIN_S - now.lease)
      grants[#grants + 1] = { job.id, job.lease_id, job.attempt, text(left_s) }
    end
  end
  local answers = {}
  for i, holder in ipairs(holders) do
    answers[i] = shows.grants(found[holder])
  end
  return answers
end
