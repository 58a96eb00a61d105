-- Which bytes exist, and which jobs refer to them. A blob that no job refers to stands in {app}:blobs, where collection finds it
-- without looking at the others.

local blobs = {}

-- Seq first, so that those touched in the same moment stand in the order in which they came.
local function member_of(seq, sha256)
  return string.format('%015d:%s', seq, sha256)
end

function blobs.is_stored(sha256)
  return redis.call('HGET', of('blob', sha256), 'stored') == '1'
end

-- Those of the list that no job may refer to now, each once, in order; nil if there are none.
function blobs.missing(sha256s)
  local missing, seen = {}, {}
  for _, sha256 in ipairs(sha256s) do
    if not seen[sha256] and not blobs.is_stored(sha256) then
      missing[#missing + 1] = sha256
    end
    seen[sha256] = true
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

-- The inputs of a job are kept as their hashes, one after the other.
function blobs.inputs_of(facts)
  local inputs = {}
  for sha256 in string.gmatch(facts.inputs or '', string.rep('%x', 64)) do
    inputs[#inputs + 1] = sha256
  end
  return inputs
end
