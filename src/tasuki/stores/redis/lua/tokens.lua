-- The verbs on tokens, and the audit of what was done to them.

local function add_audit(actor, action, target, detail)
  write('LPUSH', key.audit, cmsgpack.pack({ now.text, actor, action, target, detail }))
end

-- Returns field, value, … of a token, none if its key is of another type; whether its fields say that it is revoked; and whether
-- it is: an outsider may have put its hash into {app}:revoked_tokens, and when that was is not known.
local function row_of(sha256)
  local name = of('token', sha256)
  local row = redis.pcall('HGETALL', name)
  if row.err or #row == 0 then
    return {}, false, true
  end
  local is_recorded = redis.call('HEXISTS', name, 'revoked_at') == 1
  local is_revoked = is_recorded or redis.call('SISMEMBER', key.revoked, sha256) == 1
  if is_revoked and not is_recorded then
    row[#row + 1], row[#row + 2] = 'revoked_at', '0'
  end
  return row, is_recorded, is_revoked
end

-- add_token(token_id, sha256, created_by, detail, then count and field, value, …)
--   -> {'added'}, or the rows that have its id or hash
-- {app}:token:{sha256}, {app}:tokens, {app}:token_ids, {app}:audit.

verbs.add_token = function()
  local token_id, sha256, created_by, detail = take(4)
  local fields = take_list()
  local same_id = redis.call('HGET', key.token_ids, token_id)
  local known = {}
  if same_id then
    known[1] = row_of(same_id)
  end
  if sha256 ~= same_id and redis.call('EXISTS', of('token', sha256)) == 1 then
    known[#known + 1] = row_of(sha256)
  end
  if #known > 0 then
    return known
  end
  write('HSET', of('token', sha256), unpack(fields))
  write('ZADD', key.tokens, next_of('token'), sha256)
  write('HSET', key.token_ids, token_id, sha256)
  add_audit(created_by, 'token.create', token_id, detail)
  return { 'added' }
end

-- revoke_token(token_id, actor) -> 1, or 0 if it is unknown or its row says that it is revoked
-- {app}:token:{sha256}, {app}:revoked_tokens, {app}:audit.

verbs.revoke_token = function()
  local token_id, actor = take(2)
  local sha256 = redis.call('HGET', key.token_ids, token_id)
  local row, is_recorded = row_of(sha256 or '')
  if #row == 0 or is_recorded then
    return '0'
  end
  write('HSET', of('token', sha256), 'revoked_at', now.text, 'revoked_by', actor)
  write('SADD', key.revoked, sha256)
  add_audit(actor, 'token.revoke', token_id, '')
  return '1'
end

-- note(actor, action, target, detail) -> 1
-- {app}:audit.

verbs.note = function()
  add_audit(take(4))
  return '1'
end

local function rows_of(sha256s)
  local answers = {}
  for i, sha256 in ipairs(sha256s) do
    answers[i] = row_of(sha256)
  end
  return answers
end

-- token(count, sha256, …) -> for each field, value, …
-- Reads {app}:token:{sha256} and {app}:revoked_tokens.

reads.token = function()
  return rows_of(take_list())
end

-- tokens() -> for each token field, value, …, the oldest first
-- Reads {app}:tokens, {app}:token:{sha256} and {app}:revoked_tokens.

reads.tokens = function()
  return rows_of(redis.call('ZRANGE', key.tokens, 0, -1))
end

-- revoked_among(count, token_id, …) -> the tokens that are revoked or unknown
-- Reads {app}:token_ids, {app}:token:{sha256} and {app}:revoked_tokens.

reads.revoked_among = function()
  local found = {}
  for _, token_id in ipairs(take_list()) do
    local _, _, is_revoked = row_of(redis.call('HGET', key.token_ids, token_id) or '')
    if is_revoked then
      found[#found + 1] = token_id
    end
  end
  return found
end

-- audit(limit, before) -> the number of the first entry, the entries as msgpack, the newest first
-- Reads {app}:audit. `before`: entries with lower numbers; 0: from the newest on. The oldest entry has the number 1.

reads.audit = function()
  local limit, before = take_number(), take_number()
  local length = redis.call('LLEN', key.audit)
  local start = before > 0 and math.max(0, length - before + 1) or 0
  local found = redis.call('LRANGE', key.audit, start, start + limit - 1)
  table.insert(found, 1, length - start)
  return found
end
