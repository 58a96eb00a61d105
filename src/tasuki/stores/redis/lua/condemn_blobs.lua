-- condemn_blobs(epoch, unused_since, budget_bytes or '', squeezed_since, limit)
--   -> {what all live blobs take, then for each {sha256, generation, size_bytes, 1 if stored}}
-- Reads {app}:epoch; takes the longest untouched blobs from {app}:blobs, where those are that no job refers to, and puts them
-- into {app}:condemned; {app}:blob:{sha256}, {app}:blob_bytes.

local function condemned_before(limit)
  local places = {}
  for _, member in ipairs(redis.call('ZRANGE', key.condemned, 0, limit - 1)) do
    local sha256, generation, size_bytes, is_stored = string.match(member, '^%d+:(%x+):(%d+):(%d+):(%d)$')
    places[#places + 1] = { sha256, generation, size_bytes, is_stored }
  end
  return places
end

local function condemn(member, score)
  local sha256 = string.sub(member, -64)
  local name = of('blob', sha256)
  local row = redis.call('HMGET', name, 'generation', 'size_bytes', 'stored')
  local condemned = string.format('%s:%s:%s:%s', member, row[1], row[2], row[3])
  write('ZREM', key.blobs, member)
  write('ZADD', key.condemned, score, condemned)
  write('HDEL', name, 'generation', 'size_bytes', 'stored', 'seq', 'touched_at')
  write('HSET', name, 'condemned:' .. row[1], condemned)
  write('INCRBY', key.blob_bytes, '-' .. row[2])
  return { sha256, row[1], row[2], row[3] }
end

verbs.condemn_blobs = function()
  local epoch, unused_since, budget_bytes, squeezed_since, limit = take(5)
  check_epoch(epoch)
  unused_since, squeezed_since = tonumber(unused_since), math.max(tonumber(unused_since), tonumber(squeezed_since))
  local budget = tonumber(given(budget_bytes) or math.huge)
  local places = condemned_before(tonumber(limit))
  while #places < tonumber(limit) do
    local first = redis.call('ZRANGE', key.blobs, 0, 0, 'WITHSCORES')
    local is_over = tonumber(redis.call('GET', key.blob_bytes) or 0) > budget
    if not first[1] or tonumber(first[2]) >= (is_over and squeezed_since or unused_since) then
      break
    end
    places[#places + 1] = condemn(first[1], first[2])
  end
  return { redis.call('GET', key.blob_bytes) or '0', places }
end
