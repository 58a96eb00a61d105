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
  local answers = {}
  for i = 1, take_number() do
    answers[i] = stored(take(3))
  end
  return answers
end
