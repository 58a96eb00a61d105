-- promote(epoch, limit) -> {count, subject, …} Reads {app}:epoch; takes from {app}:delay what is due and puts it into its queue;
-- gives what outsiders pushed into {app}:queue since the last look its {app}:job:{id}, and counts it among what became ready.

verbs.promote = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local met = own_jobs.meet(tonumber(limit))
  local found = jobs.first_of(key.delay, text(now.wall), tonumber(limit))
  local answer, seen = { tostring(#found + met) }, {}
  if met > 0 then
    answer[2], seen[OWN.subject] = OWN.subject, true
  end
  for _, entry in ipairs(found) do
    local job = entry.job
    jobs.change(job, {})
    local subject = jobs.facts(job).subject
    if not seen[subject] then
      seen[subject] = true
      answer[#answer + 1] = subject
    end
  end
  return answer
end
