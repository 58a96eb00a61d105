-- ended_among(count, job_id, …) -> those that are terminal or do not exist
-- Reads {app}:job:{id}.

reads.ended_among = function()
  local ended = {}
  for _, id in ipairs(take_list()) do
    local job = jobs.load(id)
    if not job or TERMINAL[job.state] then
      ended[#ended + 1] = id
    end
  end
  return ended
end
