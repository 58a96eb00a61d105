-- find(the seq to begin below or '', count, 1 if texts are wanted)
--   -> for each {job_id, record, spec, outcome}
-- The newest first. Reads {app}:jobs, {app}:job:{id}, {app}:outcome:{id}. Which of them are wanted is the caller's to judge.

reads.find = function()
  local below, count, with_texts = take(3)
  local highest = below == '' and '+inf' or '(' .. below
  local ids = redis.call('ZREVRANGEBYSCORE', key.jobs, highest, '-inf', 'LIMIT', 0, count)
  local answer = {}
  for _, id in ipairs(ids) do
    answer[#answer + 1] = {
      id,
      redis.call('GET', of('job', id)),
      redis.call('GET', of('spec', id)),
      with_texts == '1' and redis.call('GET', of('outcome', id)),
    }
  end
  return answer
end
