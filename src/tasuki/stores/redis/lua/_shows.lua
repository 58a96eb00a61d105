-- Answers as they leave. What is large and can be read again (specs, payloads, results) is put in here, and not kept with the
-- turn.

local shows = {}

-- What the verb has gathered is written.
local function flush()
  jobs.flush()
  flush_strings()
  flush_ranks()
end

local function each(answers, show)
  local shown = {}
  for i, answer in ipairs(answers) do
    shown[i] = answer and show(answer)
  end
  return shown
end

-- {id, lease_id, attempt, ttl_s} becomes a whole grant, with spec and payload.
function shows.grants(answers)
  local names, shown = {}, {}
  for _, answer in ipairs(answers) do
    if answer then
      names[#names + 1] = of('spec', answer[1])
      names[#names + 1] = of('payload', answer[1])
    end
  end
  local values = read_many(names)
  local position = 0
  for i, answer in ipairs(answers) do
    if answer then
      shown[i] = { answer[1], answer[2], answer[3], answer[4], values[position + 1] or '', values[position + 2] or '' }
      position = position + 2
    else
      shown[i] = false
    end
  end
  return shown
end

function shows.assign(answers)
  return shows.grants(answers)
end

-- The same, flat: id, lease_id, attempt and so on become id, lease_id, attempt, spec, payload and so on.
local function flat_grants(answer)
  local names, size, shown, payloads = {}, 0, {}, {}
  for i = 1, #answer, 3 do
    local id = answer[i]
    local job = jobs.load(id)
    size = size + 1
    names[size] = of('spec', id)
    if job and job.payload then
      size = size + 1
      names[size], payloads[id] = of('payload', id), true
    end
  end
  local values, position = read_many(names), 0
  for i = 1, #answer, 3 do
    local place = (i - 1) / 3 * 5
    shown[place + 1], shown[place + 2], shown[place + 3] = answer[i], answer[i + 1], answer[i + 2]
    shown[place + 4], shown[place + 5] = values[position + 1] or '', payloads[answer[i]] and values[position + 2] or ''
    position = position + (payloads[answer[i]] and 2 or 1)
  end
  return shown
end

function shows.lease(answers)
  return each(answers, flat_grants)
end

-- All that Job is made of; false if there is no such job. Without `with_results` the bytes of the result are left out.
function shows.job(id, with_results)
  local job = jobs.load(id)
  if not job then
    return false
  end
  return {
    redis.call('GET', of('job', id)),
    redis.call('GET', of('spec', id)),
    redis.call('GET', of('payload', id)),
    job.lease_id and leases.expires_at(job) or false,
    redis.call('GET', of('outcome', id)),
    with_results and redis.call('GET', of('result', id)),
    redis.call('GET', of('summary', id)),
    redis.call('GET', of('freqs', id)),
  }
end

-- {'known', id} brings the job that was there before.
function shows.submit(answers)
  return each(answers, function(answer)
    if type(answer) == 'table' and answer[1] == 'known' then
      return { 'known', shows.job(answer[2], false) }
    end
    return answer
  end)
end
