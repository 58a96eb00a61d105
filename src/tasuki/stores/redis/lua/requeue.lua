-- requeue(count, then for each job_id, actor, reason, generation that it must have or "") -> for each {1 if done, state or false}
-- {app}:job|status|incidents:{id}, its queue or {app}:delay, {app}:late; {app}:ended, {app}:dlq; gone are {app}:outcome:{id},
-- {app}:result|summary|freqs:{id}, {app}:retry_count:{id}. {app}:payload:{id} and {app}:status:{id} expire no more.

local function requeue(id, actor, reason, generation)
  local job = jobs.load(id)
  local is_it = job and TERMINAL[job.state] and (generation == '' or tonumber(generation) == (tonumber(job.generation) or 0))
  if not is_it or not jobs.is_whole(job) then
    return { '0', job and job.state or false }
  end
  jobs.again(job, actor, reason)
  return { '1', job.state }
end

verbs.requeue = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = requeue(take(4))
  end
  return answers
end
