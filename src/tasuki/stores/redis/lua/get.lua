-- get(count, job_id, …) -> for each what _shows.lua makes of a job, or false
-- Reads every key of the jobs. An outsider's job that nobody has met yet gets its {app}:job:{id}.

reads.get = function()
  local answers = {}
  for i, id in ipairs(take_list()) do
    local job = shows.job(id, true)
    if not job and own_jobs.load(id) then
      flush()
      job = shows.job(id, true)
    end
    answers[i] = job
  end
  return answers
end
