-- revoked_among(count, token_id, …) -> those that are revoked or unknown
-- Reads {app}:token_ids and {app}:revoked_tokens.

reads.revoked_among = function()
  local found = {}
  for _, token_id in ipairs(take_list()) do
    local sha256 = redis.call('HGET', key.token_ids, token_id)
    if not sha256 or redis.call('SISMEMBER', key.revoked, sha256) == 1 then
      found[#found + 1] = token_id
    end
  end
  return found
end
