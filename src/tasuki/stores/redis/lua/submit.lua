-- submit(on_failed, count of queues, then for each priority, group, kind, subject, head of a record without and with payload,
--   count of jobs, the job_ids, then for each the number of its queue, spec, payload)
--   -> for each 'created', {'missing', sha256, …} or {'known', id}
-- Queue 0: the job waits for a time, or refers to blobs; its facts say more.
-- Writes of a new job: {app}:job|spec|payload|status:{id}, its queue or {app}:delay, {app}:late, {app}:jobs, {app}:counts,
-- {app}:owners:{sha256}. Reads {app}:blob:{sha256}. Of a job set going again: see requeue.

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

-- The common case: it waits for nothing and refers to nothing. The head is its record up to seq.
local function store_plain(id, seq, place, spec, payload)
  -- Asked for only now: a queue is known from the first job that waits in it.
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
    jobs.show_status({ id = id, state = 'PENDING', shown = place.shown }, '')
  end
  return 'created'
end

-- Its facts are read from `spec`.
local function store_new(id, seq, spec, payload)
  local facts = read_facts_of(spec)
  local inputs = blobs.inputs_of(facts)
  local missing = blobs.missing(inputs)
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
  for _, sha256 in ipairs(inputs) do
    blobs.refer(sha256, id)
  end
  return 'created'
end

local function run_again(job, asked)
  local facts = jobs.facts(job)
  local is_same = facts.body_hash == asked.body_hash and facts.submitter == asked.submitter
  if is_same and TERMINAL[job.state] and job.state ~= 'SUCCEEDED' and jobs.is_whole(job) then
    jobs.again(job, asked.submitter, 'submitted again')
  end
end

verbs.submit = function()
  local on_failed = take(1)
  local places = read_queues()
  local ids, answers, fresh = take_list(), {}, {}
  local is_any_known = own_jobs.is_any_known(ids)
  if is_any_known then
    jobs.preload(ids)
  end
  local seq = write('HINCRBY', key.sequence, 'job', #ids) - #ids -- a number for each; those of known jobs stay unused
  for i, id in ipairs(ids) do
    local number, spec, payload = take(3)
    if fresh[id] then
      flush()
    end
    local job = (is_any_known or fresh[id]) and own_jobs.load(id)
    if job then
      if on_failed == 'rerun' then
        run_again(job, read_facts_of(spec))
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
