-- top_band() -> the highest priority of which a job is ready, or false
-- Reads {app}:queues:{priority} and {app}:queue.

reads.top_band = function()
  local priority = queues.top_band()
  return priority and tostring(priority) or false
end
