-- Jobs that outsiders make: SET {app}:payload:{id}, LPUSH {app}:queue {id}. The store gives each a record when it first sees it.
-- An entry that can never run becomes a dead letter; one whose payload is not there yet waits for it.

local function create(id, fields)
  local spec = OWN.spec .. cmsgpack.pack(id)
  put(of('spec', id), spec)
  fields.group, fields.payload, fields.shown = OWN.group, '1', '1'
  local job = jobs.create(id, next_of('job'), fields)
  job.facts = jobs.read_facts(spec)
  return job
end

-- Creates a job that is a dead letter from the start.
local function create_dead(id, reason)
  local job = create(id, { state = 'FAILED', finished_at = now.text, dead = '1' })
  local changes = {}
  outcomes.write(job, outcomes.of_store('INVALID', reason), changes)
  jobs.set(job, changes)
  jobs.add_incident(job, 'dead_lettered', '', '', reason)
  jobs.publish_status(job, reason)
  rank(key.ended, now.text, id)
  write('LPUSH', key.dlq, id)
  jobs.expire(job)
  notice(reason)
end

local function is_job_id(id)
  return #id <= JOB_ID_MAX_CHARS and id ~= RESERVED_JOB_ID and string.find(id, '^[%w_-][%w._-]*$') ~= nil
end

-- Makes a dead letter of an entry that is no job_id, under an id made of it, which also gets its payload.
local function refuse(entry)
  local id = 'refused-' .. redis.sha1hex(entry)
  if jobs.load(id) then
    return
  end
  local shown = string.gsub(string.sub(entry, 1, 40), '[^\32-\126]', '?')
  local reason = string.format(
    "%s had '%s' (%d bytes) as a job_id, which must be %s; push it under another job_id, or retry it as %s",
    key.queue, shown, #entry, JOB_ID_RULE, id
  )
  local old = of('payload', entry)
  if redis.call('TYPE', old)['ok'] == 'string' then
    put(of('payload', id), redis.call('GET', old))
    drop(old)
    jobs.flush()
  end
  create_dead(id, reason)
  jobs.publish_status({ id = entry, state = 'FAILED', shown = '1' }, reason)
  write('EXPIRE', of('status', entry), RESULT_TTL_S)
end

-- Makes a job wait for its payload. The longer it has waited, the later is the next look.
function outsiders.wait_for_payload(job)
  local waited_s = now.wall - tonumber(job.created_at)
  local not_before = text(now.wall + math.min(math.max(waited_s, 1), RETRY_DELAY_MAX_S))
  jobs.set(job, { delayed = '1', not_before = not_before })
  rank(key.delay, not_before, job.id)
end

-- Returns the job of an entry of the list, nil if it can never run.
local function adopt(id)
  if not is_job_id(id) then
    return refuse(id)
  end
  local name = of('payload', id)
  local found = redis.call('TYPE', name)['ok']
  if found == 'string' then
    return create(id, {})
  end
  if found == 'none' then
    local reason = string.format('%s had job %s before its payload; it waits until %s is set', key.queue, id, name)
    local job = create(id, {})
    outsiders.wait_for_payload(job)
    jobs.add_incident(job, 'no_payload', '', '', reason)
    jobs.publish_status(job, reason)
    notice(reason)
    return job
  end
  create_dead(id, string.format('%s is a %s and must be a string; DEL it, SET it, and retry the job', name, found))
end

local is_list_empty = nil

-- Returns whether the list holds anything; asked once per script.
function outsiders.may_exist()
  if is_list_empty == nil then
    is_list_empty = redis.call('EXISTS', key.queue) == 0
  end
  return not is_list_empty
end

local function count(kind, ids)
  local names = {}
  for i, id in ipairs(ids) do
    names[i] = of(kind, id)
  end
  return count_existing(names)
end

-- Returns the job of an entry. If it does not wait here, the entry is removed.
local function meet(id)
  local job = jobs.load(id) or adopt(id)
  if job and queues.is_waiting(job) and queues.is_own(jobs.facts(job)) then
    return job
  end
  write('LREM', key.queue, -1, id)
end

-- Returns the job of that id, also an outsider's that has no record yet.
function outsiders.load(id)
  local job = jobs.load(id)
  if not job and outsiders.may_exist() and count('payload', { id }) > 0 and redis.call('LPOS', key.queue, id) then
    job = meet(id)
  end
  return job
end

-- Returns whether any of these is a job. One question for all: most are new, and then nothing else needs to be asked.
function outsiders.is_any_known(ids)
  return count('job', ids) > 0 or outsiders.may_exist() and count('payload', ids) > 0
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
      if seen[id] then -- the entry nearer to the end goes, and this one takes its place
        write('LREM', key.queue, -1, id)
        found, seen = {}, {}
        break
      end
      local job = meet(id)
      if job then
        found[#found + 1] = job
        seen[id] = true
      else
        queues.looked_in_vain(1)
      end
    end
  until #ids == 0 or #found == skip + count or not queues.may_walk()
  for _ = 1, math.min(skip, #found) do
    table.remove(found, 1)
  end
  return found
end

-- Returns how many of these entries, the newest first, are jobs that had no record and wait here.
local function record(ids)
  local met = 0
  for i = #ids, 1, -1 do
    if not jobs.load(ids[i]) then
      met = met + (meet(ids[i]) and 1 or 0)
    end
  end
  return met
end

-- Gives a record to jobs that outsiders pushed, so that they are counted: to those above the first known entry, and to those that a
-- look at the next `limit` entries finds, which goes on at its place ({app}:walks) and begins again at the old end. Returns how many.
function outsiders.record_new(limit)
  local fresh = {}
  for _, id in ipairs(redis.call('LRANGE', key.queue, 0, limit - 1)) do
    if jobs.load(id) then
      break
    end
    fresh[#fresh + 1] = id
  end
  local met = record(fresh)
  if met < limit then
    local looked = tonumber(redis.call('HGET', key.walks, 'queue') or 0)
    local ids = redis.call('LRANGE', key.queue, -(looked + limit), -(looked + 1))
    if count('job', ids) < #ids then
      jobs.preload(ids)
      met = met + record(ids)
    end
    if #ids == limit then
      write('HSET', key.walks, 'queue', looked + limit)
    elseif looked > 0 then
      write('HDEL', key.walks, 'queue')
    end
  end
  if met > 0 then
    queues.came_back_to(queues.own)
  end
  return met
end
