-- The rules of core.lifecycle that must be applied inside the script: the disposition of an attempt depends on counters that only
-- the store has. The table of transitions and all numbers are rendered from core.lifecycle (scripts.py); a test asks both sides
-- the same questions.

local rules = {}

-- Incident kind for each event that ends an attempt without success.
rules.kinds = {
  retry = 'failed',
  fail = 'dead_lettered',
  time_out = 'dead_lettered',
  lose = 'lost',
  orphan = 'orphaned',
  cancel = 'canceled',
}

function rules.after(state, event)
  return TRANSITIONS[state][event]
end

local function disposition(state, event, delay_s, failures, losses, reason)
  return {
    event = event,
    state = rules.after(state, event),
    delay_s = delay_s,
    failures = failures,
    losses = losses,
    reason = reason,
  }
end

function rules.retry_delay_s(backoff_s, n)
  return math.min(RETRY_DELAY_MAX_S, backoff_s * 2 ^ math.min(n, 60))
end

-- Returns the disposition of an attempt that failed. `what` describes the failure; it may ask for a delay of its own.
function rules.after_failure(state, job, facts, error_code, permanent, what, asked_s)
  local failures, losses = tonumber(job.failures or 0), tonumber(job.losses or 0)
  local max_retries = tonumber(facts.max_retries)
  if job.cancel_requested then
    local reason = error_code == 'CANCELED' and what or 'canceled; last attempt: ' .. what
    return disposition(state, 'cancel', 0, failures, losses, reason)
  end
  failures = failures + 1
  if not permanent and failures <= max_retries then
    local delay_s = asked_s or rules.retry_delay_s(tonumber(facts.backoff_s), failures - 1)
    local reason = string.format('%s; retry %d of %d in %g s', what, failures, max_retries, delay_s)
    return disposition(state, 'retry', delay_s, failures, losses, reason)
  end
  local why = permanent and 'permanent' or string.format('no retry left of %d', max_retries)
  return disposition(state, error_code == 'TIMED_OUT' and 'time_out' or 'fail', 0, failures, losses, what .. '; ' .. why)
end

-- Returns the disposition of an attempt whose lease ran out: its worker is dead, cut off or hung.
function rules.after_loss(state, job, facts, worker_id)
  local failures, losses = tonumber(job.failures or 0), tonumber(job.losses or 0)
  local max_losses = tonumber(facts.max_losses)
  if job.cancel_requested then
    return disposition(state, 'cancel', 0, failures, losses, 'canceled; worker ' .. worker_id .. ' was lost')
  end
  losses = losses + 1
  if losses > max_losses then
    local reason = string.format('worker %s was lost; no loss left of %d', worker_id, max_losses)
    return disposition(state, 'fail', 0, failures, losses, reason)
  end
  local what = string.format('worker %s was lost (loss %d of %d)', worker_id, losses, max_losses)
  if job.keep then
    return disposition(state, 'orphan', 0, failures, losses, what .. '; kept until the next grant')
  end
  local waits = facts.delay_first_loss and losses or losses - 1
  local delay_s = waits > 0 and rules.retry_delay_s(tonumber(facts.backoff_s), waits - 1) or 0
  return disposition(state, 'lose', delay_s, failures, losses, what)
end

function rules.is_late(not_after, wall)
  return not_after ~= nil and tonumber(not_after) < wall
end

function rules.too_late(not_after, last_failure)
  local message = string.format('it was too late to start: not_after was %.3f', tonumber(not_after))
  return last_failure and message .. '; last attempt: ' .. last_failure or message
end
