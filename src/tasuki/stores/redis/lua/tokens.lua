-- tokens() -> for each token field, value, …, the oldest first
-- Reads {app}:tokens and {app}:token:{sha256}.

reads.tokens = function()
  local answers = {}
  for i, sha256 in ipairs(redis.call('ZRANGE', key.tokens, 0, -1)) do
    answers[i] = redis.call('HGETALL', of('token', sha256))
  end
  return answers
end
