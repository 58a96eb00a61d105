-- add_token(token_id, sha256, created_by, detail, then count and field, value, …) -> {'added'}, or the rows that have its id or
-- hash {app}:token:{sha256}, {app}:tokens, {app}:token_ids, {app}:audit.

verbs.add_token = function()
  local token_id, sha256, created_by, detail = take(4)
  local fields = take_list()
  local same_id = redis.call('HGET', key.token_ids, token_id)
  local known = {}
  if same_id then
    known[1] = redis.call('HGETALL', of('token', same_id))
  end
  if sha256 ~= same_id and redis.call('EXISTS', of('token', sha256)) == 1 then
    known[#known + 1] = redis.call('HGETALL', of('token', sha256))
  end
  if #known > 0 then
    return known
  end
  write('HSET', of('token', sha256), unpack(fields))
  write('ZADD', key.tokens, next_of('token'), sha256)
  write('HSET', key.token_ids, token_id, sha256)
  tokens.audit(created_by, 'token.create', token_id, detail)
  return { 'added' }
end
