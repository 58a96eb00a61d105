-- requeue(count, then for each job_id, actor, reason) -> for each {1 if done, state or false}
-- {app}:job|status|incidents:{id}, its queue or {app}:delay, {app}:late; {app}:ended, {app}:dlq; gone are {app}:outcome:{id},
-- {app}:result|summary|freqs:{id}, {app}:retry_count:{id}. {app}:payload:{id} and {app}:status:{id} expire no more.

local function requeue(id, actor, reason)
  local job = jobs.load(id)
  if not job or not TERMINAL[job.state] or not jobs.is_whole(job) then
    return { '0', job and job.state or false }
  end
  jobs.again(job, actor, reason)
  return { '1', job.state }
end

verbs.requeue = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = requeue(take(3))
  end
  return answers
end
