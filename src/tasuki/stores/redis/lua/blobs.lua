-- Blobs: which bytes exist, and which jobs refer to them. A blob without a reference is in {app}:blobs, where collection finds it
-- without looking at the others.

-- Seq first, so that blobs touched at the same moment are in the order in which they came.
local function member_of(seq, sha256)
  return string.format('%015d:%s', seq, sha256)
end

function blobs.is_stored(sha256, size_bytes)
  local row = redis.call('HMGET', of('blob', sha256), 'stored', 'size_bytes')
  return row[1] == '1' and row[2] == size_bytes
end

-- Returns the input blobs that no job may refer to now (not stored, or of another size), each once, in order; nil if there is none.
function blobs.missing(facts)
  local missing, seen = {}, {}
  for sha256, size_bytes in string.gmatch(facts.inputs or '', '(%x+):(%d+);') do
    if not seen[sha256] and not blobs.is_stored(sha256, size_bytes) then
      missing[#missing + 1] = sha256
      seen[sha256] = true
    end
  end
  table.sort(missing)
  return #missing > 0 and missing or nil
end

function blobs.refer(sha256, id)
  write('SADD', of('owners', sha256), id)
  local seq = redis.call('HGET', of('blob', sha256), 'seq')
  write('ZREM', key.blobs, member_of(seq, sha256))
end

function blobs.unrefer(sha256, id)
  local owners = of('owners', sha256)
  write('SREM', owners, id)
  local row = redis.call('HMGET', of('blob', sha256), 'seq', 'touched_at')
  if row[1] and redis.call('EXISTS', owners) == 0 then
    write('ZADD', key.blobs, row[2], member_of(row[1], sha256))
  end
end

function blobs.touch(sha256, seq)
  write('HSET', of('blob', sha256), 'touched_at', now.text)
  if redis.call('EXISTS', of('owners', sha256)) == 0 then
    write('ZADD', key.blobs, now.text, member_of(seq, sha256))
  end
end

-- Returns the hashes of the input blobs of a job.
function blobs.inputs_of(facts)
  local inputs = {}
  for sha256 in string.gmatch(facts.inputs or '', '(%x+):') do
    inputs[#inputs + 1] = sha256
  end
  return inputs
end

-- place_blobs(count, then for each sha256, size_bytes) -> for each {size_bytes, generation, 1 if stored}
-- {app}:blob:{sha256}, {app}:blobs, {app}:blob_bytes.

-- Returns a generation that was never used for these bytes: see stores/common.py.
local function next_generation(name)
  local generation = math.max(0, math.floor(now.wall) - GENERATIONS_BEGIN_AT)
  for _, field in ipairs(redis.call('HKEYS', name)) do
    local condemned = string.match(field, '^condemned:(%d+)$')
    if condemned then
      generation = math.max(generation, tonumber(condemned) + 1)
    end
  end
  return string.format('%d', generation)
end

local function place(sha256, size_bytes)
  local name = of('blob', sha256)
  local row = redis.call('HMGET', name, 'size_bytes', 'generation', 'stored', 'seq')
  if not row[2] then
    row = { size_bytes, next_generation(name), '0', next_of('blob') }
    write('HSET', name, 'size_bytes', size_bytes, 'generation', row[2], 'stored', '0', 'seq', row[4])
    write('INCRBY', key.blob_bytes, size_bytes)
  end
  blobs.touch(sha256, row[4])
  return { row[1], row[2], row[3] }
end

verbs.place_blobs = function()
  return for_each(place, 2)
end

-- blobs_stored(count, then for each sha256, generation, size_bytes) -> for each 1, or 0 if it was condemned meanwhile
-- {app}:blob:{sha256}, {app}:blobs, {app}:blob_bytes.

local function stored(sha256, generation, size_bytes)
  local name = of('blob', sha256)
  local row = redis.call('HMGET', name, 'generation', 'stored', 'seq', 'size_bytes')
  if row[1] ~= generation then
    return '0'
  end
  if row[2] ~= '1' then
    write('HSET', name, 'stored', '1', 'size_bytes', size_bytes)
    write('INCRBY', key.blob_bytes, string.format('%d', tonumber(size_bytes) - tonumber(row[4])))
  end
  blobs.touch(sha256, row[3])
  return '1'
end

verbs.blobs_stored = function()
  return for_each(stored, 3)
end

-- condemn_blobs(epoch, unused_since, budget_bytes or '', squeezed_since, limit)
--   -> {size of all live blobs, then for each {sha256, size_bytes, generation, 1 if stored}}
-- Reads {app}:epoch; moves the longest untouched blobs from {app}:blobs to {app}:condemned. {app}:blob:{sha256}, {app}:blob_bytes

local function condemned_before(limit)
  local places = {}
  for _, member in ipairs(redis.call('ZRANGE', key.condemned, 0, limit - 1)) do
    local sha256, generation, size_bytes, is_stored = string.match(member, '^%d+:(%x+):(%d+):(%d+):(%d)$')
    places[#places + 1] = { sha256, size_bytes, generation, is_stored }
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
  return { sha256, row[2], row[1], row[3] }
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

-- forget_blobs(epoch, count, then for each sha256, generation) -> how many
-- Reads {app}:epoch; removes condemned blobs from {app}:condemned and {app}:blob:{sha256}.

verbs.forget_blobs = function()
  check_epoch((take(1)))
  local forgotten = 0
  for _ = 1, take_number() do
    local sha256, generation = take(2)
    local name, field = of('blob', sha256), 'condemned:' .. generation
    local member = redis.call('HGET', name, field)
    if member then
      write('HDEL', name, field)
      write('ZREM', key.condemned, member)
      forgotten = forgotten + 1
    end
  end
  return tostring(forgotten)
end

-- blob_places(count, sha256, …) -> for each {size_bytes, generation, 1} or false
-- Reads {app}:blob:{sha256}.

reads.blob_places = function()
  local answers = {}
  for i, sha256 in ipairs(take_list()) do
    local row = redis.call('HMGET', of('blob', sha256), 'size_bytes', 'generation', 'stored')
    answers[i] = row[3] == '1' and row
  end
  return answers
end

-- blob_owners(sha256, limit) -> job_ids
-- Reads {app}:owners:{sha256}.

reads.blob_owners = function()
  local sha256, limit = take(2)
  local owners = redis.call('SMEMBERS', of('owners', sha256))
  for i = #owners, tonumber(limit) + 1, -1 do
    owners[i] = nil
  end
  return owners
end
