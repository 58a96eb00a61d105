-- Caches: names of files, and the blobs that have their bytes. A cache refers to its blobs as a job does, as cache:{cache_id}.

-- put_cache(count, then for each cache_id, target, owner, count of files, then for each name, sha256, size_bytes, its path without case)
--   -> for each {'stored', number of new files}, {'target', that of the cache}, {'other', name, its sha256}, {'clash', name, other name}
--      or {'missing', sha256, …}
-- {app}:cache:{cache_id}, {app}:cache_paths:{cache_id}, {app}:caches, {app}:owners:{sha256}, {app}:blobs; reads {app}:blob:{sha256}.

-- Calls `visit` for each folder of a path, until it returns something, and returns that.
local function for_folders(path, visit)
  local at = string.find(path, '/', 1, true)
  while at do
    local found = visit(string.sub(path, 1, at - 1))
    if found then
      return found
    end
    at = string.find(path, '/', at + 1, true)
  end
end

-- Returns a name of the cache that cannot be beside a new one with this path.
local function clashing(paths, path)
  local there = redis.call('HGET', paths, path)
  if there then
    return string.sub(there, 2)
  end
  return for_folders(path, function(folder)
    local file = redis.call('HGET', paths, folder)
    return file and string.sub(file, 1, 1) == 'f' and string.sub(file, 2)
  end)
end

local function add_paths(paths, name, path)
  write('HSET', paths, path, 'f' .. name)
  for_folders(path, function(folder)
    write('HSET', paths, folder, 'd' .. name)
  end)
end

local function first_clash(files, known, paths)
  for i, file in ipairs(files) do
    local there = not known[i] and clashing(paths, file[4])
    if there then
      return { 'clash', there, file[1] }
    end
  end
end

local function first_other(files, known)
  for i, file in ipairs(files) do
    local there = known[i] and cmsgpack.unpack(known[i])
    if there and (there[1] ~= file[2] or there[2] ~= file[3]) then
      return { 'other', file[1], there[1] }
    end
  end
end

local function missing_among(files)
  local missing, seen = {}, {}
  for _, file in ipairs(files) do
    if not seen[file[2]] and not blobs.is_stored(file[2], file[3]) then
      missing[#missing + 1] = file[2]
      seen[file[2]] = true
    end
  end
  table.sort(missing)
  return #missing > 0 and { 'missing', unpack(missing) } or nil
end

local function put()
  local cache_id, target, owner = take(3)
  local files, known, name, paths = {}, {}, of('cache', cache_id), of('cache_paths', cache_id)
  for i = 1, take_number() do
    files[i] = { take(4) }
    known[i] = redis.call('HGET', name, files[i][1])
  end
  local begun = redis.call('HGET', key.caches, cache_id)
  if begun and cmsgpack.unpack(begun)[1] ~= target then
    return { 'target', cmsgpack.unpack(begun)[1] }
  end
  local refused = first_other(files, known) or missing_among(files) or first_clash(files, known, paths)
  if refused then
    return refused
  end
  local added = 0
  for i, file in ipairs(files) do
    if not known[i] then
      write('HSET', name, file[1], cmsgpack.pack({ file[2], file[3], target, owner, now.text }))
      add_paths(paths, file[1], file[4])
      blobs.refer(file[2], 'cache:' .. cache_id)
      added = added + 1
    end
  end
  if not begun and added > 0 then
    write('HSET', key.caches, cache_id, cmsgpack.pack({ target, owner, now.text }))
  end
  return { 'stored', tostring(added) }
end

verbs.put_cache = function()
  local answers = {}
  for i = 1, take_number() do
    answers[i] = put()
  end
  return answers
end

-- remove_cache(count, then for each cache_id, target) -> for each the number of its files, 0 if it has another target
-- {app}:cache:{cache_id}, {app}:cache_paths:{cache_id}, {app}:caches, {app}:owners:{sha256}, {app}:blobs.

local function remove(cache_id, target)
  local begun = redis.call('HGET', key.caches, cache_id)
  if not begun or cmsgpack.unpack(begun)[1] ~= target then
    return '0'
  end
  local name, files, seen = of('cache', cache_id), 0, {}
  for _, packed in ipairs(redis.call('HVALS', name)) do
    local sha256 = cmsgpack.unpack(packed)[1]
    files = files + 1
    if not seen[sha256] then
      seen[sha256] = true
      blobs.unrefer(sha256, 'cache:' .. cache_id)
    end
  end
  write('DEL', name)
  write('DEL', of('cache_paths', cache_id))
  write('HDEL', key.caches, cache_id)
  return tostring(files)
end

verbs.remove_cache = function()
  return for_each(remove, 2)
end

-- cached_files(count, then for each cache_id, name) -> for each the packed file, or false
-- Reads {app}:cache:{cache_id}.

reads.cached_files = function()
  return for_each(function(cache_id, name)
    return redis.call('HGET', of('cache', cache_id), name)
  end, 2)
end

-- cache(cache_id) -> name, packed file, …
-- Reads {app}:cache:{cache_id}.

reads.cache = function()
  return redis.call('HGETALL', of('cache', (take(1))))
end

-- caches() -> cache_id, packed facts, …
-- Reads {app}:caches.

reads.caches = function()
  return redis.call('HGETALL', key.caches)
end
