-- skip(epoch, limit) -> the ids of jobs that ended SKIPPED
-- Reads {app}:epoch and {app}:late; of each job past its not_after it writes what cancel does.

verbs.skip = function()
  local epoch, limit = take(2)
  check_epoch(epoch)
  local skipped = {}
  for i, entry in ipairs(jobs.first_of(key.late, '(' .. text(now.wall), tonumber(limit))) do
    local job = entry.job
    local words = job.outcome and (outcomes.last_words(job) or 'failed')
    local message = rules.too_late(job.not_after, words)
    jobs.tell(job, 'skipped', '', '', message)
    jobs.finish(job, 'skip', { leader_epoch = epoch }, outcomes.made('TOO_LATE', message), message)
    skipped[i] = job.id
  end
  return skipped
end
