-- The verbs of clients.

-- submit(on_failed, count of queues, then for each priority, group, kind, subject, head of a record without and with payload,
--   count of jobs, the job_ids, then for each the number of its queue, spec, payload)
--   -> for each 'created', {'missing', sha256, …} or {'known', id}
-- Queue 0: the job waits for a time, or refers to blobs; its facts say more.
-- Writes of a new job: {app}:job|spec|payload|status:{id}, its queue or {app}:delay, {app}:late, {app}:jobs, {app}:counts,
-- {app}:owners:{sha256}. Reads {app}:blob:{sha256}. Of a job that runs again: see requeue.

local function read_queues()
  local found = {}
  for i = 1, take_number() do
    local priority, group, kind, subject, head, head_with_payload = take(6)
    local shown = subject == OWN.subject and '1' or false
    local tail = cmsgpack.pack(shown)
    found[tostring(i)] = {
      facts = { priority = priority, kind = kind, subject = subject },
      group = group,
      shown = shown,
      head = head .. tail,
      with_payload = head_with_payload .. tail,
      count = 0,
    }
  end
  return found
end

local TEXT = 160 -- begins a msgpack text of less than 32 bytes, with its length

-- Stores a job that waits for nothing and refers to nothing, the common case. The head is its record up to seq.
local function store_plain(id, seq, place, spec, payload)
  -- Looked up only now: a queue is indexed from the first job that waits in it.
  local queue = place.queue or queues.of(place.facts, place.group)
  place.queue, place.count = queue, place.count + 1
  put(of('spec', id), spec)
  local head = place.head
  if payload ~= '' then
    put(of('payload', id), payload)
    head = place.with_payload
  end
  put(of('job', id), head .. string.char(TEXT + #seq) .. seq .. now.packed)
  rank(key.jobs, seq, id)
  queues.add_new(queue, seq, id)
  if place.shown then
    jobs.publish_status({ id = id, state = 'PENDING', shown = place.shown }, '')
  end
  return 'created'
end

-- Stores a job whose facts are read from `spec`.
local function store_new(id, seq, spec, payload)
  local facts = jobs.read_facts(spec)
  local missing = blobs.missing(facts)
  if missing then
    return { 'missing', unpack(missing) }
  end
  put(of('spec', id), spec)
  if payload ~= '' then
    put(of('payload', id), payload)
  end
  jobs.submit(id, seq, facts, {
    group = facts.group,
    shown = facts.subject == OWN.subject and '1',
    payload = payload ~= '' and '1',
    not_before = facts.not_before,
    not_after = facts.not_after,
  })
  for _, sha256 in ipairs(blobs.inputs_of(facts)) do
    blobs.refer(sha256, id)
  end
  return 'created'
end

local function run_again(job, asked)
  local facts = jobs.facts(job)
  local is_same = facts.body_hash == asked.body_hash and facts.submitter == asked.submitter
  if is_same and TERMINAL[job.state] and job.state ~= 'SUCCEEDED' and jobs.has_payload(job) then
    jobs.requeue(job, asked.submitter, 'submitted again')
  end
end

verbs.submit = function()
  local on_failed = take(1)
  local places = read_queues()
  local ids, answers, fresh = take_list(), {}, {}
  local is_any_known = outsiders.is_any_known(ids)
  if is_any_known then
    jobs.preload(ids)
  end
  local seq = write('HINCRBY', key.sequence, 'job', #ids) - #ids -- a number for each; those of known jobs stay unused
  for i, id in ipairs(ids) do
    local number, spec, payload = take(3)
    if fresh[id] then
      jobs.flush()
    end
    local job = (is_any_known or fresh[id]) and outsiders.load(id)
    if job then
      if on_failed == 'rerun' then
        run_again(job, jobs.read_facts(spec))
      end
      answers[i] = { 'known', id }
    elseif places[number] then
      answers[i] = store_plain(id, string.format('%d', seq + i), places[number], spec, payload)
      fresh[id] = true
    else
      answers[i] = store_new(id, seq + i, spec, payload)
      fresh[id] = true
    end
  end
  for _, place in pairs(places) do
    jobs.count(place.group, 'PENDING', place.count)
  end
  return answers
end

-- cancel(count, then for each job_id, actor, reason, the outcome if it is canceled at once)
--   -> for each {state or false}; with '1', worker_id, lease_id if it was asked of its worker; with '', group if it ended now
-- A waiting job ends: {app}:job|outcome|status:{id}, its queue or {app}:delay, {app}:late, {app}:ended, {app}:lease:{id} of an
-- orphan. A leased one: {app}:job:{id} cancel_requested. Both: {app}:incidents:{id}.

local function cancel(id, actor, reason, packed)
  local job = outsiders.load(id)
  if not job then
    return { false }
  end
  if TERMINAL[job.state] then
    return { job.state }
  end
  if READY[job.state] then
    jobs.add_incident(job, 'canceled', '', actor, reason)
    jobs.finish(job, 'cancel', {}, { packed = packed }, reason)
    return { job.state, '', job.group }
  end
  if not job.cancel_requested then
    jobs.add_incident(job, 'cancel_requested', job.assigned_worker_id, actor, reason)
    jobs.change(job, { cancel_requested = '1' .. reason }, '')
  end
  return { job.state, '1', job.assigned_worker_id, job.lease_id }
end

verbs.cancel = function()
  return for_each(cancel, 4)
end

-- requeue(count, then for each job_id, actor, reason, generation that it must have or "")
--   -> for each {1 if done, state or false, group}
-- {app}:job|status|incidents:{id}, its queue or {app}:delay, {app}:late; {app}:ended, {app}:dlq; deletes {app}:outcome:{id},
-- {app}:result|summary|freqs:{id}, {app}:retry_count:{id}. {app}:payload:{id} and {app}:status:{id} no longer expire.

local function requeue(id, actor, reason, generation)
  local job = jobs.load(id)
  local may_run = job and TERMINAL[job.state] and (generation == '' or tonumber(generation) == (tonumber(job.generation) or 0))
  if not may_run or not jobs.has_payload(job) then
    return { '0', job and job.state or false, job and job.group or '' }
  end
  jobs.requeue(job, actor, reason)
  return { '1', job.state, job.group }
end

verbs.requeue = function()
  return for_each(requeue, 4)
end
