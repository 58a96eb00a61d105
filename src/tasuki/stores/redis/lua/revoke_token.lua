-- revoke_token(token_id, actor) -> 1, or 0 if it is unknown or revoked
-- {app}:token:{sha256}, {app}:revoked_tokens, {app}:audit.

verbs.revoke_token = function()
  local token_id, actor = take(2)
  local sha256 = redis.call('HGET', key.token_ids, token_id)
  if not sha256 or redis.call('SISMEMBER', key.revoked, sha256) == 1 then
    return '0'
  end
  write('HSET', of('token', sha256), 'revoked_at', now.text, 'revoked_by', actor)
  write('SADD', key.revoked, sha256)
  tokens.audit(actor, 'token.revoke', token_id, '')
  return '1'
end
