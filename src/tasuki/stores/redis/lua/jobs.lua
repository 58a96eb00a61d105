-- Jobs, and all that follows when one changes: queue or index, counters, status, incidents.
--
-- {app}:job:{id} is the msgpack of the fields that change: `JobRecord` in codec.py has their order, and `read_record` and
-- `pack_record` are rendered from it. {app}:spec:{id} is everything that never changes: the length of the facts (4 bytes), the
-- facts (`SpecFacts` in codec.py), and the JobSpec without its payload. All values are texts; none, no and zero are absent.

local loaded = {} -- id -> job, as far as this script has looked
local changed, changed_size = {}, 0 -- jobs whose record is to be written
local gained = {} -- group -> counter -> by how much this turn changes it

local function read(id, packed)
  local job = read_record(id, packed)
  loaded[id] = job
  return job
end

function jobs.load(id)
  local job = loaded[id]
  if not job then
    local packed = redis.call('GET', of('job', id))
    job = packed and read(id, packed) or nil
  end
  return job
end

-- Loads many jobs in one command.
function jobs.preload(ids)
  local unknown, names = {}, {}
  for _, id in ipairs(ids) do
    if not loaded[id] then
      unknown[#unknown + 1] = id
      names[#names + 1] = of('job', id)
    end
  end
  for i, packed in ipairs(read_many(names)) do
    if packed then
      read(unknown[i], packed)
    end
  end
end

-- Returns the facts of a value of {app}:spec:{id}.
function jobs.read_facts(value)
  local _, row = cmsgpack.unpack_one(value, 4)
  return read_facts(row)
end

-- Returns the facts of a job, which never change.
function jobs.facts(job)
  if not job.facts then
    job.facts = jobs.read_facts(redis.call('GET', of('spec', job.id)))
  end
  return job.facts
end

local function mark(job)
  if not job.is_changed then
    job.is_changed = true
    changed_size = changed_size + 1
    changed[changed_size] = job
  end
end

-- Reads the facts of many loaded jobs in one command.
function jobs.preload_facts(ids)
  local bare, names = {}, {}
  for _, id in ipairs(ids) do
    local job = loaded[id]
    if job and not job.facts then
      bare[#bare + 1], names[#names + 1] = job, of('spec', id)
    end
  end
  for i, value in ipairs(read_many(names)) do
    bare[i].facts = value and jobs.read_facts(value) or nil
  end
end

-- Counts the version of a job whose fields were set.
function jobs.touch(job)
  job.version = plus_one(job.version)
  mark(job)
end

-- Sets fields; false removes one. No version is counted.
function jobs.set(job, changes)
  for field, value in pairs(changes) do
    job[field] = value or nil
    job.has_rare = job.has_rare or RARE[field]
  end
  mark(job)
end

local function rare_of(job)
  local rare = nil
  for name in pairs(RARE) do
    if job[name] then
      rare = rare or {}
      rare[name] = job[name]
    end
  end
  return rare
end

local function flush_records()
  for i = 1, changed_size do
    local job = changed[i]
    job.is_changed = nil
    if not job.is_deleted then
      put(of('job', job.id), pack_record(job, job.has_rare and rare_of(job)))
    end
  end
  changed_size = 0
end

-- Writes everything that a verb collected.
function jobs.flush()
  flush_records()
  flush_strings()
  flush_ranks()
end

function jobs.count(group, state, by)
  local counters = gained[group]
  if not counters then
    counters = {}
    gained[group] = counters
  end
  local counter = COUNTED[state]
  counters[counter] = (counters[counter] or 0) + by
end

-- Counts a job from one state to another.
function jobs.recount(group, was, is)
  local from, to = COUNTED[was], COUNTED[is]
  if from ~= to then
    local counters = gained[group] or {}
    gained[group] = counters
    counters[from] = (counters[from] or 0) - 1
    counters[to] = (counters[to] or 0) + 1
  end
end

-- Writes the counters: before they are read, and at the end of a turn.
function jobs.flush_counts()
  for group, counters in pairs(gained) do
    for counter, by in pairs(counters) do
      local field = counter .. ':' .. group
      if by ~= 0 and write('HINCRBY', key.counts, field, by) == 0 then
        write('HDEL', key.counts, field)
      end
    end
  end
  gained = {}
end

function jobs.add_incident(job, kind, worker_id, actor, reason, attempt)
  local number = tonumber(attempt or job.attempt or 0)
  write('RPUSH', of('incidents', job.id), cmsgpack.pack({ now.text, kind, number, worker_id, actor, reason }))
end

-- Removes a job from the queue or index of its state.
function jobs.leave(job)
  if READY[job.state] then
    if job.delayed then
      unrank(key.delay, job.id)
    else
      queues.remove(job)
    end
    if job.not_after then
      unrank(key.late, job.id)
    end
  elseif LEASED[job.state] then
    unrank(key.index, job.id)
  else
    unrank(key.ended, job.id)
  end
end

-- Adds a job to the queue or index of its state; the index of leases is kept by `leases`.
local function enter(job, is_new)
  if READY[job.state] then
    if job.delayed then
      rank(key.delay, job.not_before, job.id)
    elseif is_new then
      queues.add_new(queues.of(jobs.facts(job), job.group), job.seq, job.id)
    else
      queues.add(job)
    end
    if job.not_after then
      rank(key.late, job.not_after, job.id)
    end
  elseif not LEASED[job.state] then
    rank(key.ended, job.finished_at, job.id)
  end
end

-- Writes the status that outsiders read. The reason for which a leased job was to be canceled comes before the detail.
function jobs.publish_status(job, detail)
  if job.shown then
    local asked = job.cancel_requested and job.state ~= 'SUCCEEDED' and string.sub(job.cancel_requested, 2) or ''
    detail = asked .. (asked ~= '' and detail ~= '' and '; ' or '') .. detail
    write_hash(of('status', job.id), 'status', WORDS[job.state], 'detail', detail, 'updated_at', now.text)
  end
end

function jobs.publish_retries(job, count)
  if job.shown then
    write('SET', of('retry_count', job.id), count)
  end
end

-- Creates a job that waits; the caller adds it to its queue.
function jobs.create(id, seq, fields)
  local job = { id = id, seq = tostring(seq), state = 'PENDING', created_at = now.text }
  loaded[id] = job
  jobs.set(job, fields)
  rank(key.jobs, job.seq, id)
  jobs.publish_status(job, '')
  jobs.count(job.group, job.state, 1)
  return job
end

function jobs.submit(id, seq, facts, fields)
  fields.delayed = fields.not_before and tonumber(fields.not_before) > now.wall and '1'
  local job = jobs.create(id, seq, fields)
  job.facts = facts
  enter(job, true)
end

-- Changes a job, which is not delayed any more unless `changes` say so. `detail` is for its status.
function jobs.change(job, changes, detail)
  local was = job.state
  local stays = LEASED[was] and LEASED[changes.state or was]
  if not stays then
    jobs.leave(job)
  end
  changes.delayed = changes.delayed or false
  jobs.set(job, changes)
  jobs.touch(job)
  jobs.recount(job.group, was, job.state)
  if not stays then
    enter(job)
  end
  if WORDS[job.state] ~= WORDS[was] or detail then
    jobs.publish_status(job, detail or '')
  end
end

-- Calls the command for each key that expires with a job that ended, besides its results, which are written with their TTL.
local function each_expiring(job, command, ...)
  if not job.shown then
    return
  end
  write(command, of('status', job.id), ...)
  if job.payload then
    write(command, of('payload', job.id), ...)
  end
  if job.failures or job.losses then
    write(command, of('retry_count', job.id), ...)
  end
end

function jobs.expire(job)
  each_expiring(job, 'EXPIRE', RESULT_TTL_S)
end

-- Makes a job terminal. `ended` is the outcome: see attempts.lua. Its message is the detail if none is given.
function jobs.finish(job, event, changes, ended, detail)
  changes.state = rules.after(job.state, event)
  changes.finished_at = now.text
  outcomes.write(job, ended, changes, job.shown and RESULT_TTL_S)
  leases.remove(job, changes)
  jobs.change(job, changes, detail ~= '' and detail or outcomes.message_of(ended.packed) or '')
  jobs.expire(job)
end

-- Makes a terminal job wait again; `actor` and `reason` are for its incident.
function jobs.requeue(job, actor, reason)
  local facts = jobs.facts(job)
  local last = outcomes.summary(job)
  local was = 'was ' .. job.state .. (last and ': ' .. last or '')
  jobs.add_incident(job, 'requeued', job.assigned_worker_id or '', actor, reason ~= '' and reason .. '; ' .. was or was)
  each_expiring(job, 'PERSIST')
  if job.dead then
    write('LREM', key.dlq, 0, job.id)
  end
  local changes = {
    state = rules.after(job.state, 'requeue'),
    generation = tostring((job.generation or 0) + 1),
    failures = false,
    losses = false,
    started_at = false,
    finished_at = false,
    cancel_requested = false,
    report_key = false,
    dead = false,
    not_before = facts.not_before or false,
    not_after = not rules.is_late(facts.not_after, now.wall) and facts.not_after or false,
  }
  changes.delayed = changes.not_before and tonumber(changes.not_before) > now.wall and '1' or false
  outcomes.clear(job, changes)
  drop(of('retry_count', job.id))
  jobs.change(job, changes)
end

-- Returns whether the job can run: its payload may have expired, or be an outsider's that is not there yet.
function jobs.has_payload(job)
  return not job.payload or redis.call('TYPE', of('payload', job.id))['ok'] == 'string'
end

-- Deletes every key of a job.
function jobs.delete(job)
  jobs.leave(job)
  jobs.count(job.group, job.state, -1)
  local changes = {}
  outcomes.clear(job, changes)
  for _, sha256 in ipairs(blobs.inputs_of(jobs.facts(job))) do
    blobs.unrefer(sha256, job.id)
  end
  if job.dead then
    write('LREM', key.dlq, 0, job.id)
  end
  for _, kind in ipairs({ 'job', 'spec', 'payload', 'status', 'lease', 'retry_count', 'incidents' }) do
    drop(of(kind, job.id))
  end
  unrank(key.jobs, job.id)
  loaded[job.id], job.is_deleted = nil, true
end

-- Returns the first jobs of a sorted set up to a score, in order of score and age. Entries without a job are removed.
function jobs.first_of(name, limit_score, limit)
  local flat = redis.call('ZRANGEBYSCORE', name, '-inf', limit_score, 'WITHSCORES', 'LIMIT', 0, limit)
  local found = {}
  for i = 1, #flat, 2 do
    found[#found + 1] = { id = flat[i], score = flat[i + 1] }
  end
  if #found == limit and limit > 0 then
    -- There may be more, and older, entries with the last score.
    local last = found[#found].score
    while #found > 0 and found[#found].score == last do
      found[#found] = nil
    end
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', name, last, last)) do
      found[#found + 1] = { id = id, score = last }
    end
  end
  local known = {}
  for _, entry in ipairs(found) do
    entry.job = jobs.load(entry.id)
    if entry.job then
      entry.score, entry.seq = tonumber(entry.score), tonumber(entry.job.seq)
      known[#known + 1] = entry
    else
      write('ZREM', name, entry.id)
    end
  end
  table.sort(known, function(one, other)
    if one.score ~= other.score then
      return one.score < other.score
    end
    return one.seq < other.seq
  end)
  for i = #known, limit + 1, -1 do
    known[i] = nil
  end
  return known
end
