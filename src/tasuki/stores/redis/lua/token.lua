-- token(count, sha256, …) -> for each field, value, …
-- Reads {app}:token:{sha256}.

reads.token = function()
  local answers = {}
  for i, sha256 in ipairs(take_list()) do
    answers[i] = redis.call('HGETALL', of('token', sha256))
  end
  return answers
end
