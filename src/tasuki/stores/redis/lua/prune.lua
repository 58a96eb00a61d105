-- prune(before, epoch, limit) -> how many
-- Reads {app}:epoch and {app}:ended; of each job that ended before that time every key goes.

verbs.prune = function()
  local before, epoch, limit = take(3)
  check_epoch(epoch)
  local doomed = jobs.first_of(key.ended, '(' .. before, tonumber(limit))
  for _, entry in ipairs(doomed) do
    jobs.delete(entry.job)
  end
  return tostring(#doomed)
end
