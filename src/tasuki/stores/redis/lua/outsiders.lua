-- Jobs that outsiders make: SET {app}:payload:{id}, LPUSH {app}:queue {id}. The store gives each a record when it first sees it.

local function has_payload(id)
  return redis.call('TYPE', of('payload', id))['ok'] == 'string'
end

local function adopt(id)
  if not has_payload(id) then
    return nil
  end
  local spec = OWN.spec .. cmsgpack.pack(id)
  put(of('spec', id), spec)
  local job = jobs.create(id, next_of('job'), { group = OWN.group, payload = '1', shown = '1' })
  job.facts = jobs.read_facts(spec)
  return job
end

local is_list_empty = nil

-- Returns whether the list holds anything; asked once per script.
function outsiders.may_exist()
  if is_list_empty == nil then
    is_list_empty = redis.call('EXISTS', key.queue) == 0
  end
  return not is_list_empty
end

-- Returns the job of that id, also an outsider's that has no record yet.
function outsiders.load(id)
  local job = jobs.load(id)
  if not job and outsiders.may_exist() and has_payload(id) and redis.call('LPOS', key.queue, id) then
    job = adopt(id)
  end
  return job
end

local function all_of(kind, ids)
  local names = {}
  for i, id in ipairs(ids) do
    names[i] = of(kind, id)
  end
  return names
end

-- Returns whether any of these is a job. One question for all: most are new, and then nothing else needs to be asked.
function outsiders.is_any_known(ids)
  return count_existing(all_of('job', ids)) > 0
    or outsiders.may_exist() and count_existing(all_of('payload', ids)) > 0
end

local function waits_here(job)
  return queues.is_waiting(job) and queues.is_own(jobs.facts(job))
end

-- Returns the jobs at the old end of the list, the oldest first, without the first `skip`. Entries that are no job, do not wait
-- here, or occur twice are removed: outsiders may push anything.
function outsiders.peek(skip, count)
  local found, seen, ids = {}, {}, nil
  repeat
    ids = redis.call('LRANGE', key.queue, -(skip + count), -(#found + 1))
    jobs.preload(ids)
    jobs.preload_facts(ids)
    for i = #ids, 1, -1 do
      local id = ids[i]
      local job = not seen[id] and (jobs.load(id) or adopt(id))
      if job and waits_here(job) then
        found[#found + 1] = job
        seen[id] = true
      else
        write('LREM', key.queue, -1, id)
        if seen[id] then -- the entry nearer to the end is gone now, and this one takes its place
          found, seen = {}, {}
          break
        end
      end
    end
  until #ids == 0 or #found == skip + count
  for _ = 1, math.min(skip, #found) do
    table.remove(found, 1)
  end
  return found
end

-- Gives a record to the jobs pushed since the last call, at most `limit`, so that they are counted. Returns how many.
function outsiders.record_new(limit)
  local fresh = {}
  for _, id in ipairs(redis.call('LRANGE', key.queue, 0, limit - 1)) do
    if jobs.load(id) then
      break
    end
    fresh[#fresh + 1] = id
  end
  local met = 0
  for i = #fresh, 1, -1 do
    met = met + (adopt(fresh[i]) and 1 or 0)
  end
  return met
end
