-- How an attempt ended: {app}:outcome:{id}, with {app}:result|summary|freqs:{id} for what has a key of its own. An outcome comes
-- as { packed = msgpack, r = bytes, s = text, f = text, blob = sha256 of a result that is a blob }.

local outcomes = {}

local PARTS = { 'r', 's', 'f' }
local KEYS_OF_PARTS = { r = 'result', s = 'summary', f = 'freqs' }

local function set(name, value, ttl_s)
  if ttl_s then
    write('SET', name, value, 'EX', ttl_s)
  else
    put(name, value)
  end
end

-- With a ttl: the job ends with it.
function outcomes.write(job, ended, changes, ttl_s)
  outcomes.clear(job, changes)
  put(of('outcome', job.id), ended.packed)
  local flags = 'o'
  for i = 1, #PARTS do
    local part = PARTS[i]
    if ended[part] then
      set(of(KEYS_OF_PARTS[part], job.id), ended[part], ttl_s)
      flags = flags .. part
    end
  end
  if ended.blob then
    blobs.refer(ended.blob, job.id)
    changes.result_blob = ended.blob
  end
  changes.outcome = flags
end

function outcomes.clear(job, changes)
  if not job.outcome then
    return
  end
  drop(of('outcome', job.id))
  for part, kind in pairs(KEYS_OF_PARTS) do
    if string.find(job.outcome, part, 2, true) then
      drop(of(kind, job.id))
    end
  end
  if job.result_blob and not string.find(jobs.facts(job).inputs or '', job.result_blob, 1, true) then
    blobs.unrefer(job.result_blob, job.id)
  end
  changes.outcome = false
  changes.result_blob = false
end

-- One that the store makes itself.
function outcomes.made(error_code, message)
  return { packed = cmsgpack.pack({ error_code = error_code, message = message }) }
end

-- The outcome in a few words, nil if there is none.
function outcomes.last_words(job)
  if not job.outcome then
    return nil
  end
  -- Bytes in the worker's own notes are more than this reader of msgpack knows; then the code words are lost, not the turn.
  local readable, outcome = pcall(cmsgpack.unpack, redis.call('GET', of('outcome', job.id)))
  return readable and (outcome.message or outcome.error_code) or nil
end
