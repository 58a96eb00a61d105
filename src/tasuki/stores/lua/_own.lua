-- Jobs that outsiders make: SET {app}:payload:{id}, LPUSH {app}:queue {id}. They get a hash when the store first meets them.

local own_jobs = {}

local function has_payload(id)
  return redis.call('TYPE', of('payload', id))['ok'] == 'string'
end

local function adopt(id)
  if not has_payload(id) then
    return nil
  end
  put(of('spec', id), OWN.spec .. cmsgpack.pack(id))
  return jobs.create(id, next_of('job'), { group = OWN.group, payload = '1', shown = '1' })
end

local is_list_empty = nil

-- Whether anything waits in the list; asked for once.
function own_jobs.may_be_there()
  if is_list_empty == nil then
    is_list_empty = redis.call('EXISTS', key.queue) == 0
  end
  return not is_list_empty
end

-- The job of that id, also if it is an outsider's that nobody has met yet.
function own_jobs.load(id)
  local job = jobs.load(id)
  if not job and own_jobs.may_be_there() and has_payload(id) and redis.call('LPOS', key.queue, id) then
    job = adopt(id)
  end
  return job
end

-- The same after `jobs.preload`. `is_fresh`: it was written since.
function own_jobs.load_preloaded(id, is_fresh)
  local job = jobs.loaded(id)
  if job or not (is_fresh or own_jobs.may_be_there()) then
    return job
  end
  return own_jobs.load(id)
end

-- The jobs at the old end of the list, the oldest first, after leaving out `skip` of them. What is no job, or does not wait
-- here, or stands here twice, is thrown out: outsiders may push what they like.
function own_jobs.peek(skip, count)
  local found, seen = {}, {}
  local position = -1
  while #found < skip + count do
    local id = redis.call('LINDEX', key.queue, position)
    if not id then
      break
    end
    local job = jobs.load(id) or adopt(id)
    if job and not seen[id] and queues.is_waiting(job) and queues.is_own(jobs.facts(job)) then
      found[#found + 1] = job
      seen[id] = true
      position = position - 1
    else
      write('LREM', key.queue, -1, id)
      if seen[id] then -- the one nearer to the end is gone now, and the other one is in its place
        found, seen, position = {}, {}, -1
      end
    end
  end
  for _ = 1, math.min(skip, #found) do
    table.remove(found, 1)
  end
  return found
end

-- What outsiders pushed since the last look, at most `limit`, so that it is counted and can be asked for.
function own_jobs.meet(limit)
  local fresh = {}
  for _, id in ipairs(redis.call('LRANGE', key.queue, 0, limit - 1)) do
    if jobs.load(id) then
      break
    end
    fresh[#fresh + 1] = id
  end
  for i = #fresh, 1, -1 do
    adopt(fresh[i])
  end
end
