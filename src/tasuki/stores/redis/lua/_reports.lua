-- What a worker says of how its attempt ended: first all job_ids, then for each the arguments of `read_report`. Accepted only
-- from the holder of the current lease; an exact repeat of the report that ended the attempt is known by `said`.

local reports = {}

local ended = { packed = '', r = nil, s = nil, f = nil, blob = nil }
local report = { id = '', worker_id = '', lease_id = '', attempt = '', started_at = '', said = '', ended = ended }

-- One table for all of them, each until the next is read.
local function read_report(id, with_failure)
  report.id = id
  report.worker_id, report.lease_id, report.attempt, report.started_at, report.said = take(5)
  local packed, letters = take(2)
  ended.packed, ended.r, ended.s, ended.f, ended.blob = packed, nil, nil, nil, nil
  for i = 1, #letters do
    local letter = string.sub(letters, i, i)
    ended[letter == 'b' and 'blob' or letter] = take(1)
  end
  if with_failure then
    report.error_code, report.permanent, report.what = take(3)
  end
  return report
end

local function repeated_or_fenced(job, report)
  if job.said == report.said then
    return { 'repeated', job.state, '' }
  end
  local reason = string.format(
    'attempt %s of worker %s does not hold the lease; attempt %s is %s',
    report.attempt, report.worker_id, job.attempt or '0', job.state
  )
  jobs.tell(job, 'fenced', report.worker_id, '', reason, report.attempt)
  return { 'fenced', job.state, reason }
end

local function record(report, settle)
  local job = jobs.load(report.id)
  if not job then
    return { 'fenced', false, 'there is no such job' }
  end
  if not leases.is(job, report.worker_id, nil, report.lease_id, report.attempt) then
    return repeated_or_fenced(job, report)
  end
  if report.ended.blob and not blobs.is_stored(report.ended.blob) then
    return { 'blob_missing', job.state, 'its result, blob ' .. report.ended.blob .. ', is not stored; bring it again' }
  end
  local reason = settle(job, report)
  return reason and { 'recorded', job.state, reason } or 'recorded' -- of most there is nothing more to say
end

-- Answers for all; `settle(job, report)` does what the verb is for, and says why, if that
-- is not plain. Failures come with an error code, whether they are permanent, and words.
function reports.record_all(settle, with_failure)
  local ids, answers = take_list(), {}
  jobs.preload(ids)
  for i, id in ipairs(ids) do
    answers[i] = record(read_report(id, with_failure), settle)
  end
  return answers
end
