-- place_blobs(count, then for each sha256, size_bytes) -> for each {size_bytes, generation, 1 if stored}
-- {app}:blob:{sha256}, {app}:blobs, {app}:blob_bytes.

-- One that was never used for these bytes: see stores/generations.py.
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
  local answers = {}
  for i = 1, take_number() do
    answers[i] = place(take(2))
  end
  return answers
end
